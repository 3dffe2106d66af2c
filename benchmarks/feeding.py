"""Compare predicted steps without communication with measured ones: `python benchmarks/feeding.py --json FILE`.

A step does more than its nodes: it looks for changes, finds its tensors, and runs Python between its lines. A job
measures that as one number, `feed_us` of its cost table. Each model is compiled and run a few times, on one rank and on
two ranks of this machine, whose dense plan then runs without a network. Predictions are made with that number and
without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline
from fxcomp.frontends.what_if import capture_job, measured_here
from fxcomp.pipeline import Compiler
from fxcomp.plan.streams import Stream
from fxcomp.runtime.transport import NullTransport

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS

TURNS, STEPS, WARM_UP_STEPS = 2, 10, 2
ALONE = Cluster(1, 1, intra=Link(1.0, 1.0), inter=Link(1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Row:
    """A model on so many ranks, in ms; medians over the turns."""

    model: str
    ranks: int
    measured_ms: float
    predicted_ms: float
    feed_ms: float

    def __str__(self) -> str:
        before = (self.predicted_ms - self.feed_ms) / self.measured_ms - 1
        after = self.predicted_ms / self.measured_ms - 1
        times = f"{self.measured_ms:.1f} | {self.predicted_ms:.1f} | {self.feed_ms:.2f}"
        return f"| {self.model} | {self.ranks} | {times} | {before:+.1%} | {after:+.1%} |"


def measured_ms(step: Callable[[Any], object], batch_at: Callable[[int], Any]) -> float:
    """Run a step on new batches; the median time."""
    times: list[float] = []
    for k in range(WARM_UP_STEPS + STEPS):
        batch = batch_at(k)
        start = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM_UP_STEPS:])


def alone(model: str) -> tuple[float, float, float]:
    """Predict and measure a step of one rank: measured, predicted, what feeding takes, in ms."""
    job = MODELS[model]()
    training, captured = capture_job(job)
    costs, workload = measured_here(training, captured, job.batch, CostTable(), Compiler(ALONE))
    step = fxcomp.compile_step(job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm)
    took = measured_ms(step, lambda k: job.batch_at(k, 0))
    return took, workload.free_us / 1e3, costs.feed_us / 1e3


def among_ranks(model: str, rank: int) -> tuple[float, float, float]:
    """Predict and measure a rank's dense step without a network: measured, predicted, what feeding takes, in ms."""
    job = MODELS[model]()

    def compiled(**options: Any) -> Any:
        return fxcomp.compile_step(
            job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm, **options
        )

    costs = compiled().costs
    step = compiled(compress="dense", costs=costs)
    runtime = step.in_force.runtime
    runtime.transport = NullTransport(runtime.transport)
    took = measured_ms(step, lambda k: job.batch_at(k, rank))
    return took, computed_us(step.timeline) / 1e3, costs.feed_us / 1e3


def computed_us(timeline: Timeline) -> float:
    """Add up what the main thread does, but for starting collectives that are not there."""
    tasks = [span.task for span in timeline.spans if span.task.stream is Stream.COMPUTE]
    return sum(task.duration_us for task in tasks if not task.name.startswith("start "))


def row_of(model: str, ranks: int, once: Callable[[], tuple[float, float, float]]) -> Row:
    took, predicted, feed = zip(*(once() for _ in range(TURNS)), strict=True)
    return Row(model, ranks, statistics.median(took), statistics.median(predicted), statistics.median(feed))


def rank_main(models: list[str]) -> None:
    import torch.distributed as dist

    join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for model in models:
        row = row_of(model, ranks, lambda model=model: among_ranks(model, rank))
        if rank == 0:
            print(json.dumps(asdict(row)), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.models.split(",")
    if options.as_rank:
        rank_main(models)
        return
    rows = [row_of(model, 1, lambda model=model: alone(model)) for model in models]
    command = [str(Path(__file__).resolve()), "--as-rank", "--models", options.models]
    printed = run_ranks(command, ranks_per_host=2, timeout_s=1800)[0]
    rows += [Row(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]
    print("| model | ranks | measured ms | predicted ms | feeding ms | without feeding | with it |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(row)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
