"""Predict steps and measure them: several models, plans, bandwidths, over shaped hosts.

    python benchmarks/prediction.py --hosts 2 --inter 100mbit,300mbit,1gbit,10gbit --json prediction.json

For each model and bandwidth fxcomp measures its costs once, as `compile_step` does. Every plan is then predicted from
these and run; plans take turns, round after round, of a few steps each, of which the first does not count: it finds the
caches of another plan. A step takes as long as its slowest rank. Odd rounds give `measured_ms`, even ones `repeat_ms`:
how far the two are apart is the noise floor, the error of a perfect prediction.

The machine drifts, so predictions are judged after scaling by the step without a network, measured over predicted. What
drifts is the processor: `error` is of the step with compute scaled and links as they were (docs/decisions/0009); beside
it stand `whole_error`, of the step scaled as a whole, and `raw_error`, of the step as predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import MODELS
from step_time import Reporter, agree, set_rate

from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, why_not
from fxcomp.errors import FxcompError
from fxcomp.frontends.job import Job

MARK = "@step_time "
FREE = "free"  # the dense plan without a network
SMALL_BUCKET = 1 << 18  # bytes
MIXED = ("dense", "int8", "topk(0.01)", "bf16", "int4")  # bucket by bucket, in turns
PLANS = ("dense", "dense, one bucket", "bf16", "int8", "topk(0.01)", "mixed")
WARM_UP_STEPS = 2
TURN = 3  # steps
FREE_TURNS = 3  # a round: every prediction is scaled by it

Record = dict[str, Any]


# What each rank does


def rank_main(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist

    join()
    tell = Reporter(dist.get_rank())
    for inter in arguments.inter:
        set_rate(inter)
        for model in arguments.models:
            tell.prefix = f"{inter} {model}: "
            found = predict_and_measure(model, arguments, tell)
            tell.send({"records": [{"model": model, "hosts": arguments.hosts, "inter": inter, **r} for r in found]})
        set_rate("loopback")
    dist.destroy_process_group()


def predict_and_measure(model: str, arguments: argparse.Namespace, tell: Reporter) -> list[Record]:
    """All plans of one model at the present bandwidth."""
    import torch.distributed as dist

    steps, begun = compile_plans(model, arguments.plans, tell), time.perf_counter()
    rank, batches = dist.get_rank(), MODELS[model]()
    for step in steps.values():
        for k in range(WARM_UP_STEPS):
            step(batches.batch_at(k, rank))
    one_round_s = TURN * (time.perf_counter() - begun) / WARM_UP_STEPS
    rounds = agree(2 * min(max(int(arguments.seconds / one_round_s / 2), 3), 8))
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


def compile_plans(model: str, names: Sequence[str], tell: Reporter) -> dict[str, Any]:
    """A step for each plan, and the dense one without a network, all from the same costs."""
    import fxcomp
    from fxcomp.runtime.transport import NullTransport

    def compiled(**options: Any) -> Any:
        job = after_one_step(model)
        return fxcomp.compile_step(
            job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm, **options
        )

    timed_only = fxcomp.ErrorFeedback(allow_diverging=True)  # top-k with AdamW
    tell("measuring costs")
    first = compiled()
    free = compiled(plan="dense", costs=first.costs, error_feedback=timed_only)
    gradients = [pair for bucket in free.plan.buckets for pair in zip(bucket.names, bucket.sizes, strict=True)]
    steps: dict[str, Any] = {}
    for name in names:
        tell(f"compiling {name}")
        steps[name] = compiled(plan=plan_called(name, gradients), costs=first.costs, error_feedback=timed_only)
    free.runtime.transport = NullTransport()
    return {**steps, FREE: free}


def after_one_step(model: str) -> Job:
    """The job when its optimizer has seen dense gradients: torch takes the root of zeros eight times as long."""
    job = MODELS[model]()
    job.loss_fn(job.model, job.batch).backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return job


def plan_called(name: str, gradients: Sequence[tuple[str, int]]) -> Any:
    """A plan by its name here, over the gradients (name, elements) in their order."""
    from fxcomp.compressors import parse_compressor
    from fxcomp.plan.plan import Bucket, Plan
    from fxcomp.plan.strategy import DENSE, Strategy

    kind, _, buckets = name.partition(", ")
    if not buckets and kind != "mixed":
        return name
    cap = float("inf") if buckets == "one bucket" else SMALL_BUCKET
    groups: list[list[tuple[str, int]]] = []
    size = 0
    for pair in gradients:
        if not groups or size + 4 * pair[1] > cap:
            groups.append([])
            size = 0
        groups[-1].append(pair)
        size += 4 * pair[1]
    strategies = [DENSE if kind == "dense" or c == "dense" else Strategy.flat(parse_compressor(c)) for c in MIXED]
    return Plan(
        tuple(
            Bucket(tuple(n for n, _ in group), tuple(s for _, s in group), strategies[k % len(strategies)])
            for k, group in enumerate(groups)
        )
    )


def timed_ms(step: Any, batch: Any) -> float:
    """One step, on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step(batch)
    slowest = torch.tensor((time.perf_counter() - start) * 1e3)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def record(name: str, step: Any, times: Sequence[float], free_ms: float) -> Record:
    predicted_ms = step.timeline.step_time_us / 1e3
    measured_ms, repeat_ms = statistics.median(times[0::2]), statistics.median(times[1::2])
    drift = free_ms / step.predicted_free_ms
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
        "free_ms": free_ms,
        "predicted_free_ms": step.predicted_free_ms,
        "p10_ms": sorted(times)[len(times) // 10],
        "p90_ms": sorted(times)[-1 - len(times) // 10],
        "rounds": len(times),
        "buckets": len(step.plan.buckets),
    }


def with_compute_scaled(step: Any, drift: float) -> float:
    """The predicted step, in ms, on processors that take `drift` times as long."""
    from fxcomp.cost.timeline import step_time_us
    from fxcomp.plan.streams import Stream

    tasks = [
        replace(span.task, duration_us=span.task.duration_us * drift)
        if span.task.stream in (Stream.COMPUTE, Stream.CPU)
        else span.task
        for span in step.timeline.spans
    ]
    return step_time_us(tasks, step.costs.processors) / 1e3


# What the numbers say


def summary(records: Sequence[Record]) -> str:
    """Errors and orders of each configuration, and of all."""
    lines = [
        "| model | inter | free ms | plan | measured | repeat | predicted | error | whole | raw |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r['model']} | {r['inter']} | {r['free_ms']:.0f} | {r['plan']} | {r['measured_ms']:.1f} |"
        f" {r['repeat_ms']:.1f} | {r['predicted_ms']:.1f} | {r['error']:+.1%} | {r['whole_error']:+.1%} |"
        f" {r['raw_error']:+.1%} |"
        for r in records
    ]
    errors = sorted(abs(r["error"]) for r in records)
    noise = sorted(abs(r["repeat_ms"] / r["measured_ms"] - 1) for r in records)
    configurations: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        configurations.setdefault((r["model"], r["inter"]), []).append(r)
    lines += [
        "",
        f"error: median {statistics.median(errors):.1%}, 90th percentile {at(errors, 0.9):.1%}",
        *(f"{kind}: {quantiles(records, kind)}" for kind in ("whole_error", "raw_error")),
        f"noise: median {statistics.median(noise):.1%}, 90th percentile {at(noise, 0.9):.1%}",
    ]
    for (model, inter), found in configurations.items():
        order = rank_correlation([r["predicted_ms"] for r in found], [r["measured_ms"] for r in found])
        again = rank_correlation([r["repeat_ms"] for r in found], [r["measured_ms"] for r in found])
        lines.append(f"order of plans, {model} at {inter}: {order:.2f} (the same plans again: {again:.2f})")
    return "\n".join(lines)


def quantiles(records: Sequence[Record], kind: str) -> str:
    errors = sorted(abs(r[kind]) for r in records)
    return f"median {statistics.median(errors):.1%}, 90th percentile {at(errors, 0.9):.1%}"


def at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    return statistics.correlation(ranks(a), ranks(b))


# The parent


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    missing = why_not()
    if missing is not None:
        sys.exit(missing)
    found: list[Record] = []

    def hear(_rank: int, line: str) -> None:
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            print(content["note"], file=sys.stderr, flush=True)
            return
        found.extend(content["records"])
        print(summary(content["records"]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    try:
        with ShapedHosts(arguments.hosts) as hosts:
            run_ranks([str(Path(__file__).resolve()), *sys.argv[1:]], hosts=hosts, timeout_s=7200, on_line=hear)
    except FxcompError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(summary(found))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predict training steps and measure them over shaped networks.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--inter", default="100mbit,300mbit,1gbit,10gbit")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default="; ".join(PLANS), help="separated by semicolons")
    parser.add_argument("--seconds", type=float, default=40.0, help="for measuring one model at one bandwidth")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.inter, arguments.models = arguments.inter.split(","), arguments.models.split(",")
    arguments.plans = [name.strip() for name in arguments.plans.split(";")]
    return arguments


if __name__ == "__main__":
    main()
