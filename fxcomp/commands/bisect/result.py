"""Say what a search has found: the noise first, then the tensors, their bytes, and the line to write."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fxcomp.commands.bisect.mend import compressed_names, mended, partly_dense, written
from fxcomp.commands.bisect.search import Comparison, Guilt, SearchFindings, finite_of
from fxcomp.errors import BadOption
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import UpdateKind, check_plan
from fxcomp.plan.plan import Plan
from fxcomp.report.document import Section, Table, count, mb, members, short
from fxcomp.report.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Result:
    """A search over a predicted plan."""

    explanation: Explanation
    found: SearchFindings
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
    def plan(self) -> Plan:
        return self.explanation.plan

    @property
    def names(self) -> list[str]:
        """The tensors to put dense."""
        return [name for each in self.found.guilty for name in each.names]

    @property
    def is_spread(self) -> bool:
        """Nothing smaller than all that is compressed could be told to cost something."""
        return len(self.found.guilty) == 1 and 1 < len(self.names) == len(compressed_names(self.plan))

    @property
    def mended_plan(self) -> Plan:
        """The plan with those tensors dense."""
        return partly_dense(self.plan, self.names)

    def refusal(self, plan: Plan) -> str:
        """Say why compile_step refuses a plan under this optimizer; empty if it does not."""
        known = self.explanation
        try:
            check_plan(self.compress.feedback, plan, known.workload.shapes, known.cluster, self.kinds)
        except BadOption as error:
            return str(error).partition("\n")[0]
        return ""

    def sent_bytes(self, plan: Plan) -> float:
        """The bytes that a rank sends in a step over the slowest links."""
        return sum(map(self.explanation.sent_bytes, plan.buckets), 0.0)

    def more_bytes(self, names: Collection[str]) -> float:
        """The bytes that it sends more if these are dense."""
        return self.sent_bytes(partly_dense(self.plan, names)) - self.sent_bytes(self.plan)

    @property
    def line(self) -> str:
        """The setting that leaves them dense; empty if there is nothing to change, or only a plan could say it."""
        if self.is_spread:
            return written(Compress(within="lossless"))
        found = mended(self.compress, self.names, self.mended_plan, self.saved) if self.names else None
        if found is None:
            return ""
        if self.refusal(self.mended_plan):
            found = replace(found, feedback=replace(found.feedback, allow_diverging=True))
        return written(found)

    def share(self, of: Comparison) -> float | None:
        """The share of the whole cost; None where something diverges."""
        in_all = self.found.in_all.cost
        return of.cost / in_all if 0 < in_all < math.inf and math.isfinite(of.cost) else None


def headline(result: Result) -> str:
    return _verdict(result)[1]


def _verdict(result: Result) -> tuple[str, str]:
    """Say it in a word, and in a sentence."""
    found, trials = result.found, f"{count(result.seeds, 'seed')} of {count(result.steps, 'step')}"
    if not found.trainings:
        return "dense", "The plan compresses nothing, so there is nothing to search."
    cost = found.in_all
    costs = "makes the training diverge" if cost.cost == math.inf else f"costs the loss {_percent(cost.cost)}"
    if result.is_spread:
        return "spread", f"Compression {costs}, over {trials}: by no part of the plan alone."
    if result.names:
        return "guilty", f"Compression {costs}, over {trials}: by {members(result.names)}."
    some, rest = "", ""
    if cost.diverging:
        diverge = f"{count(cost.diverging, 'seed')} diverge{'s' if cost.diverging == 1 else ''}"
        some, rest = f"{diverge} of {result.seeds}, too few to name a tensor. ", " in the others"
    if cost.counts():
        limit = f"--least {_percent(result.least)}"
        return "small", f"{some}Compression {costs} over {trials}, up to {limit}: nothing is searched."
    return "noise", f"{some}Compression costs the loss nothing that {trials} could tell{rest}: {_with_noise(cost)}."


_NOISE = (
    "Costs are shares of dense's loss, seed by seed: both trainings have seen the same batches. Noise is how far the"
    " mean of so few seeds may be off by chance, in 39 of 40 comparisons; what is smaller is not told apart. Only where"
    " all seeds diverge are tensors guilty of that."
)

_COLUMNS = ("tensors", "cost", "noise", "of all", "MB more if dense", "sent by")


def sections_of(result: Result) -> list[Section]:
    """Lay the findings out."""
    found = result.found
    if not found.trainings:
        return []
    losses = [
        ("everything dense", _losses(found.dense)),
        ("as planned", _losses(found.chosen)),
        ("cost", _with_noise(found.in_all)),
        ("trainings", f"{found.trainings}"),
    ]
    refusal = result.refusal(result.plan)
    refused = [f"compile_step refuses this plan, and bisect trains it to see: {refusal}"] if refusal else []
    sections = [Section("Noise", [Table((), losses), _NOISE, *refused])]
    if found.guilty:
        rows = [_row(result, each) for each in found.guilty]
        table = Table(_COLUMNS, rows, text=("tensors", "sent by"), optional=("sent by",))
        sections.append(Section("The cost of compression", [table, *_remarks(found)]))
        sections.append(Section("To write", [*_advice(result)]))
    return sections


def _losses(losses: Sequence[float]) -> str:
    finite = finite_of(losses)
    if not finite:
        return "diverges"
    apart = f", seeds spread by {statistics.stdev(finite):.2g}" if len(finite) > 1 else ""
    less = len(losses) - len(finite)
    return f"{statistics.mean(finite):.5g}{apart}{f', {less} of {len(losses)} diverge' if less else ''}"


def _row(result: Result, guilt: Guilt) -> list[str]:
    names, share = guilt.names, result.share(guilt.found)
    by = {name: short(bucket.strategy) for bucket in result.plan.buckets for name in bucket.names}
    return [
        ", ".join(names) if len(names) <= 4 else members(names),
        _percent(guilt.found.cost),
        _percent(guilt.found.noise, "unknown"),
        "" if share is None else f"{100 * share:.0f} %",
        mb(result.more_bytes(names)),
        ", ".join(dict.fromkeys(by[name] for name in names)),
    ]


def _remarks(found: SearchFindings) -> Iterator[str]:
    yield "A row is the cost of these alone, with everything else dense; rows need not add up to all."
    if any(len(each.names) > 1 for each in found.guilty):
        yield (
            "Of tensors in one row no smaller set costs more than noise by itself: they cost a little each, or only"
            " together. More --seeds or --steps may tell them apart."
        )
    if found.rest is not None:
        yield f"With them dense, the rest of the plan costs {_with_noise(found.rest)}."


def _advice(result: Result) -> Iterator[str]:
    line, after = result.line, result.mended_plan
    is_given = result.compress.plan is not None and not result.is_spread
    if line:
        yield line
    if result.saved is not None:
        yield f"{result.saved} holds this plan with those tensors dense."
    elif is_given and not line:
        yield "No pins say it: search again with --save-plan FILE, which writes this plan with those tensors dense."
    elif is_given and not after.is_dense:
        yield "fxcomp chooses the buckets of these pins. --save-plan FILE writes this plan with those tensors dense."
    if not result.is_spread and result.refusal(after):
        yield "compile_step refuses what is left, too: the line allows it, and longer trainings may diverge."
    sent, before = mb(result.sent_bytes(after)), mb(result.sent_bytes(result.plan))
    yield f"A rank then sends {sent} MB a step over the slowest links, not {before}."


def to_json(result: Result) -> dict[str, Any]:
    """Convert to JSON; costs and losses that are not finite are null."""
    found, (verdict, said) = result.found, _verdict(result)
    data: dict[str, Any] = {
        "schema": 1,
        "verdict": verdict,
        "said": said,
        "steps": result.steps,
        "seeds": result.seeds,
        "least": result.least,
        "refused": result.refusal(result.plan) or None,
        "plan": result.plan.digest,
        "line": result.line or None,
        "more_bytes": result.more_bytes(result.names),
    }
    guilty = [
        {
            "names": each.names,
            **asdict(each.found),
            "share": result.share(each.found),
            "more_bytes": result.more_bytes(each.names),
        }
        for each in found.guilty
    ]
    searched = asdict(found) if found.trainings else {}
    return json.loads(json.dumps({**data, **searched, "guilty": guilty}), parse_constant=lambda _: None)


def _with_noise(found: Comparison) -> str:
    return f"{_percent(found.cost)}, noise {_percent(found.noise, 'unknown')}"


def _percent(share: float, otherwise: str = "diverges") -> str:
    if not math.isfinite(share):
        return otherwise
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"
