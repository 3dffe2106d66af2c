"""Say what a search has found: the noise first, then the tensors, their bytes, and the line to write."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp.commands.bisect.partly_dense import compressed_names, partly_dense
from fxcomp.commands.bisect.search import Comparison, SearchFindings
from fxcomp.report.document import Column, Pairs, Section, Table, count, mb, members, short
from fxcomp.report.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Result:
    """A search over a predicted plan."""

    explanation: Explanation
    found: SearchFindings | None
    """None where the plan compresses nothing."""
    steps: int
    seeds: int
    given: str | None
    """The plan as it was named; None if fxcomp chose it within a mode or a budget."""
    within: str = "balanced"

    @property
    def names(self) -> list[str]:
        """The tensors to put dense."""
        guilty = self.found.guilty if self.found is not None else ()
        return [name for each in guilty for name in each.names]

    @property
    def is_spread(self) -> bool:
        """Nothing smaller than all that is compressed could be told to cost something."""
        return bool(self.names) and len(self.names) == len(compressed_names(self.explanation.plan))

    def more_bytes(self, names: Collection[str]) -> float:
        """The bytes that a rank sends more in a step over the slowest links, if these are dense."""
        plan, sent = self.explanation.plan, self.explanation.sent_bytes
        return sum(map(sent, partly_dense(plan, names).buckets)) - sum(map(sent, plan.buckets))

    @property
    def line(self) -> str:
        """The setting that leaves them dense; empty if there is nothing to change."""
        if not self.names:
            return ""
        if self.is_spread:
            return 'compress="lossless"'
        pins = ", ".join(f"{name!r}: 'dense'" for name in self.names)
        if self.given is not None:
            return "fxcomp.Compress(plan='mended.json')"
        return f"fxcomp.Compress(within={self.within}, pins={{{pins}}})"

    def share(self, of: Comparison) -> float | None:
        """The share of the whole cost; None where something diverges."""
        in_all = self.found.in_all.cost if self.found is not None else 0.0
        return of.cost / in_all if math.isfinite(of.cost) and math.isfinite(in_all) and in_all > 0 else None


def headline(result: Result) -> str:
    """Say it in a sentence."""
    found, trials = result.found, f"{count(result.seeds, 'seed')} of {count(result.steps, 'step')}"
    if found is None:
        return "The plan compresses nothing, so there is nothing to search."
    if not found.guilty:
        return f"Compression costs the loss nothing that {trials} could tell: {_with_noise(found.in_all)}."
    if result.is_spread:
        return f"Compression costs the loss {_cost(found.in_all)} over {trials}, by no part of the plan alone."
    return f"Compression of {members(result.names)} costs the loss, over {trials}."


def sections_of(result: Result) -> list[Section]:
    """Lay the findings out."""
    found = result.found
    if found is None:
        return []
    sections = [Section("Noise", [_losses(found), _NOISE])]
    if found.guilty:
        sections.append(Section("The cost of compression", [_guilty(result, found), *_remarks(found)]))
        sections.append(Section("To write", [*_advice(result)]))
    return sections


_NOISE = (
    "Costs are shares of dense's loss, seed by seed: both trainings have seen the same batches. Noise is how far the"
    " mean of so few seeds may be off by chance, in 39 of 40 cases; what is smaller is not told apart."
)


def _losses(found: SearchFindings) -> Pairs:
    def spread(losses: Sequence[float]) -> str:
        if not all(map(math.isfinite, losses)):
            return "diverges"
        return f"{statistics.mean(losses):.5g}, seeds spread by {statistics.stdev(losses):.2g}"

    return Pairs(
        [
            ("everything dense", spread(found.dense)),
            ("as planned", spread(found.chosen)),
            ("cost", _with_noise(found.in_all)),
            ("trainings", f"{found.trainings}"),
        ]
    )


_COLUMNS = (
    Column("tensors", is_text=True),
    Column("cost"),
    Column("noise"),
    Column("of all"),
    Column("MB more if dense"),
    Column("sent by", is_text=True, is_optional=True),
)


def _guilty(result: Result, found: SearchFindings) -> Table:
    by = {name: short(bucket.strategy) for bucket in result.explanation.plan.buckets for name in bucket.names}
    rows: list[Sequence[str]] = []
    for each in found.guilty:
        share = result.share(each.found)
        rows.append(
            (
                ", ".join(each.names) if len(each.names) <= 4 else members(each.names),
                _cost(each.found),
                _percent(each.found.noise),
                "" if share is None else f"{100 * share:.0f} %",
                mb(result.more_bytes(each.names)),
                ", ".join(dict.fromkeys(by[name] for name in each.names)),
            )
        )
    return Table(_COLUMNS, rows)


def _remarks(found: SearchFindings) -> Iterator[str]:
    yield "A row is the cost of these alone, with everything else dense; rows need not add up to all."
    groups = [each for each in found.guilty if len(each.names) > 1]
    if groups:
        yield (
            "Of tensors in one row no smaller set costs more than noise by itself: they cost a little each, or only"
            " together. More --seeds or --steps may tell them apart."
        )
    if found.rest is not None:
        yield f"With them dense, the rest of the plan costs {_with_noise(found.rest)}."


def _advice(result: Result) -> Iterator[str]:
    sent = sum(map(result.explanation.sent_bytes, result.explanation.plan.buckets))
    more = result.more_bytes(result.names)
    yield result.line
    if result.given is not None and not result.is_spread:
        yield "Write that plan with --save-plan mended.json: it is this one with those tensors dense."
    yield f"A rank then sends {mb(sent + more)} MB a step over the slowest links, not {mb(sent)}."


def to_json(result: Result) -> dict[str, Any]:
    """Convert to JSON; costs that are infinite are null."""
    found, names = result.found, result.names
    data: dict[str, Any] = {
        "schema": 1,
        "verdict": "dense" if found is None else "spread" if result.is_spread else "guilty" if names else "noise",
        "said": headline(result),
        "steps": result.steps,
        "seeds": result.seeds,
        "plan": result.explanation.plan.digest,
        "line": result.line or None,
        "more_bytes": result.more_bytes(names) if names else 0.0,
    }
    if found is None:
        return {**data, "guilty": []}
    guilty = [
        {
            "names": [*each.names],
            **_numbers(each.found),
            "share": result.share(each.found),
            "more_bytes": result.more_bytes(each.names),
        }
        for each in found.guilty
    ]
    return {
        **data,
        "dense": [*found.dense],
        "chosen": [loss if math.isfinite(loss) else None for loss in found.chosen],
        "in_all": _numbers(found.in_all),
        "guilty": guilty,
        "rest": None if found.rest is None else _numbers(found.rest),
        "trainings": found.trainings,
    }


def _numbers(found: Comparison) -> dict[str, float | None]:
    return {"cost": found.cost if math.isfinite(found.cost) else None, "noise": found.noise}


def _with_noise(found: Comparison) -> str:
    return f"{_cost(found)}, noise {_percent(found.noise)}"


def _cost(found: Comparison) -> str:
    return _percent(found.cost) if math.isfinite(found.cost) else "diverges"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"
