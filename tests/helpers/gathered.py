"""Write a step's options flat, where tests vary one of them at a time."""

from __future__ import annotations

from typing import Any

import fxcomp

_COMPRESS = ("within", "plan", "measured", "pins", "at", "warmup", "feedback")
_CHECKS = ("verify", "race", "replan")


def gathered(**words: Any) -> dict[str, Any]:
    """Gather `plan="int8", verify=1, accumulate=2` as compile_step takes them. A plan of None is fxcomp's choice."""
    compress = {name: words.pop(name) for name in _COMPRESS if name in words}
    checks = {name: words.pop(name) for name in _CHECKS if name in words}
    if compress:
        is_plan_alone = compress.keys() == {"plan"} and compress["plan"] is not None
        words["compress"] = compress["plan"] if is_plan_alone else fxcomp.Compress(**compress)
    if checks:
        words["checks"] = fxcomp.Checks(**checks)
    return words
