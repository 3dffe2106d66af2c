"""Parse a user's plan: a Plan, a path, or a compressor or strategy for all matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadPlan
from fxcomp.plan.modes import MODES
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import DENSE, Strategy

GivenPlan = Plan | str | Path

_EXAMPLES = (
    f"The modes are {', '.join(MODES)}. A plan is 'dense', 'bf16', 'int8', 'sign', 'topk(0.01)', a strategy's text such"
    " as 'compress(int4)@gpu > all_gather@world > decompress@gpu', a .json path, or a fxcomp.Plan."
)


def is_path(plan: str | Path) -> bool:
    return isinstance(plan, Path) or plan.endswith(".json") or "/" in plan


def is_strategy(plan: str) -> bool:
    return "@" in plan


def strategy_named(plan: str) -> Strategy:
    """Parse `dense`, a compressor (used in one shot), or a strategy."""
    if plan == "dense":
        return DENSE
    return Strategy.parse(plan) if is_strategy(plan) else Strategy.flat(parse_compressor(plan))


def is_named(plan: Plan, text: str) -> bool:
    """Return whether every bucket is dense or uses the text's strategy."""
    return all(bucket.strategy in (DENSE, strategy_named(text)) for bucket in plan.buckets)


def check_is_plan(plan: object) -> None:
    """Raise BadPlan or BadStrategy unless the value denotes a plan, without opening a file."""
    if isinstance(plan, str) and not is_path(plan):
        check_names_compressor(plan)
    elif not isinstance(plan, Plan | str | Path | None):
        raise BadPlan(
            f"plan is a fxcomp.Plan, the path of a saved one or a compressor; it is a {type(plan).__name__}.\n"
            f"  {_EXAMPLES}"
        )


def check_names_compressor(plan: str) -> None:
    """Raise BadPlan unless a text is `dense`, a compressor or a strategy, and BadStrategy for an illegal strategy."""
    if is_strategy(plan):
        Strategy.parse(plan)
        return
    if plan in MODES:
        raise BadPlan(f"{plan!r} is a mode and no plan: write compress={plan!r}, or Compress(within={plan!r}, ...).")
    try:
        strategy_named(plan)
    except ValueError as error:
        raise BadPlan(
            f"{plan!r} is neither the path of a saved plan nor a compressor: {error}.\n  {_EXAMPLES}"
        ) from None


def asked_plan(plan: GivenPlan | None) -> str | None:
    """Return the text that ranks compare before they read a plan file; None without a plan."""
    if plan is None:
        return None
    if isinstance(plan, Plan) or is_path(plan):
        return "a Plan, or a saved one"
    text = str(plan)
    return text if text == "dense" else str(Strategy.parse(text) if is_strategy(text) else parse_compressor(text))


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    """Return the facts that must agree on all ranks, the most specific first."""
    facts = {
        f"the strategy of {name!r} in the plan": str(bucket.strategy)
        for bucket in plan.buckets
        for name in plan.labels(bucket)
    }
    return facts | {"the whole plan's digest": plan.digest}
