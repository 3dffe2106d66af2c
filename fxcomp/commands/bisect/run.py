"""`fxcomp bisect`: find tensors whose compression increases the loss, by short trainings on this machine."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxcomp import status_line
from fxcomp.commands.bisect.mend import compressed_names, mended, partly_dense, written
from fxcomp.commands.bisect.rank import Trainings, search_on_ranks
from fxcomp.commands.bisect.search import NOTHING_TO_SEARCH, Comparison, SearchFindings, finite_of
from fxcomp.commands.job_options import add_plan_options, asked_compress, chosen_cluster, job_files
from fxcomp.commands.outputs import check_outputs, save_plan
from fxcomp.errors import BadOption
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf, capture_job, what_if
from fxcomp.graph.update_kinds import update_kinds
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import UpdateKind, check_plan
from fxcomp.plan.plan import Plan
from fxcomp.report.document import Section, Table, count, mb, members, short
from fxcomp.report.explanation import Explanation
from fxcomp.report.terminal import print_sections

NAME = "bisect"
HELP = "find the tensors whose compression costs the loss, by short trainings on this machine"
EXAMPLES = """\
  fxcomp bisect train.py --compress 'topk(0.01)'                which tensors that hurts, in short trainings here
"""

MOST_RANKS = 8
"""Maximum number of ranks on this machine (assumed)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.set_defaults(job_steps=None)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each training (default: 60)")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="trainings of a kind, 2 or more (default: 4)")
    parser.add_argument("--checkpoint", metavar="FILE", help="begin from a saved model.state_dict(), not from scratch")
    parser.add_argument(
        "--least",
        type=float,
        default=0.001,
        metavar="SHARE",
        help="a cost up to this share of the loss is not searched for (default: 0.001)",
    )
    parser.add_argument("--save-plan", metavar="FILE", help="write the plan with the tensors that are found dense")
    parser.add_argument("--json", action="store_true", help="print data instead of a report")


def run(arguments: argparse.Namespace) -> int:
    check_outputs({"--save-plan": arguments.save_plan}, (*job_files(arguments), arguments.checkpoint))
    cluster, _ = chosen_cluster(arguments)
    _check(arguments, cluster.world_size)
    status_line.show("loading the job ...")
    job = load_job(arguments.job)
    if job.next_batch is None:
        raise BadOption(
            f"{arguments.job!r} has one batch, and bisect trains on many.\n"
            "  Give it next_batch=: fxcomp.Job(model, loss_fn, optimizer, batch, next_batch=draw), draw(step, rank)."
        )
    compress = asked_compress(arguments, job)
    explanation = what_if(job, cluster, WhatIf(compress=compress), lambda what: status_line.show(f"{what} ..."))
    plan = explanation.plan
    if plan.moves_exchange:
        raise BadOption(
            "the plan exchanges momenta, after a warm-up that is longer than the trainings of bisect.\n"
            "  Ask about gradients: --at gradient, or another --compress."
        )
    steps, seeds, least, saved = arguments.steps, arguments.seeds, arguments.least, arguments.save_plan
    found, kinds = NOTHING_TO_SEARCH, ()
    if not plan.is_dense:
        kinds = tuple(update_kinds(capture_job(job)[1].graph))
        checkpoint = arguments.checkpoint and str(Path(arguments.checkpoint).resolve())
        feedback = replace(compress.feedback, allow_diverging=True)  # bisect must be able to train plans that diverge
        found = search_on_ranks(Trainings(arguments.job, plan, cluster, feedback, steps, seeds, checkpoint, least))
    status_line.clear()
    result = Result(explanation, found, compress, steps, seeds, least, kinds, saved)
    if saved:
        save_plan(result.mended_plan, saved)
    if arguments.json:
        print(json.dumps(to_json(result), indent=1))
    else:
        print_sections(headline(result), sections_of(result), sys.stdout)
    return 0


def _check(arguments: argparse.Namespace, ranks: int) -> None:
    if not 2 <= ranks <= MOST_RANKS:
        raise BadOption(
            f"bisect trains on ranks of this machine, 2 to {MOST_RANKS}; the cluster has {ranks}.\n"
            "  Name a smaller one with the same levels, such as --cluster 2x2."
        )
    if arguments.seeds < 2:
        raise BadOption(f"--seeds are 2 or more, because one training has no noise; it is {arguments.seeds}")
    if arguments.steps < 1:
        raise BadOption(f"--steps is a number of steps, from 1; it is {arguments.steps}")
    if not 0 <= arguments.least < 1:
        raise BadOption(f"--least is a share of the loss, from 0 to below 1, like 0.001; it is {arguments.least:g}")
    if arguments.checkpoint and not Path(arguments.checkpoint).is_file():
        raise BadOption(f"--checkpoint: there is no file {arguments.checkpoint}")


# Result


