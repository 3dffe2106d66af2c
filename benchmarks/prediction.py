"""Predict and measure steps for several models, plans and bandwidths over shaped hosts.

    python benchmarks/prediction.py --hosts 2,4,8 --inter 100mbit,300mbit --json prediction.json --report prediction.md
    python benchmarks/prediction.py --hosts 8 --quick          the mlp over 100 Mbit/s, few rounds

For each model and bandwidth fxcomp measures costs once, as `compile_step` does. All plans are predicted from these
costs and run in turns of a few steps per round. The first step of a turn does not count, because it finds another
plan's caches. A step takes as long as its slowest rank. Odd rounds give `measured_ms`, even rounds `repeat_ms`; their
difference is the noise floor, the error of a perfect prediction.

Because the machine drifts, predictions are scaled by the step without a network, measured / predicted. The processor
drifts, so `error` scales compute and leaves links as predicted. `whole_error` scales the whole
step. `raw_error` is the unscaled error that a user sees, and `printed_error` the error printed with it.
benchmarks/prediction_report.py judges the records.

A plan is an argument of `compile_step` (a compressor's name, a strategy's text) or one of the names below.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from models import MODELS
from prediction_report import Record, summary
from records import Records, options
from shaped import UNSHAPED, Teller, agree, ends_well, is_rank, join, run, set_rate, slowest

import fxcomp
from fxcomp import compat
from fxcomp.cost.timeline import step_time_us
from fxcomp.errors import BadStrategy
from fxcomp.frontends.job import Job
from fxcomp.plan.kinds import Stream
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.runtime.transport import NullTransport
from fxcomp.search.workload import Workload

FREE = "free"  # dense plan without a network
SMALL_BUCKET = 1 << 18  # bytes
MIXED = ("dense", "int8", "topk(0.01)", "bf16", "int4")  # one per bucket, in rotation
ONE_SHOT = "compress({0})@gpu > all_gather@world > decompress@gpu"
SECOND_SHOT = "compress({1})@gpu > all_gather@world > decompress@gpu"
TWO_SHOTS = f"compress({{0}})@gpu > all_to_all@world > decompress@gpu > {SECOND_SHOT}"
STRATEGIES = {
    "int4 two shots": TWO_SHOTS.format("int4", "int4"),
    "int4, int8 two shots": TWO_SHOTS.format("int4", "int8"),
    "topk, bf16 two shots": TWO_SHOTS.format("topk(0.01)", "bf16"),
}
PLANS = ("dense", "dense, one bucket", "bf16", "int8", "topk(0.01)", "mixed", *STRATEGIES)
WARM_UP_STEPS = 2
UNVERIFIED = fxcomp.Checks(verify="never")  # a verified step also runs eagerly
TURN = 3  # steps
FREE_TURNS = 3  # per round; every prediction is scaled by them
EVERY_INTER = "100mbit,300mbit,1gbit,10gbit"
LEAST_ROUNDS, MOST_ROUNDS, QUICK_ROUNDS = 6, 16, 2


def rank_main(arguments: argparse.Namespace) -> None:
    join()
    tell = Teller()
    for inter in arguments.inter:
        set_rate(inter)
        for model in arguments.models:
            tell.prefix = f"{inter} {model}: "
            found = predict_and_measure(model, arguments, tell)
            where = {"model": model, "hosts": dist.get_world_size(), "inter": inter}
            tell.send({"records": [{**where, **r} for r in found]})
        set_rate(UNSHAPED)
    dist.destroy_process_group()


def predict_and_measure(model: str, arguments: argparse.Namespace, tell: Teller) -> list[Record]:
    steps, begun = compile_plans(model, arguments.plans, tell), time.perf_counter()
    rank, batches = dist.get_rank(), MODELS[model]()
    for step in steps.values():
        for k in range(WARM_UP_STEPS):
            step(batches.batch_at(k, rank))
    one_round_s = TURN * (time.perf_counter() - begun) / WARM_UP_STEPS
    fitting = 2 * int(arguments.seconds / one_round_s / 2)
    rounds = agree(QUICK_ROUNDS if arguments.quick else min(max(fitting, LEAST_ROUNDS), MOST_ROUNDS))
    tell(f"{rounds} rounds of {one_round_s:.1f} s")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        order = [*steps, *[FREE] * (FREE_TURNS - 1)]
        random.Random(number).shuffle(order)
        for name in order:
            taken = [timed_ms(steps[name], batches.batch_at(number, rank)) for _ in range(TURN)]
            times[name].append(statistics.fmean(taken[1:]))
    free_ms = statistics.median(times.pop(FREE))
    return [record(name, steps[name], times[name], free_ms) for name in times]


def compile_plans(model: str, names: Sequence[str], tell: Teller) -> dict[str, Any]:
    """Compile a step per plan, and the dense step without a network, from the same costs."""

    def compiled(**options: Any) -> Any:
        job = after_one_step(model)
        return fxcomp.compile_step(
            job.model,
            job.loss_fn,
            job.optimizer,
            job.batch,
            max_grad_norm=job.max_grad_norm,
            checks=UNVERIFIED,
            **options,
        )

    timed_only = fxcomp.ErrorFeedback(allow_diverging=True)  # top-k with AdamW
    tell("measuring costs")
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)  # earlier jobs had other links
    dist.barrier()
    first = compiled()
    while first.in_force.decision.is_provisional:
        first(MODELS[model]().batch_at(0, dist.get_rank()))
    free = compiled(compress=fxcomp.Compress(plan="dense", feedback=timed_only), costs=first.costs)
    steps: dict[str, Any] = {}
    for name in names:
        tell(f"compiling {name}")
        plan = plan_called(name, free.in_force.decision.workload)
        steps[name] = compiled(compress=fxcomp.Compress(plan=plan, feedback=timed_only), costs=first.costs)
    runtime = free.in_force.runtime
    runtime.transport = NullTransport(runtime.transport)
    return {**steps, FREE: free}


def after_one_step(model: str) -> Job:
    """Return the job after a step with dense gradients; torch's square root of zeros takes eight times as long."""
    job = MODELS[model]()
    job.loss_fn(job.model, job.batch).backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return job


