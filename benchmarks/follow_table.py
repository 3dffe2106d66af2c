"""Follow a cost table at run time, from `costs_of_steps` to the choice: through which functions does it pass?

    python benchmarks/follow_table.py                  the walk of today, one line a function
    python benchmarks/follow_table.py --json FILE      and as data

Two ranks compile a small model; rank 0 is traced. The table passes through a function that has it, or a table made from
it, among its arguments. Each function counts once, where it is entered first. A return is a
step of that walk into a file that was left before.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from records import options

HERE = Path(__file__).parents[1]

BEGINS, ENDS = "costs_of_steps", "_best"
"""The functions of `planning/decide.py` that the walk begins with, and whose return is the choice."""


@dataclass(frozen=True)
class Walk:
    """Function bodies in the order in which the table came to them first, as `file:function`."""

    bodies: tuple[str, ...]

    @property
    def returns(self) -> int:
        """Count the steps into a file that was left before."""
        files = [body.partition(":")[0] for body in self.bodies]
        visits = [file for before, file in zip([None, *files], files, strict=False) if file != before]
        return len(visits) - len(set(visits))


class Follower:
    """Notes the functions of the package that are called with a followed table."""

    def __init__(self) -> None:
        from fxcomp.cost.table import CostTable

        self._kind = CostTable
        self._is_on = False
        self._tables: dict[int, Any] = {}
        self._seen: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        name = Path(code.co_filename)
        if "fxcomp" not in name.parts or HERE not in name.parents:
            if event == "call" and self._is_on and code.co_name in ("__init__", "__post_init__"):
                self._adopt(frame)
            return
        if event == "call":
            self._is_on |= code.co_name == BEGINS
            if self._is_on:
                self._enter(frame, code, name)
        elif event == "return" and code.co_name == ENDS:
            self._is_on = False

    def _adopt(self, frame: FrameType) -> None:
        """Follow a table that is made while one is followed."""
        made = frame.f_locals.get("self")
        if type(made) is self._kind:
            self._tables[id(made)] = made

    def _enter(self, frame: FrameType, code: CodeType, name: Path) -> None:
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(each) for each in code.co_varnames[:count]]
        if code.co_name == BEGINS:
            self._tables |= {id(each): each for each in given if type(each) is self._kind}
        if any(id(each) in self._tables for each in given):
            self._seen.setdefault(code, f"{name.relative_to(HERE)}:{code.co_qualname}")

    @property
    def walk(self) -> Walk:
        return Walk(tuple(self._seen.values()))


def compile_traced(rank: int, store: str, answer: str) -> None:
    """Compile a small model on one of two ranks; rank 0 writes its walk."""
    os.environ["XDG_CACHE_HOME"] = f"{store}.{rank}.cache"  # empty: an earlier job's measurement would shorten the walk
    import torch
    import torch.distributed as dist
    from torch import nn

    import fxcomp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follower = Follower()
    if rank == 0:
        sys.setprofile(follower)
    batch = torch.ones(4, 64)
    step = fxcomp.compile_step(model, lambda m, b: m(b).square().mean(), optimizer, batch)
    while step.in_force.decision.is_provisional:
        step(batch)
    step.close()
    sys.setprofile(None)
    if rank == 0:
        Path(answer).write_text(json.dumps(asdict(follower.walk)))
    dist.destroy_process_group()


def follow() -> Walk:
    """Follow the table of a job of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        store, answer = f"{folder}/store", f"{folder}/walk.json"
        start = multiprocessing.get_context("spawn")
        ranks = [start.Process(target=compile_traced, args=(rank, store, answer)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert not any(each.exitcode for each in ranks), "a rank failed"
        return Walk(tuple(json.loads(Path(answer).read_text())["bodies"]))


def main() -> None:
    path = options(__doc__).parse_args().json
    walk = follow()
    print("\n".join(walk.bodies))
    print(f"{len(walk.bodies)} function bodies, {walk.returns} returns to a file that was left")
    if path is not None:
        path.write_text(json.dumps({**asdict(walk), "returns": walk.returns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
