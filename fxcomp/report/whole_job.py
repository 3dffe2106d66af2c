"""Report time and bytes of a whole job that exchanges momenta after a warm-up with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fxcomp.plan.lines import FP32
from fxcomp.plan.plan import Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import DENSE
from fxcomp.report.document import Block, Section, Table, count, decimals, mb, ms
from fxcomp.report.explanation import Explanation
from fxcomp.search.choose import predict_us
from fxcomp.search.exchanged import Stretch, first_that_pays, job_us, long, stretches


@dataclass(frozen=True, slots=True)
class WholeJob:
    """Predicted time and bytes of a whole job, and of the same job with a dense plan."""

    stretches: Sequence[Stretch]
    """Runs of steps with one plan: warm-up stages, then the rest."""
    sent_bytes: Sequence[float]
    """Bytes that a rank sends per step, by stretch."""
    dense_step_us: float
    dense_step_bytes: float
    gradients_us: float | None
    """Time of the job with the best plan that exchanges gradients; None without a comparison."""
    pays_from: int | None
    """Minimum length of a job, in steps, for which momenta are faster; None if never, or not compared."""

    @property
    def steps(self) -> int:
        return sum(each.steps for each in self.stretches)

    @property
    def us(self) -> float:
        return job_us(self.stretches)

    @property
    def bytes(self) -> float:
        return sum(each.steps * size for each, size in zip(self.stretches, self.sent_bytes, strict=True))

    @property
    def dense_us(self) -> float:
        return self.steps * self.dense_step_us

    @property
    def dense_bytes(self) -> float:
        return self.steps * self.dense_step_bytes

    @property
    def warm(self) -> Sequence[Stretch]:
        """The stretches that exchange gradients."""
        return [each for each in self.stretches if not each.plan.moves_exchange]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "warm_steps": sum(each.steps for each in self.warm),
            "stretches": [
                {"steps": each.steps, "step_ms": each.step_us / 1e3, "wire_bytes": round(size)}
                for each, size in zip(self.stretches, self.sent_bytes, strict=True)
            ],
            "ms": self.us / 1e3,
            "wire_bytes": round(self.bytes),
            "dense_ms": self.dense_us / 1e3,
            "dense_wire_bytes": round(self.dense_bytes),
            "gradients_ms": None if self.gradients_us is None else self.gradients_us / 1e3,
            "pays_from": self.pays_from,
        }


def whole_job(explanation: Explanation) -> WholeJob | None:
    """Predict the whole job; None if its number of steps is unknown or no momenta are exchanged."""
    plan, steps = lasting_plan(explanation), explanation.steps
    if steps is None or not plan.moves_exchange:
        return None
    costs, cluster, workload = explanation.costs, explanation.cluster, explanation.workload

    @cache
    def price(of: Plan) -> float:
        return predict_us(workload, of, costs, cluster)

    stages = explanation.stages or {0: plan}
    found = stretches(stages, steps, price)
    choice, dense = explanation.choice, plan.with_strategies([DENSE] * len(plan.buckets)).at_gradients()
    gradients_us, pays_from = None, None
    if choice is not None and choice.exchanged is not None:
        gradients_us, pays_from = choice.exchanged.gradients_us, choice.exchanged.pays_from
    elif choice is not None and not choice.fastest.moves_exchange:
        step_us = choice.fastest_us
        gradients_us = steps * step_us
        pays_from = first_that_pays(lambda count: job_us(stretches(stages, count, price)) < count * step_us)
    return WholeJob(
        found,
        [_sent(explanation, each.plan) for each in found],
        price(dense) if choice is None else choice.dense_us,
        _sent(explanation, dense),
        gradients_us,
        pays_from,
    )


def lasting_plan(explanation: Explanation) -> Plan:
    """Return the plan after the warm-up."""
    return [explanation.plan, *explanation.stages.values()][-1]


def residual_bytes(explanation: Explanation) -> int:
    """Return the bytes of rank 0's residuals under the lasting plan."""
    shapes, found = explanation.workload.shapes, 0
    for bucket in lasting_plan(explanation).buckets:
        route = route_of(bucket.strategy, bucket.shapes(shapes), explanation.cluster)
        kept = (leg for leg in route.slots if leg.compressor.needs_error_feedback)
        found += FP32 * sum(len(piece) for leg in kept for piece in leg.pieces)
    return found


def _sent(explanation: Explanation, plan: Plan) -> float:
    return sum(explanation.sent_bytes(bucket) for bucket in plan.buckets)


def moved_json(explanation: Explanation) -> dict[str, Any]:
    plan = lasting_plan(explanation)
    if not plan.moves_exchange:
        return {}
    job = whole_job(explanation)
    about = {"parameters": list(plan.moved), "residual_bytes": residual_bytes(explanation)}
    return {"momenta": {**about, "job": None if job is None else job.to_json()}}


def momenta_section(explanation: Explanation) -> Section:
    plan, sizes = lasting_plan(explanation), explanation.workload.sizes
    moved, values = len(plan.moved), max(1, sum(sizes.values()))
    first, kept = list(explanation.stages or {0: plan})[-1], residual_bytes(explanation)
    share = sum(sizes[name] for name in plan.moved) / values
    blocks: list[Block] = [
        f"Ranks exchange the momentum of {count(moved, 'parameter')} ({share:.1%} of the values). From step {first} on"
        " the optimizer's second moment, where it has one, stays frozen: Adam is another algorithm then.",
        f"Residuals keep {kept / values:.2f} bytes of memory a value, {mb(kept)} MB on a rank.",
    ]
    job = whole_job(explanation)
    if job is None:
        blocks.append("With the length of the job (steps=, --steps) this section adds its total time and bytes.")
    else:
        blocks += [_table(job), *_sentences(job)]
    return Section("Momenta", blocks)


def _table(job: WholeJob) -> Table:
    digits = decimals(job.us / job.steps)
    rows: list[Sequence[str]] = []
    for each, size in zip(job.stretches, job.sent_bytes, strict=True):
        what = "momenta" if each.plan.moves_exchange else "warm-up"
        step = f"{ms(each.step_us, digits)} ms"
        rows.append((what, f"{each.steps:,}", step, mb(size), long(each.us), mb(each.steps * size)))
    rows.append(("whole job", f"{job.steps:,}", "", "", long(job.us), mb(job.bytes)))
    dense = f"{ms(job.dense_step_us, digits)} ms", mb(job.dense_step_bytes), long(job.dense_us), mb(job.dense_bytes)
    rows.append(("dense", f"{job.steps:,}", *dense))
    names = ("", "steps", "a step", "MB sent a step", "time", "MB sent")
    return Table(names, rows, optional=("MB sent a step",))


def _sentences(job: WholeJob) -> list[str]:
    steps, us = (sum(getattr(each, name) for each in job.warm) for name in ("steps", "us"))
    pairs = zip(job.stretches, job.sent_bytes, strict=True)
    sent = sum(each.steps * size for each, size in pairs if not each.plan.moves_exchange)
    found = [
        f"The job takes 1/{job.dense_us / job.us:.1f} of the time of the best dense plan, and sends"
        f" 1/{job.dense_bytes / job.bytes:.1f} of its bytes. The warm-up is {steps / job.steps:.0%} of its steps,"
        f" {us / job.us:.0%} of its time and {sent / job.bytes:.0%} of its bytes."
    ]
    if job.gradients_us is not None:
        since = "is always shorter" if job.pays_from is None else f"is longer from {job.pays_from:,} steps on"
        found.append(f"By the best plan at gradients it takes {long(job.gradients_us)}; it {since} then.")
    return found