def plan_called(name: str, workload: Workload) -> Any:
    kind, _, buckets = name.partition(", ")
    if name in STRATEGIES:
        return STRATEGIES[name]
    return in_buckets(kind, buckets, workload) if buckets or kind == "mixed" else name


def in_buckets(kind: str, buckets: str, workload: Workload) -> Plan:
    """Return a dense plan, or MIXED in rotation, in one bucket or in small ones."""
    cap = float("inf") if buckets == "one bucket" else SMALL_BUCKET
    groups: list[list[tuple[str, int]]] = []
    size = 0
    for gradient in workload.gradients:
        if not groups or size + 4 * gradient.elements > cap:
            groups.append([])
            size = 0
        groups[-1].append((gradient.name, gradient.elements))
        size += 4 * gradient.elements
    strategies = [DENSE if "dense" in (kind, c) else Strategy.parse(ONE_SHOT.format(c)) for c in MIXED]
    return Plan(
        tuple(
            Bucket(tuple(n for n, _ in group), tuple(s for _, s in group), strategies[k % len(strategies)])
            for k, group in enumerate(groups)
        )
    )


def parses(name: str) -> bool:
    """Return whether this fxcomp parses a plan's strategy; other plans are skipped."""
    text = STRATEGIES.get(name, name)
    try:
        Strategy.parse(text if "@" in text else "all_reduce@world")
    except BadStrategy:
        return False
    return True


def timed_ms(step: Any, batch: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(batch)
    return slowest([(time.perf_counter() - start) * 1e3])[0]


def record(name: str, step: Any, times: Sequence[float], free_ms: float) -> Record:
    predicted_ms = step.timeline.step_time_us / 1e3
    predicted_free_ms = step.in_force.decision.workload.free_us / 1e3
    measured_ms, repeat_ms = statistics.median(times[0::2]), statistics.median(times[1::2])
    drift = free_ms / predicted_free_ms
    scaled_ms, whole_ms = with_compute_scaled(step, drift), predicted_ms * drift
    return {
        "plan": name,
        "predicted_ms": scaled_ms,
        "measured_ms": measured_ms,
        "repeat_ms": repeat_ms,
        "error": scaled_ms / measured_ms - 1,
        "whole_error": whole_ms / measured_ms - 1,
        "raw_predicted_ms": predicted_ms,
        "raw_error": predicted_ms / measured_ms - 1,
        "printed_error": step.costs.error,
        "free_ms": free_ms,
        "predicted_free_ms": predicted_free_ms,
        "p10_ms": sorted(times)[len(times) // 10],
        "p90_ms": sorted(times)[-1 - len(times) // 10],
        "rounds": len(times),
        "buckets": len(step.plan.buckets),
    }


def with_compute_scaled(step: Any, drift: float) -> float:
    """Return the predicted step in ms with compute and CPU tasks scaled by `drift`."""
    tasks = [
        replace(span.task, duration_us=span.task.duration_us * drift)
        if span.task.stream in (Stream.COMPUTE, Stream.CPU)
        else span.task
        for span in step.timeline.spans
    ]
    return step_time_us(tasks, step.costs.processors) / 1e3


def main() -> None:
    arguments = parse_arguments()
    if is_rank():
        rank_main(arguments)
        return
    kept = Records(arguments.json)

    def hear(found: dict[str, Any]) -> None:
        kept.add(*found["records"])
        print(summary(found["records"]), flush=True)
        if arguments.report:
            arguments.report.write_text(summary(kept.found) + "\n")

    for count in arguments.hosts:
        run([str(Path(__file__).resolve()), *sys.argv[1:]], hear, hosts=count, timeout_s=7200)
    print(summary(kept.found))


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--hosts", default="2", help="numbers of hosts, separated by commas; one rank each")
    parser.add_argument("--inter", help="bandwidths, separated by commas")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--plans", default="; ".join(PLANS), help="names and strategies, separated by semicolons")
    parser.add_argument("--seconds", type=float, default=40.0, help="for measuring one model at one bandwidth")
    parser.add_argument("--quick", action="store_true", help="two rounds; mlp and 100 Mbit/s unless told otherwise")
    parser.add_argument("--report", type=Path, metavar="FILE", help="the tables in Markdown")
    arguments = parser.parse_args()
    arguments.hosts = [int(count) for count in arguments.hosts.split(",")]
    arguments.inter = (arguments.inter or ("100mbit" if arguments.quick else EVERY_INTER)).split(",")
    arguments.models = arguments.models.split(",") if arguments.models else ["mlp"] if arguments.quick else [*MODELS]
    named = [name.strip() for name in arguments.plans.split(";")]
    arguments.plans = [name for name in named if parses(name)]
    return arguments


if __name__ == "__main__":
    sys.exit(ends_well(main))
