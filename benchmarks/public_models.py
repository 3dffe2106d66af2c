"""Train small models of a public library with fxcomp and eagerly, and compare the results bit for bit.

    python benchmarks/public_models.py --ranks 1                          # one process against plain eager steps
    python benchmarks/public_models.py --ranks 2 --docs                   # the dense plan against DDP
    python benchmarks/public_models.py --only bert --only wav2vec2        # some; --families 20 for the first twenty
    python benchmarks/public_models.py --checkpointing --common             # blocks are computed again, with dropout
    python benchmarks/public_models.py --ranks 2 --frontend all --steps 20 --common
    python benchmarks/public_models.py --ranks 2 --frontend all --steps 20 --common --plan int8

Each family (`public_families.py`) takes a few steps of AdamW with the library's dropout in its own processes, so that a
crash or hang affects no other family. `public_training.py` compares losses, parameters, buffers, and the states of the
optimizer and the random generator. Records are saved to `--json` after each family; `--resume` keeps existing ones.
`--docs` writes a table of all families, or of several frontends, to docs/compatibility.md.

Requires the extra `models`. All families take about half an hour on two processors.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
from public_training import COMPILED, FRONTENDS, MEANINGS, RESULTS, Record, Way, line_of, said, train
from records import Records, options, read, table

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"


# Processes

_PROCESSES = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "transformers", "fxcomp.pipeline", "public_training"]


def run_family(name: str, ranks: int, timeout_s: float, way: Way = COMPILED) -> Record:
    """Train a family on all ranks; return the worst rank's record."""
    start = time.monotonic()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(ranks):
        mine, theirs = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_rank_main, args=(theirs, store.port, name, rank, ranks, way), daemon=True)
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
    records = [
        found.get(rank, Record(name, ranks, "hung", way.frontend, way.plan, detail=f"after {timeout_s:.0f} s"))
        for rank in range(ranks)
    ]
    # PeerFailed only reports another rank's failure; prefer the record with the reason.
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
                until = min(until, time.monotonic() + 5)  # other ranks may wait for this one
    return found


def _rank_main(result: Connection, port: int, name: str, rank: int, ranks: int, way: Way) -> None:
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        record = train(name, rank, ranks, way)
    except BaseException as error:
        record = Record(name, ranks, "foreign", way.frontend, way.plan, detail=said(error), where=line_of(error))
    result.send(record)
    result.close()


# Records and tables


def kept(path: Path) -> dict[tuple[str, str], Record]:
    records = [Record(**record) for record in read(path)] if path.exists() else []
    return {(record.family, record.frontend): record for record in records}


def summary(records: Sequence[Record]) -> str:
    counts = Counter(record.result for record in records)
    return ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])


def table_of_all(records: Sequence[Record]) -> str:
    tried = [record for record in records if record.result != "untried"]
    counts = [(r, sum(x.result == r for x in tried), MEANINGS[r]) for r in RESULTS[:-1]]
    by_task: list[tuple[str, str, str]] = []
    for task in dict.fromkeys(record.task for record in tried):
        of_task = [record for record in tried if record.task == task]
        others = [f"{r.family} ({r.result})" for r in of_task if r.result != "identical"]
        by_task.append((task, ", ".join(r.family for r in of_task if r.result == "identical"), ", ".join(others)))
    reasons = sorted((record for record in tried if record.result != "identical"), key=lambda r: (r.detail, r.family))
    why = [(r.family, r.result, _cell(r.detail), _cell(r.where, code=True)) for r in reasons]
    tables = (("result | families | meaning", counts), ("task | identical | others", by_task))
    return "\n\n".join(table(*each) for each in (*tables, ("family | result | why | where", why)))


def _cell(text: str, *, code: bool = False) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;") if not code else text.replace("|", "\\|")
    return f"`{text}`" if code and text else text


def table_of_frontends(records: Sequence[Record]) -> str:
    """Return a row per family with each frontend's result, and the losses under compressed plans."""
    found = {(record.family, record.frontend): record for record in records}
    rows = [
        (family, task, *(_result(found.get((family, frontend))) for frontend in FRONTENDS))
        for family, task in dict.fromkeys((record.family, record.task) for record in records)
    ]
    text = table(f"family | task | {' | '.join(FRONTENDS)}", rows)
    reasons = [r for r in records if r.result not in ("identical", "compressed")]
    why = [(r.family, r.frontend, r.result, _cell(r.detail), _cell(r.where, code=True)) for r in reasons]
    return "\n\n".join([text, *([table("family | frontend | result | why | where", why)] if why else [])])


def _result(record: Record | None) -> str:
    if record is None:
        return "not run"
    if record.result != "compressed":
        return record.result
    return f"{record.loss:.4f} (eager {record.eager_loss:.4f})"


ALL = "<!-- generated by benchmarks/public_models.py -->"
OF_FRONTENDS = "<!-- generated by benchmarks/public_models.py --frontend all -->"
OF_COMPRESSED = "<!-- generated by benchmarks/public_models.py --frontend all --plan -->"
OF_CHECKPOINTED = "<!-- generated by benchmarks/public_models.py --frontend all --checkpointing -->"
END = "<!-- end -->"


def document(page: Path, begin: str, text: str) -> None:
    """Replace the tables between the page's markers."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--families", type=int, help="so many, from the first")
    parser.add_argument("--common", action="store_true", help="thirty families of all kinds")
    parser.add_argument("--timeout-s", type=float, default=180.0)
    parser.set_defaults(json=Path("public_models.json"))
    parser.add_argument("--resume", action="store_true", help="keep the records that are there, and try the others")
    parser.add_argument("--frontend", choices=[*FRONTENDS, "all"], default="compile_step")
    parser.add_argument("--plan", default="dense", help="a compressor's name: ranks are compared, and losses told")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward pass")
    parser.add_argument("--docs", action="store_true", help="write docs/compatibility.md's table from the records")
    arguments = parser.parse_args()

    import transformers
    from public_families import COMMON, names

    _PROCESSES.set_forkserver_preload(_PRELOADED)
    records = kept(arguments.json) if arguments.resume or arguments.only else {}
    frontends = FRONTENDS if arguments.frontend == "all" else (arguments.frontend,)
    for name in arguments.only or (COMMON if arguments.common else names()[: arguments.families]):
        for frontend in frontends:
            if (name, frontend) in records and arguments.resume:
                continue
            way = Way(frontend, arguments.plan, arguments.steps, arguments.checkpointing)
            record = replace(run_family(name, arguments.ranks, arguments.timeout_s, way), family=name)
            records[name, frontend] = record
            print(f"{name:32}{frontend:14}{record.result:11}{record.seconds:6.1f} s  {record.detail}", flush=True)
            Records(arguments.json, transformers=transformers.__version__).add(*records.values())
    found = list(records.values())
    print(summary(found))
    if arguments.docs and len(frontends) == 1:
        document(PAGE, ALL, f"{summary(found)}.\n\n{table_of_all(found)}")
    elif arguments.docs:
        compressed = OF_COMPRESSED if arguments.plan != "dense" else OF_FRONTENDS
        text = f"{summary(found)}.\n\n{table_of_frontends(found)}"
        document(PAGE, OF_CHECKPOINTED if arguments.checkpointing else compressed, text)


if __name__ == "__main__":
    main()
