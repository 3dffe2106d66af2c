"""Tell whether errors have changed so much that a plan chosen by the old ones should be chosen again.

    the error of the plan in force       by a fifth or more
    a heavy gradient, 1 % of all squares or more in either table:
        an error of some column          to twice or half
        its share of all squares         to twice or half

What the plan in force loses says nothing of what others would lose, so each column of heavy gradients counts, whatever
they travel by. Errors below 1e-5 are rounding, of which no budget notices a change.
"""

from __future__ import annotations

from fxcomp.cluster.cluster import Cluster
from fxcomp.error_tables import ErrorRow, ErrorTable
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.plan import Plan

PLAN = 0.2
"""Three times the deviation of a plan's smoothed error between looks of a job whose errors stay (assumed)."""

GRADIENT = 2.0
HEAVY = 0.01
ROUNDING = 1e-5


def what_drifted(before: ErrorTable, now: ErrorTable, plan: Plan, cluster: Cluster) -> str:
    """Say the first thing that has changed, in words; empty if nothing has."""
    if before.is_measured != now.is_measured:
        return "errors are measured now" if now.is_measured else "errors are measured no more"
    was, becomes = plan_error(plan, cluster, before), plan_error(plan, cluster, now)
    if max(was, becomes) > ROUNDING and abs(becomes - was) >= PLAN * was:
        return f"the plan's error was {was:.3g} and is {becomes:.3g}"
    old_squares, new_squares = _squares(before), _squares(now)
    for name, row in now.rows.items():
        old = before.rows.get(name)
        if old is None:
            return f"{name} was not measured before"
        shares = _share(old, old_squares), _share(row, new_squares)
        if max(shares) < HEAVY:
            continue
        if _has_changed(*shares):
            return f"{name} had {shares[0]:.1%} of the squares and has {shares[1]:.1%}"
        for column, one, other in zip(now.columns.names, old.errors, row.errors, strict=True):
            if max(one, other) > ROUNDING and _has_changed(one, other):
                return f"what {column} loses of {name} was {one:.3g} and is {other:.3g}"
    return ""


def _has_changed(one: float, other: float) -> bool:
    return max(one, other) >= GRADIENT * min(one, other)


def _squares(table: ErrorTable) -> float:
    return sum(row.squares for row in table.rows.values())


def _share(row: ErrorRow, total: float) -> float:
    return row.squares / total if total else 0.0
