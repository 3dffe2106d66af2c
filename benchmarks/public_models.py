"""Train small models of a public library compiled and eagerly, and compare everything bit for bit.

    python benchmarks/public_models.py --ranks 1                          # one process against plain eager steps
    python benchmarks/public_models.py --ranks 2 --docs                   # the dense plan against DDP
    python benchmarks/public_models.py --only bert --only wav2vec2        # some; --families 20 for the first twenty

Each family takes a few steps of AdamW with dropout as the library has it (`public_families.py` shrinks and feeds it),
in processes of its own: one that crashes or hangs costs no other its record. Compared are losses, parameters, buffers,
the optimizer's state and the random generator's. Records are written to `--json` as they come; `--resume` keeps what is
there. `--docs` writes the table in docs/compatibility.md.

Needs the extra `models`. All families take about half an hour on two processors.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HERE = Path(__file__).parent.parent
STEPS = 3
ROUNDING = 1e-6
RESULTS = ("identical", "rounded", "refused", "wrong", "foreign", "hung", "untried")
MEANINGS = {
    "identical": "every bit is eager's",
    "rounded": "equal to 1e-6 of the largest element, where the library computes otherwise while it is traced",
    "refused": "an error of fxcomp's says what stands in the way",
    "wrong": "some number differs",
    "foreign": "an exception that is not fxcomp's",
    "hung": "not finished in time",
    "untried": "eager PyTorch does not train it as it was configured here",
}


@dataclass(frozen=True)
class Record:
    """How one family went."""

    family: str
    ranks: int
    result: str
    task: str = ""
    detail: str = ""
    where: str = ""
    parameters: int = 0
    nodes: int = 0
    capture_s: float = 0.0
    seconds: float = 0.0


# One family, on each rank


def train(name: str, rank: int, ranks: int) -> Record:
    """Take the same steps twice, and compare."""
    from public_families import LARGEST, loss_of, small

    import fxcomp
    from fxcomp.errors import FxcompError

    record = Record(name, ranks, "untried")
    try:
        family = small(name)
        record = replace(record, task=family.task)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in family.build().parameters())
        record = replace(record, parameters=parameters)
        if parameters > LARGEST:
            return replace(record, detail="it does not become small by the rules for all")
        _seed(0)
        model = family.build()
        batches = [family.batch(model, 100 * rank + i) for i in range(STEPS)]
        expected = run_eagerly(copy.deepcopy(model), loss_of, batches, rank, ranks)
    except Exception as error:
        return replace(record, detail=_said(error), where=_line(error))
    optimizer = _optimizer(model)
    start = time.perf_counter()
    try:
        step = fxcomp.compile_step(model, loss_of, optimizer, batches[0], plan="dense")
        record = replace(record, capture_s=round(time.perf_counter() - start, 1))
        _seed(rank)
        losses = [step(batch) for batch in batches]
    except Exception as error:
        result = "refused" if isinstance(error, FxcompError) else "foreign"
        where = _line(error.__cause__ or error)
        return replace(record, result=result, detail=_said(error), where=where)
    program = step.in_force.program
    record = replace(record, nodes=len(program.captured.graph.graph.nodes) if program is not None else 0)
    difference, share = first_difference(expected, everything(model, optimizer, losses))
    result = "identical" if not difference else "rounded" if share <= ROUNDING else "wrong"
    return replace(record, result=result, detail=difference)


def run_eagerly(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any], rank: int, ranks: int
) -> dict[str, Any]:
    """What plain PyTorch gives, under DistributedDataParallel where there are several ranks."""
    # A family may leave parameters out of its loss.
    net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
    optimizer = _optimizer(model)
    _seed(rank)
    losses: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if ranks > 1:  # DDP gives all ranks rank 0's buffers before its next step, a compiled step at the end of this one
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    return everything(model, optimizer, losses)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Tensor]) -> dict[str, Any]:
    """All that a step changes, by name."""
    found: dict[str, Any] = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    found |= {f"buffer {name}": value for name, value in model.named_buffers()}
    found["random numbers"] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach()
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        # Eager AdamW keeps nothing for a parameter that has never had a gradient.
        found |= {f"state {name}.{key}": value for key, value in state.items() if state["step"] > 0}
    return found


def first_difference(expected: dict[str, Any], found: dict[str, Any]) -> tuple[str, float]:
    """The first name whose value is not the same in every bit; the largest difference, as a share of its tensor."""
    texts: list[str] = []
    largest = 0.0
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            return f"{name} is there only {'compiled' if one is None else 'in eager PyTorch'}", float("inf")
        if torch.equal(one, other) or (one.isnan() & other.isnan() | (one == other)).all():
            continue
        off = (one.double() - other.double()).abs().max().item()
        texts.append(f"{name} is off by {off:.3g}")
        share = off / max(one.double().abs().max().item(), 1e-30)
        largest = max(largest, share if share == share else float("inf"))
    return (f"{texts[0]}, and {len(texts) - 1} more differ" if texts else ""), largest


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _seed(seed: int) -> None:
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _line(error: BaseException) -> str:
    """The innermost line that is neither torch's nor fxcomp's."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not any(part in frame.filename for part in ("/torch/", "/fxcomp/", "<", "/benchmarks/")):
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"
    return ""


