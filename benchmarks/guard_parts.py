"""What of one version of fxcomp is asked before each step, each part timed alone: benchmarks/guards.py runs this.

Prints one JSON document: for each model, part and case the medians of a few rounds in µs of the host's processor, or
why the part is not there. The version is the one that PYTHONPATH names; a part that it does not have is absent.

    key      compare everything that tracing baked in with what it was
    find     the type of a batch, the key, and looking up the program
    digest   compare the numbers of the parameter groups with the last step's, and let a digest ride on an all_reduce:
             its own lines on this rank, with a transport that sends nothing
    prelude  answer two questions that Python asked of the batch: is an id too large, is one below 0
"""

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fxcomp
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Training
from fxcomp.commands.demo.gpt import GPT
from fxcomp.errors import FxcompError
from fxcomp.step.programs import Programs

REPEATS = 20
"""Steps of a round, of which the median counts."""

Ask = Callable[[], Any]
Change = Callable[[int], None]


class Block(nn.Module):
    """Nine parameters and some plain attributes, as blocks of language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, dropout=0.1)
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Dropout(0.1)
        self.scale, self.causal, self.name = 0.5, True, "block"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0] * self.scale
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "example GPT": GPT,
    "5,000 parameters": lambda: nn.Sequential(*(Block() for _ in range(556))),
}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


class Absent(Exception):
    """This version does not have the part."""


def timed(ask: Ask, change: Change = lambda _: None, rounds: int = 3) -> list[float]:
    """Take the median of each round, in µs of the processor, of asking after a change."""
    found: list[float] = []
    for _ in range(rounds):
        taken: list[float] = []
        for i in range(REPEATS + 3):
            change(i)
            start = time.thread_time_ns()
            ask()
            taken.append((time.thread_time_ns() - start) / 1e3)
        found.append(statistics.median(taken[3:]))
    return found


# Parts


def key_and_find(model: nn.Module) -> dict[tuple[str, str], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = Training.of(model, loss_fn, optimizer)
    guard, group = StepGuard(training), optimizer.param_groups[0]
    # No program is made: finding one is what is timed.
    made: Any = SimpleNamespace(captured=SimpleNamespace(guard=None, prelude=None))
    programs = Programs(guard, lambda _batch, _varying: made)
    ids = torch.zeros(8, 128, dtype=torch.long)

    def find() -> None:
        kind, leaves = batch_type((ids, ids))
        programs.find((ids, ids), kind, leaves, 0)

    find()
    cases: dict[str, Change] = {
        "nothing changes": lambda _: None,
        "the learning rate changes": lambda i: group.update(lr=1e-3 / (i + 1)),
        "train() and eval() in turns": lambda i: model.train(i % 2 == 0) and None,
    }
    found = {("key", case): timed(guard.key, change) for case, change in cases.items()}
    model.train()
    return found | {("find", "nothing changes"): timed(find)}


def digest(model: nn.Module) -> dict[tuple[str, str], list[float]]:
    try:
        alike_of: Any = importlib.import_module("fxcomp.step.alike").Alike
        buffers_of: Any = importlib.import_module("fxcomp.runtime.buffers").Buffers
    except ModuleNotFoundError as error:
        raise Absent(str(error)) from None
    from fxcomp.runtime.flight import Launch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = Training.of(model, loss_fn, optimizer)
    options = StepGuard(training).key().options  # pyright: ignore[reportAttributeAccessIssue]
    alike, memory, step = alike_of(training, SimpleNamespace()), buffers_of(), [0]
    program, runtime = SimpleNamespace(carriers=frozenset({"all_reduce_0"})), SimpleNamespace()
    work = SimpleNamespace(wait=lambda: None)
    transport: Any = SimpleNamespace(all_reduce=lambda *_: work)
    launch = Launch("all_reduce_0", "all_reduce", 1, "world", "sum", "main")
    bucket = memory.take("pack_0", 1 << 16, torch.float32, torch.device("cpu"))
    rate = [1e-3]

    def carry() -> None:
        step[0] += 1
        numbers = [{"lr": rate[0], "betas_0": 0.9, "betas_1": 0.999, "eps": 1e-8, "weight_decay": 0.01}]
        alike.begin(step[0], program, runtime, numbers, options)
        alike.rider.start(memory, launch, bucket, transport).work.wait()

    carry()
    return {
        ("digest", "nothing changes"): timed(carry),
        ("digest", "the learning rate changes"): timed(carry, lambda i: rate.__setitem__(0, 1e-3 / (i + 2))),
    }


class Checked(nn.Module):
    """Looks at its ids as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 4)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.max() >= 256:
            raise ValueError("an id is too large")
        if not torch.all(ids >= 0):
            raise ValueError("an id is below 0")
        return self.token(ids)


def prelude(_: nn.Module) -> dict[tuple[str, str], list[float]]:
    model, ids = Checked(), torch.zeros(8, 128, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        step = fxcomp.compile_step(model, loss_fn, optimizer, ids, checks=fxcomp.Checks(verify="never"))
    except FxcompError as error:
        raise Absent(f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    questions: Any = getattr(step.in_force.program.captured, "prelude", None)
    if questions is None:
        raise Absent("the capture has no prelude")
    ask = getattr(questions, "other_answer")  # noqa: B009  # of versions that have one
    assert ask([ids]) is None, "the batch gets the answers that it was captured with"
    return {("prelude", "nothing changes"): timed(lambda: ask([ids]))}


def main() -> None:
    gc.disable()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    for name, build in MODELS.items():
        model = build()
        facts = {
            "model": name,
            "parameters": sum(1 for _ in model.parameters()),
            "modules": sum(1 for _ in model.modules()),
        }
        for part in (key_and_find, digest, prelude):
            try:
                found = part(model)
            except Absent as absent:
                records.append({**facts, "part": part.__name__, "absent": str(absent)})
                continue
            records += [{**facts, "part": p, "case": case, "us": taken} for (p, case), taken in found.items()]
    json.dump({"fxcomp": fxcomp.__file__, "records": records}, sys.stdout)


if __name__ == "__main__":
    main()
