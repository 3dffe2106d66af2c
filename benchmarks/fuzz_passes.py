"""Run random sequences of forward and backward passes under fxcomp's frontends and DistributedDataParallel.

    python benchmarks/fuzz_passes.py --sentences 500                     # on two ranks, the backend and the hook
    python benchmarks/fuzz_passes.py --seed 17
    python benchmarks/fuzz_passes.py --sentence "F3 f5 B0+1 S z" --ranks 3

`benchmarks/fuzzing/passes.py` defines the words. The exit status is 1 after an unacceptable result.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from fuzzing.passes import FINDINGS, Word, draw, frontends, judge, parse


def main() -> int:
    arguments = parse_arguments()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if arguments.sentence is not None:
        sentences = [parse(arguments.sentence)]
    elif arguments.seed is not None:
        sentences = [draw(arguments.seed)]
    else:
        sentences = [draw(seed) for seed in range(arguments.first, arguments.first + arguments.sentences)]
    for name in arguments.frontends:
        end = Path(f"/tmp/fuzz_passes.{store.port}.{name}")
        given = (store.port, name, arguments.ranks, sentences, len(sentences) == 1, end)
        processes.spawn(say_all, given, nprocs=arguments.ranks)
        if end.exists():
            end.unlink()
            return 1
    return 0


def say_all(
    rank: int, port: int, name: str, ranks: int, sentences: list[tuple[Word, ...]], shows: bool, end: Path
) -> None:
    """Run sentences on one rank; create the file `end` after an unacceptable result."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    speakers, counts, start = frontends(), Counter[str](), time.monotonic()
    for words in sentences:
        verdict = judge(words, speakers["ddp"], speakers[name])
        counts[verdict.kind] += 1
        if rank == 0 and (shows or verdict.kind in FINDINGS):
            print(f"{name}: {verdict.kind}: {' '.join(map(str, words))}  {verdict.text}", flush=True)
        if verdict.kind in FINDINGS:
            end.touch()
        if verdict.kind in ("refused", "foreign"):
            speakers = frontends()
    if rank == 0:
        said = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
        print(f"{name}, {ranks} ranks: {said}; {time.monotonic() - start:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200, help="so many, of seeds in a row")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="say this one alone")
    parser.add_argument("--sentence", help="say this one alone, as in the first line of this file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--frontends", nargs="+", default=["backend", "hook"], choices=["backend", "hook"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
