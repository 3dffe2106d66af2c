"""Judge which costs are wrong. Judges return findings and change nothing.

Every cost is judged by itself, as the sum over its lines in a step, median of 20 timed steps, over all ranks. It is
wrong if in two windows in a row, in the same direction, it is off by more than the whole step's error band, and by more
than such a cost varies anyway. All ranks judge the same numbers, so they find the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.timeline import simulate
from fxcomp.graph.lines import CostKind
from fxcomp.step.drift.predicted_costs import Cost, PredictedCosts

NOISE = {
    CostKind.COMPUTE: 0.10,
    CostKind.UPDATE: 0.25,
    CostKind.PACK: 0.50,
    CostKind.START: 0.50,
    CostKind.COLLECTIVE: 0.15,
    CostKind.COMPRESS: 0.25,
    CostKind.DECOMPRESS: 0.25,
}
"""The relative variation of a window's median with nothing wrong (assumed, from the spread of calibrations: short lines
vary most, and one bandwidth prices all of them)."""

LEAST_RATIO = 0.1
"""No cost is corrected to less than this share of what it was (assumed); the rest shows in the next window."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cost as all ranks see it, us a step: predicted, and measured in two windows; None where not known."""

    cost: Cost
    predicted_us: float
    first_us: float | None
    second_us: float | None


def all_costs(everyone: Iterable[Iterable[Cost]]) -> tuple[Cost, ...]:
    """Join what ranks compare, in the same order on all of them: where hosts differ, so does what ranks do."""
    return tuple(sorted(frozenset(chain.from_iterable(everyone)), key=lambda cost: cost.order))


def agreed_rows(costs: Sequence[Cost], everyone: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    """Merge the numbers of the ranks that predict a cost into the first one's prediction and the median measurement.

    A collective takes the shortest instead: it begins when its last rank has come, and the others count their waiting.
    Measurements are scaled to the first rank's prediction: another rank may have fewer such lines, or smaller shards.
    """
    rows: list[Row] = []
    for k, cost in enumerate(costs):
        known = [mine[3 * k : 3 * k + 3] for mine in everyone if mine[3 * k] >= 0]
        if known:
            first, second = (_merged(cost, [(each[0], each[window]) for each in known]) for window in (1, 2))
            rows.append(Row(cost, known[0][0], first, second))
    return tuple(rows)


def _merged(cost: Cost, ranks: Sequence[tuple[float, float]]) -> float | None:
    """Merge what ranks predicted and measured for one cost in a window."""
    if any(measured < 0 for _, measured in ranks):
        return None
    reference = ranks[0][0]
    values = [measured * (reference / own if own > 0 else 1.0) for own, measured in ranks]
    return float(min(values) if cost.kind is CostKind.COLLECTIVE else statistics.median(values))


@dataclass(frozen=True, slots=True)
class Finding:
    """A cost that is wrong: what is predicted and what was measured, us a step."""

    cost: Cost
    """With the bytes of the largest part, for a collective."""
    predicted_us: float
    measured_us: float
    parts: tuple[tuple[int, float, float], ...] = ()
    """Of a collective: bytes, predicted, measured."""

    @property
    def ratio(self) -> float:
        return self.measured_us / self.predicted_us if self.predicted_us else math.inf

    @property
    def cause(self) -> str:
        """The kind of mistake, whatever its size."""
        return f"{self.cost.kind.value} {self.cost.what}"


def judge(rows: Sequence[Row], step_us: float, error: float) -> tuple[Finding, ...]:
    """List the costs that are wrong, the worst first. `step_us` is the predicted step, `error` its relative band.

    Compute and the starts of collectives are judged together, since the model decides where a collective's own work on
    the processor is counted; the one that is further off is named.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.first_us is not None and row.second_us is not None:
            kind = CostKind.COMPUTE if row.cost.kind is CostKind.START else row.cost.kind
            groups.setdefault((kind.value, row.cost.what), []).append(row)
    findings: list[Finding] = []
    for members in groups.values():
        predicted = sum(row.predicted_us for row in members)
        first_off = sum(row.first_us or 0.0 for row in members) - predicted
        second_off = sum(row.second_us or 0.0 for row in members) - predicted
        band = max(error * step_us, NOISE[members[0].cost.kind] * predicted)
        if first_off * second_off > 0 and min(abs(first_off), abs(second_off)) > band:
            findings.append(_finding(members, second_off))
    return tuple(sorted(findings, key=lambda f: (-abs(f.measured_us - f.predicted_us), f.cost.order)))


def _finding(members: Sequence[Row], off: float) -> Finding:
    if members[0].cost.kind is CostKind.COLLECTIVE:
        parts = tuple((row.cost.size, row.predicted_us, _at_least(row.predicted_us, row.second_us)) for row in members)
        largest = max(members, key=lambda row: row.cost.size)
        predicted, measured = (sum(part[k] for part in parts) for k in (1, 2))
        return Finding(largest.cost, predicted, measured, parts)
    worst = max(members, key=lambda row: math.copysign(1.0, off) * ((row.second_us or 0.0) - row.predicted_us))
    # What the other members gained is booked here too, and nothing takes less than no time.
    return Finding(worst.cost, worst.predicted_us, _at_least(worst.predicted_us, worst.predicted_us + off))


def _at_least(predicted_us: float, measured_us: float | None) -> float:
    """Return what was measured, but not less than the least correction: a late rank sees a collective take no time."""
    return max(LEAST_RATIO * predicted_us, measured_us or 0.0)


def step_with(findings: Sequence[Finding], predicted: PredictedCosts, processors: Processors) -> float:
    """Predict the step with the costs that were found, in us."""
    found = {(finding.cost.kind, finding.cost.what): finding.ratio for finding in findings}
    factors = {task: found.get((cost.kind, cost.what), 1.0) for task, cost in predicted.tasks.items()}
    factors = {task: factor for task, factor in factors.items() if math.isfinite(factor)}
    tasks = [
        replace(span.task, duration_us=span.task.duration_us * factors.get(span.task.name, 1.0))
        for span in predicted.timeline.spans
    ]
    return simulate(tasks, processors).step_time_us
