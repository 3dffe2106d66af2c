"""Write what a plan may lose and what it loses: the section of a report under an error budget."""

from __future__ import annotations

from fxcomp.plan.budget import Budget
from fxcomp.report.document import Block, Section
from fxcomp.report.explanation import Explanation
from fxcomp.report.quantities import count


def error_section(explanation: Explanation, budget: Budget) -> Section:
    """Compare what is lost with the budget, and say where the errors are from."""
    blocks: list[Block] = [_spent(explanation, budget), _source(explanation)]
    shown = set(explanation.notes)
    return Section("Error", [*blocks, *(note for note in budget.table.notes if note not in shown)])


def _spent(explanation: Explanation, budget: Budget) -> str:
    allowed, spent, asked = explanation.allowed or 0.0, explanation.spent, budget.asked
    what = f"as {asked} everywhere" if asked.is_uniform else f"as asked by {asked}"
    share = f", {spent / allowed:.1%} of it" if allowed else ""
    return f"A plan may lose {allowed:.3g} of the gradient's square, {what}; this one loses {spent:.3g}{share}."


def _source(explanation: Explanation) -> str:
    errors = explanation.errors
    if not errors.is_measured:
        return "Errors are assumed to be those of Gaussian values: nothing is measured."
    names = explanation.workload.sizes
    known = sum(1 for name in names if name in errors.rows and errors.rows[name].samples)
    of_all = f"of {known} of {count(len(names), 'gradient')}" if known < len(names) else "of every gradient"
    rest = "; the others' are those of Gaussian values" if known < len(names) else ""
    return f"Errors {of_all} were measured in training, in {count(errors.looks, 'look')}{rest}."