@dataclass(frozen=True, slots=True)
class Result:
    """A plan, and the tensors whose compression was found to increase the loss."""

    explanation: Explanation
    found: SearchFindings
    compress: Compress
    steps: int
    seeds: int
    least: float = 0.0
    kinds: Collection[UpdateKind] = ()
    saved: str | None = None
    """File of the plan in which `names` are dense; None if it was not saved."""

    @property
    def plan(self) -> Plan:
        return self.explanation.plan

    @property
    def names(self) -> list[str]:
        """Tensors to keep dense."""
        return [name for names in self.found.guilty for name in names]

    @property
    def is_spread(self) -> bool:
        """True if only the whole set of compressed tensors has a measurable cost."""
        return len(self.found.guilty) == 1 and 1 < len(self.names) == len(compressed_names(self.plan))

    @property
    def mended_plan(self) -> Plan:
        return partly_dense(self.plan, self.names)

    def refusal(self, plan: Plan) -> str:
        """Return the first line of the error that compile_step raises for a plan; empty without an error."""
        known = self.explanation
        try:
            check_plan(self.compress.feedback, plan, known.workload.shapes, known.cluster, self.kinds)
        except BadOption as error:
            return str(error).partition("\n")[0]
        return ""

    def sent_bytes(self, plan: Plan) -> float:
        """Return the bytes per step that a rank sends over the slowest links."""
        return sum(map(self.explanation.sent_bytes, plan.buckets), 0.0)

    def more_bytes(self, names: Collection[str]) -> float:
        return self.sent_bytes(partly_dense(self.plan, names)) - self.sent_bytes(self.plan)

    @property
    def line(self) -> str:
        """Python source of a setting that keeps `names` dense. Empty if no setting is needed or expresses the plan."""
        if self.is_spread:
            return written(Compress(within="lossless"))
        found = mended(self.compress, self.names, self.mended_plan, self.saved) if self.names else None
        if found is None:
            return ""
        if self.refusal(self.mended_plan):
            found = replace(found, feedback=replace(found.feedback, allow_diverging=True))
        return written(found)

    def share(self, of: Comparison) -> float | None:
        """Return `of.cost` divided by the plan's cost; None if a cost is infinite or the plan's is not positive."""
        in_all = self.found.in_all.cost
        return of.cost / in_all if 0 < in_all < math.inf and math.isfinite(of.cost) else None


def headline(result: Result) -> str:
    return _verdict(result)[1]


def _verdict(result: Result) -> tuple[str, str]:
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
    return "noise", f"{some}Compression costs the loss nothing that {trials} could show{rest}: {_with_noise(cost)}."


_NOISE = (
    "Costs are shares of dense's loss, seed by seed: both trainings have seen the same batches. Noise is how far the"
    " mean of these seeds may be off by chance, in 39 of 40 comparisons; smaller costs cannot be distinguished. Only"
    " where all seeds diverge are tensors guilty of that."
)

_COLUMNS = ("tensors", "cost", "noise", "of all", "MB more if dense", "sent by")


def sections_of(result: Result) -> list[Section]:
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
        rows = [_row(result, *each) for each in found.guilty.items()]
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


def _row(result: Result, names: Sequence[str], found: Comparison) -> list[str]:
    share = result.share(found)
    by = {name: short(bucket.strategy) for bucket in result.plan.buckets for name in bucket.names}
    return [
        ", ".join(names) if len(names) <= 4 else members(names),
        _percent(found.cost),
        _percent(found.noise, "unknown"),
        "" if share is None else f"{100 * share:.0f} %",
        mb(result.more_bytes(names)),
        ", ".join(dict.fromkeys(by[name] for name in names)),
    ]


def _remarks(found: SearchFindings) -> Iterator[str]:
    yield "A row is the cost of these alone, with everything else dense; rows need not add up to all."
    if any(len(names) > 1 for names in found.guilty):
        yield (
            "No part of the tensors in one row costs more than noise by itself: each costs a little, or they cost only"
            " together. More --seeds or --steps may separate them."
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
        yield "No pins express it: search again with --save-plan FILE, which writes this plan with those tensors dense."
    elif is_given and not after.is_dense:
        yield "fxcomp chooses the buckets of these pins. --save-plan FILE writes this plan with those tensors dense."
    if not result.is_spread and result.refusal(after):
        yield "compile_step refuses the rest, too: the line allows it, and longer trainings may diverge."
    sent, before = mb(result.sent_bytes(after)), mb(result.sent_bytes(result.plan))
    yield f"A rank then sends {sent} MB a step over the slowest links, not {before}."


def to_json(result: Result) -> dict[str, Any]:
    """Convert to JSON, with null for costs and losses that are not finite."""
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
        {"names": names, **asdict(cost), "share": result.share(cost), "more_bytes": result.more_bytes(names)}
        for names, cost in found.guilty.items()
    ]
    searched = asdict(found) if found.trainings else {}
    return json.loads(json.dumps({**data, **searched, "guilty": guilty}), parse_constant=lambda _: None)


def _with_noise(found: Comparison) -> str:
    return f"{_percent(found.cost)}, noise {_percent(found.noise, 'unknown')}"


def _percent(share: float, otherwise: str = "diverges") -> str:
    if not math.isfinite(share):
        return otherwise
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"