# Processes

_PROCESSES = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "transformers", "fxcomp.pipeline", "public_families"]


def run_family(name: str, ranks: int, timeout_s: float) -> Record:
    """One record for all ranks: the worst of them."""
    start = time.monotonic()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(ranks):
        mine, theirs = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_rank_main, args=(theirs, store.port, name, rank, ranks), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        found = _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    records = [found.get(rank, Record(name, ranks, "hung", detail=f"after {timeout_s:.0f} s")) for rank in range(ranks)]
    # Where one rank is refused by another's failure, the other says why.
    worst = max(records, key=lambda r: (RESULTS.index(r.result), "PeerFailed" not in r.detail))
    return replace(worst, seconds=round(time.monotonic() - start, 1))


def _collect(pipes: Sequence[Connection], timeout_s: float) -> dict[int, Record]:
    found: dict[int, Record] = {}
    ended: set[int] = set()
    until = time.monotonic() + timeout_s
    while len(ended) < len(pipes) and (left := until - time.monotonic()) > 0:
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in ended], left):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            ended.add(rank)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                found[rank] = Record("", len(pipes), "foreign", detail="the process died")
            if found[rank].result in ("foreign", "untried"):
                until = min(until, time.monotonic() + 5)  # the other may wait for it
    return found


def _rank_main(result: Connection, port: int, name: str, rank: int, ranks: int) -> None:
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        record = train(name, rank, ranks)
    except BaseException as error:
        record = Record(name, ranks, "foreign", detail=_said(error), where=_line(error))
    result.send(record)
    result.close()


# Records and tables


def kept(path: Path) -> dict[str, Record]:
    """The records of an earlier run."""
    if not path.exists():
        return {}
    return {record["family"]: Record(**record) for record in json.loads(path.read_text())["records"]}


def write(path: Path, records: Sequence[Record]) -> None:
    """All records so far."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = ",\n".join(json.dumps({k: v for k, v in asdict(r).items() if v not in ("", 0)}) for r in records)
    path.write_text(f'{{"versions": {json.dumps(versions)}, "records": [\n{text}\n]}}\n')


def summary(records: Sequence[Record]) -> str:
    """How many of each result."""
    counts = Counter(record.result for record in records)
    return ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])


def table(records: Sequence[Record]) -> str:
    """The page about public models."""
    tried = [record for record in records if record.result != "untried"]
    lines = [
        "| result | families | meaning |",
        "|---|---|---|",
        *(f"| {r} | {sum(x.result == r for x in tried)} | {MEANINGS[r]} |" for r in RESULTS[:-1]),
        "",
        "| task | identical | others |",
        "|---|---|---|",
    ]
    for task in dict.fromkeys(record.task for record in tried):
        of_task = [record for record in tried if record.task == task]
        others = [f"{r.family} ({r.result})" for r in of_task if r.result != "identical"]
        same = [r.family for r in of_task if r.result == "identical"]
        lines.append(f"| {task} | {', '.join(same)} | {', '.join(others)} |")
    reasons = sorted((record for record in tried if record.result != "identical"), key=lambda r: (r.detail, r.family))
    lines += ["", "| family | result | why | where |", "|---|---|---|---|"]
    lines += [f"| {r.family} | {r.result} | {_cell(r.detail)} | {_cell(r.where, code=True)} |" for r in reasons]
    return "\n".join(lines)


def _cell(text: str, *, code: bool = False) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;") if not code else text.replace("|", "\\|")
    return f"`{text}`" if code and text else text


BEGIN, END = "<!-- generated by benchmarks/public_models.py -->", "<!-- end -->"


def document(page: Path, records: Sequence[Record]) -> None:
    """Put the tables where the page wants them."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{summary(records)}.\n\n{table(records)}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--families", type=int, help="so many, from the first")
    parser.add_argument("--timeout-s", type=float, default=180.0)
    parser.add_argument("--json", type=Path, default=Path("public_models.json"))
    parser.add_argument("--resume", action="store_true", help="keep the records that are there, and try the others")
    parser.add_argument("--docs", action="store_true", help="write docs/compatibility.md's table from the records")
    arguments = parser.parse_args()

    from public_families import names

    _PROCESSES.set_forkserver_preload(_PRELOADED)
    records = kept(arguments.json) if arguments.resume or arguments.only else {}
    wanted = arguments.only or names()[: arguments.families]
    for name in wanted:
        if name in records and not arguments.only:
            continue
        record = run_family(name, arguments.ranks, arguments.timeout_s)
        records[name] = replace(record, family=name)
        print(
            f"{name:32}{record.result:10} {record.seconds:6.1f} s {record.nodes:6} nodes  {record.detail}", flush=True
        )
        write(arguments.json, list(records.values()))
    print(summary(list(records.values())))
    if arguments.docs:
        document(HERE / "docs" / "compatibility.md", list(records.values()))


if __name__ == "__main__":
    main()
