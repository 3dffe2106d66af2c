"""Explain a running step, as a report or in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxcomp.cost.timeline import Timeline
from fxcomp.error_tables import ErrorTable
from fxcomp.graph.work import unknowns
from fxcomp.options import StepOptions
from fxcomp.plan.budget import Budget
from fxcomp.plan.plan import Plan
from fxcomp.report.document import count
from fxcomp.report.explanation import Explanation
from fxcomp.search.decision import Decision, PlanMove
from fxcomp.search.question import Terms
from fxcomp.site import Site
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.schedule import Schedule
from fxcomp.step.step_times import StepTimes

EVERY_STEP_VERIFIED = (
    "every step is verified, so none is timed (Checks(verify=1)): plans do not race, and changed step times are not"
    " noticed"
)


def notes_of(
    force: PlanInForce, race: str, errors: str, steps: int, unlike_first: int, skipped: int
) -> tuple[str, ...]:
    """Return notes on the running step. `unlike_first`: number of steps with batches unlike the first."""
    notes = [race] if race else []
    if (prelude := force.program.captured.prelude) is not None:
        notes.append(prelude.said)
    if not force.is_warm:
        *stages, last = force.calendar.warm_from
        notes.append(f"warming up until step {last}: stage {force.stage + 1} of {len(stages)}")
    if errors:
        notes.append(errors)
    if unlike_first:
        notes.append(
            f"{unlike_first} of {steps} steps had other batches than the first, of {force.first_kind.text}: every time"
            " here, predicted or measured, is of batches like that"
        )
    if skipped:
        notes.append(f"{skipped} of {steps} steps left out: a gradient was not finite")
    return tuple(notes)


def explanation_of(
    decision: Decision,
    timeline: Timeline,
    terms: Terms,
    site: Site,
    times: StepTimes,
    schedule: Schedule,
    steps: int,
    notes: Sequence[str],
) -> Explanation:
    """Explain a decision that was followed for `steps` steps or backward passes."""
    return Explanation(
        plan=decision.plan,
        timeline=timeline,
        workload=decision.workload,
        costs=decision.costs,
        cluster=site.cluster,
        choice=decision.choice,
        mode=terms.mode.value,
        flip_gbit=decision.flip_gbit(site.cluster, terms),
        notes=(*decision.notes, *notes),
        measured_ms=times.median_ms,
        exposed_ms=times.exposed_ms,
        raced=schedule.raced,
        is_racing=schedule.takes_turns(steps),
        budget=terms.budget,
    )


def explanation_of_step(
    found: Explanation, force: PlanInForce, options: StepOptions, errors: ErrorTable, moves: Sequence[PlanMove]
) -> Explanation:
    """Add the facts of a compiled step.

    The error budget uses the latest measured `errors`, or else the errors by which the plan was chosen.
    """
    told, budget = set(map(str, moves)), found.budget
    if budget is not None and errors.is_measured:
        budget = Budget(budget.asked, errors)
    is_unseen = found.cluster.world_size > 1 and options.checks.verified.is_all
    return replace(
        found,
        plan=force.plan,
        batch=force.first_kind.text,
        notes=[*((EVERY_STEP_VERIFIED,) if is_unseen else ()), *(note for note in found.notes if note not in told)],
        unknowns=unknowns(force.standing.captured.graph),
        budget=budget,
        micro_batches=options.accumulate,
        moves=tuple(moves),
        stages=dict(zip(force.calendar.warm_from, force.plans, strict=True)),
        steps=options.compress.steps,
    )


# In numbers


def metrics_of(
    steps: int,
    skipped: int,
    payload_bytes: Mapping[tuple[str, str], int],
    times: StepTimes,
    plan: Plan | None,
    predicted: Timeline | None,
) -> dict[str, Any]:
    """Return numbers for logs, without waiting for the device.

    `steps`: number of steps or backward passes, including `skipped` ones. `payload_bytes`: bytes by kind of collective
    and level. Without a plan, numbers that need a plan are nan.
    """
    sent = sum(payload_bytes.values())
    dense = sum(bucket.dense_bytes for bucket in plan.buckets) if plan is not None else math.nan
    return {
        "step": steps,
        "step_ms": times.median_ms,
        "exposed_ms": times.exposed_ms,
        "predicted_ms": math.nan if predicted is None else predicted.step_time_us / 1e3,
        "sent_mb": sent / 1e6,
        "ratio": dense / sent if sent else math.nan,
        "skipped": skipped,
        "plan": "" if plan is None else plan.digest,
    }


def in_a_line(metrics: Mapping[str, Any], plan: Plan, *, is_racing: bool) -> str:
    """Return one line on compression and step time."""
    buckets = plan.buckets
    compressed = sum(not bucket.strategy.is_dense for bucket in buckets)
    said = [f"{compressed} of {count(len(buckets), 'bucket')} compressed" if compressed else "dense"]
    if compressed and not math.isnan(metrics["ratio"]):
        said.append(f"gradients / sent {metrics['ratio']:.3g}")
    measured = metrics["step_ms"]
    times = f"predicted {metrics['predicted_ms']:.4g} ms a step"
    said.append(times if math.isnan(measured) else f"{measured:.4g} ms a step, {times}")
    said += ["plans take turns"] if is_racing else []
    return ", ".join([*said, count(metrics["step"], "step"), f"plan {metrics['plan']}"])
