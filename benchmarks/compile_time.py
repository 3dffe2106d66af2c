"""Time compile_step on the example GPT: a first job on a machine, and a second one that finds the first one's table.

    python benchmarks/compile_time.py --json compile_time.json

Each job is a process a rank. `compile` is the whole call; `capture`, `choose` and `emit` are parts of it on rank 0, and
what is left is measuring the machine, the links and the job's own dense step, and agreeing. The first job begins
with an empty cache, the second with what the first one left. Importing is not counted. A record is
`{ranks, job, compile_s, capture_s, choose_s, emit_s}`, the median of the turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from records import Records, options
from shaped import Teller, ends_well, is_rank, join, run

import fxcomp
from fxcomp.capture import step_capture
from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.pipeline import Compiler
from fxcomp.planning import decide

PARTS = ("capture", "choose", "emit")


def rank_main() -> None:
    torch.set_num_threads(1)
    join()
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(what: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            try:
                return do(*arguments, **keywords)
            finally:
                spent[what] += time.perf_counter() - begun

        return call

    step_capture.capture = timed("capture", step_capture.capture)
    decide.choose = timed("choose", decide.choose)
    Compiler.emit = timed("emit", Compiler.emit)  # pyright: ignore[reportAttributeAccessIssue]
    gpt = gpt_job()
    begun = time.perf_counter()
    step = fxcomp.compile_step(gpt.model, gpt.loss_fn, gpt.optimizer, gpt.batch, max_grad_norm=gpt.max_grad_norm)
    found = {"compile_s": time.perf_counter() - begun}
    Teller().send({**found, **{f"{part}_s": seconds for part, seconds in spent.items()}})
    step.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    if is_rank():
        rank_main()
        return
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    kept = Records(arguments.json)
    for ranks in arguments.ranks:
        turns: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
        for _ in range(arguments.turns):
            with tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache
                for found in turns.values():
                    run([__file__], found.append, hosts=None, ranks_per_host=ranks, timeout_s=300)
        for name, found in turns.items():
            medians = {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
            kept.add({"ranks": ranks, "job": name, **medians})
            print(f"{ranks} ranks, {name} job: " + ", ".join(f"{key[:-2]} {s:.2f} s" for key, s in medians.items()))


if __name__ == "__main__":
    sys.exit(ends_well(main))
