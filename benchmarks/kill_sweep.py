"""Kill ranks of small jobs at drawn places, and report what survivors raise and what a restart loses.

    python benchmarks/kill_sweep.py --points 208 --json kills.json     # goes on where the file ends
    python benchmarks/kill_sweep.py --only 17                          # one point, with all that its ranks raised
    python benchmarks/kill_sweep.py --report kills.json

Every point is drawn from one seed: a kind of job, a phase, a fault, the rank that it strikes, and a call within the
phase. Ranks are forked from one warm process, with a timeout of 5 s. After the fault, new ranks load the last whole
checkpoint and train to the end. They are compared with a job without a fault.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import torch.distributed as dist  # noqa: E402
from killing import judge, tables  # noqa: E402
from killing.judge import Setting  # noqa: E402
from killing.life import lived  # noqa: E402
from killing.points import DISK, LINK, drawn  # noqa: E402
from killing.start import why_no_disk, why_no_links  # noqa: E402
from records import Records, options, read  # noqa: E402

SEED = 52


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--points", type=int, default=208, help="number of points")
    parser.add_argument("--first", type=int, default=0, help="number of the first point")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of points; what they raise is printed")
    parser.add_argument("--folder", type=Path, help="keep references here, and what went wrong")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of a file of records")
    parser.add_argument("--rank-of", type=Path, help="be a rank of torchrun, of this life")
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        return be_a_rank(arguments.rank_of)
    if arguments.report is not None:
        print(tables.report(read(arguments.report)))
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill-sweep-"))
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    records = Records(arguments.json, seed=arguments.seed)
    if arguments.json is not None and arguments.json.exists():
        records.found = read(arguments.json)
    known = {record["number"] for record in records.found}
    end = max([arguments.first + arguments.points, *(number + 1 for number in arguments.only or ())])
    points = drawn(arguments.seed, end)
    numbers = range(arguments.first, arguments.first + arguments.points) if arguments.only is None else arguments.only
    not_run = {DISK: why_no_disk(folder / "disk"), **dict.fromkeys(LINK, why_no_links())}
    for number in numbers:
        point = points[number]
        if number in known:
            continue
        if why := not_run.get(point.fault):
            records.add(
                {"number": number, "kind": point.kind, "phase": point.phase, "fault": point.fault, "not_run": why}
            )
            continue
        record = judge.run(point, Setting(folder))
        records.add(judge.as_json(record))
        print(point, "|", tables.in_a_line(record), flush=True)
        if arguments.only is not None:
            print(tables.in_full(record), flush=True)
    return int(any(record.get("wrong") or record.get("anomalies") for record in records.found))


def prepare(folder: Path) -> None:
    """Use a cache of the sweep's own, with costs of this machine's memory and compressors that are not measured."""
    from helpers.machine import keep_costs_of_memory_and_compressors

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    keep_costs_of_memory_and_compressors()


def be_a_rank(folder: Path) -> int:
    life = pickle.loads((folder / "life.pickle").read_bytes())
    dist.init_process_group("gloo")
    found = lived(life)
    (folder / f"end-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
