"""Say what a search has found: the noise first, then the tensors, their bytes, and the line to write."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxcomp.commands.bisect.advice import mended, written
from fxcomp.commands.bisect.partly_dense import compressed_names, partly_dense
from fxcomp.commands.bisect.search import Comparison, SearchFindings
from fxcomp.errors import DivergingCombination
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import UpdateKind, check_plan
from fxcomp.plan.plan import Plan
from fxcomp.report.document import Column, Pairs, Section, Table, count, mb, members, short
from fxcomp.report.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Result:
    """A search over a predicted plan."""

    explanation: Explanation
    found: SearchFindings | None
    """None where the plan compresses nothing."""
    compress: Compress
    """The user's own."""
    steps: int
    seeds: int
    least: float = 0.0
    kinds: Collection[UpdateKind] = ()
    """Of the optimizer's updates."""
    saved: str | None = None
    """The file into which the plan with those tensors dense was written."""

    @property
    def names(self) -> list[str]:
        """The tensors to put dense."""
        guilty = self.found.guilty if self.found is not None else ()
        return [name for each in guilty for name in each.names]

    @property
    def is_spread(self) -> bool:
        """Nothing smaller than all that is compressed could be told to cost something."""
        guilty = self.found.guilty if self.found is not None else ()
        compressed = compressed_names(self.explanation.plan)
        return len(guilty) == 1 and len(guilty[0].names) == len(compressed) > 1

    @property
    def mended_plan(self) -> Plan:
        """The plan with those tensors dense."""
        return partly_dense(self.explanation.plan, self.names)

    def refusal(self, plan: Plan) -> str:
        """Say why compile_step refuses a plan under this optimizer; empty if it does not."""
        known = self.explanation
        try:
            check_plan(self.compress.feedback, plan, known.workload.shapes, known.cluster, self.kinds)
        except DivergingCombination as error:
            return str(error).partition("\n")[0]
        return ""

    def more_bytes(self, names: Collection[str]) -> float:
        """The bytes that a rank sends more in a step over the slowest links, if these are dense."""
        return _sent(self, partly_dense(self.explanation.plan, names)) - _sent(self, self.explanation.plan)

    @property
    def line(self) -> str:
        """The setting that leaves them dense; empty if there is nothing to change, or only a plan could say it."""
        if not self.names:
            return ""
        if self.is_spread:
            return written(Compress(within="lossless"))
        found = mended(self.compress, self.names, self.mended_plan, self.saved)
        if found is not None and self.refusal(self.mended_plan):
            found = replace(found, feedback=replace(found.feedback, allow_diverging=True))
        return "" if found is None else written(found)

    def share(self, of: Comparison) -> float | None:
        """The share of the whole cost; None where something diverges."""
        in_all = self.found.in_all.cost if self.found is not None else 0.0
        return of.cost / in_all if math.isfinite(of.cost) and math.isfinite(in_all) and in_all > 0 else None


def headline(result: Result) -> str:
    """Say it in a sentence."""
    found, trials = result.found, f"{count(result.seeds, 'seed')} of {count(result.steps, 'step')}"
    if found is None:
        return "The plan compresses nothing, so there is nothing to search."
    cost = found.in_all
    if found.guilty:
        hurts = "makes the training diverge" if cost.cost == math.inf else f"costs the loss {_cost(cost)}"
        by = "by no part of the plan alone" if result.is_spread else f"by {members(result.names)}"
        return f"Compression {hurts}, over {trials}: {by}."
    some = f"{_diverging(cost)} of {result.seeds}, too few to name a tensor. " if cost.diverging else ""
    if cost.counts():
        limit = f"--least {_percent(result.least)}"
        return f"{some}Compression costs the loss {_cost(cost)} over {trials}, up to {limit}: nothing is searched."
    rest = " in the others" if some else ""
    return f"{some}Compression costs the loss nothing that {trials} could tell{rest}: {_with_noise(cost)}."


def sections_of(result: Result) -> list[Section]:
    """Lay the findings out."""
    found = result.found
    if found is None:
        return []
    refusal = result.refusal(result.explanation.plan)
    refused = [f"compile_step refuses this plan, and bisect trains it to see: {refusal}"] if refusal else []
    sections = [Section("Noise", [_losses(found), _NOISE, *refused])]
    if found.guilty:
        sections.append(Section("The cost of compression", [_guilty(result, found), *_remarks(found)]))
        sections.append(Section("To write", [*_advice(result)]))
    return sections


_NOISE = (
    "Costs are shares of dense's loss, seed by seed: both trainings have seen the same batches. Noise is how far the"
    " mean of so few seeds may be off by chance, in 39 of 40 comparisons; what is smaller is not told apart. Only where"
    " all seeds diverge are tensors guilty of that."
)


def _losses(found: SearchFindings) -> Pairs:
    def spread(losses: Sequence[float]) -> str:
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            return "diverges"
        apart = f", seeds spread by {statistics.stdev(finite):.2g}" if len(finite) > 1 else ""
        less = len(losses) - len(finite)
        return f"{statistics.mean(finite):.5g}{apart}{f', {less} of {len(losses)} diverge' if less else ''}"

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
                _noise(each.found),
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
    line, is_given = result.line, result.compress.plan is not None and not result.is_spread
    if line:
        yield line
    if result.saved is not None:
        yield f"{result.saved} holds this plan with those tensors dense."
    elif is_given and line and not result.mended_plan.is_dense:
        yield "fxcomp chooses the buckets of these pins. --save-plan FILE writes this plan with those tensors dense."
    elif is_given and not line:
        yield "No pins say it: search again with --save-plan FILE, which writes this plan with those tensors dense."
    if not result.is_spread and result.refusal(result.mended_plan):
        yield "compile_step refuses what is left, too: the line allows it, and longer trainings may diverge."
    plan = result.explanation.plan
    sent, after = _sent(result, plan), _sent(result, result.mended_plan)
    yield f"A rank then sends {mb(after)} MB a step over the slowest links, not {mb(sent)}."


def _sent(result: Result, plan: Plan) -> float:
    return sum(map(result.explanation.sent_bytes, plan.buckets))


def to_json(result: Result) -> dict[str, Any]:
    """Convert to JSON; costs that are infinite are null."""
    found, names = result.found, result.names
    data: dict[str, Any] = {
        "schema": 1,
        "verdict": _verdict(result),
        "said": headline(result),
        "steps": result.steps,
        "seeds": result.seeds,
        "least": result.least,
        "refused": result.refusal(result.explanation.plan) or None,
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


def _verdict(result: Result) -> str:
    if result.found is None:
        return "dense"
    if result.names:
        return "spread" if result.is_spread else "guilty"
    return "small" if result.found.in_all.counts() else "noise"


def _numbers(found: Comparison) -> dict[str, float | None]:
    cost, noise = (value if math.isfinite(value) else None for value in (found.cost, found.noise))
    return {"cost": cost, "noise": noise, "diverging": found.diverging}


def _with_noise(found: Comparison) -> str:
    return f"{_cost(found)}, noise {_noise(found)}"


def _cost(found: Comparison) -> str:
    return _percent(found.cost) if math.isfinite(found.cost) else "diverges"


def _noise(found: Comparison) -> str:
    return _percent(found.noise) if math.isfinite(found.noise) else "unknown"


def _diverging(found: Comparison) -> str:
    return f"{count(found.diverging, 'seed')} {'diverges' if found.diverging == 1 else 'diverge'}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"
