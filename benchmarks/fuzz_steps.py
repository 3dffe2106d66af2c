"""Train random programs with the compiled step and with eager PyTorch, and report differences.

    python benchmarks/fuzz_steps.py --programs 3000 --ranks2 300 --workers 2 --record fuzz.jsonl
    python benchmarks/fuzz_steps.py --seed 17                 # one program, printed; shrunk if it fails
    python benchmarks/fuzz_steps.py --seed 17 --without block.1 change.0
    python benchmarks/fuzz_steps.py --page                    # write the numbers of a record into the page

Results are appended to the record as they come. An interrupted run continues from its record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.campaign import Job, Record, run_all, shrink, write_page
from fuzzing.draw import SMALL, draw

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "fuzz.md"


def main() -> int:
    arguments = parse()
    if arguments.seed is not None:
        return one(arguments)
    record = Record(Path(arguments.record))
    jobs = jobs_of(arguments.first, arguments)
    if arguments.small:
        jobs += jobs_of(SMALL + arguments.first, arguments)
    run_all(jobs, record, arguments.workers, arguments.timeout)
    print(record.summary(jobs))
    if arguments.page:
        write_page(PAGE, record, list(record.results))
    return int(bool(record.findings(jobs)))


def jobs_of(first: int, arguments: argparse.Namespace) -> list[Job]:
    """Return programs from the first seed on: on three ranks, then two, then one."""
    three, two = first + arguments.ranks3, first + arguments.ranks3 + arguments.ranks2
    bounds = (3, first, three), (2, three, two), (1, two, first + arguments.programs)
    return [Job(seed, ranks) for ranks, begin, end in bounds for seed in range(begin, end)]


def one(arguments: argparse.Namespace) -> int:
    """Run the program of one seed and print the features that a failure needs."""
    job = Job(arguments.seed, arguments.ranks, tuple(arguments.without))
    print(draw(job.seed, job.ranks).without(job.without))
    result = run_all([job], Record(None), 1, arguments.timeout)[job]
    print(result.shown())
    if not result.is_finding or arguments.no_shrink:
        return int(result.is_finding)
    smallest, smaller = shrink(job, result, arguments.timeout)
    print("\nshrunk to", draw(job.seed, job.ranks).without(smallest.without))
    print(smaller.shown())
    print(f"  --seed {job.seed} --ranks {job.ranks} --without {' '.join(smallest.without)}")
    return 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="so many in all")
    parser.add_argument("--ranks2", type=int, default=0, help="of which so many run on two ranks")
    parser.add_argument("--ranks3", type=int, default=0, help="and so many on three")
    parser.add_argument("--small", action="store_true", help="and as many small ones, each about one theme")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a program hangs")
    parser.add_argument("--record", default="fuzz.jsonl", help="a line for each program, read again when resuming")
    parser.add_argument("--page", action="store_true", help=f"write the numbers into {PAGE.name}")
    parser.add_argument("--seed", type=int, help="run this program alone")
    parser.add_argument("--ranks", type=int, default=1, help="with --seed: on so many ranks")
    parser.add_argument("--without", nargs="*", default=[], help="with --seed: features to leave out, by slot")
    parser.add_argument("--no-shrink", action="store_true", help="with --seed: do not look for what can be left out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
