"""Name strategies and lists of gradients as reports show them: in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fxcomp.plan.element_type import ElementType
from fxcomp.plan.strategy import Device, Strategy


def short(strategy: Strategy) -> str:
    """Name a strategy in a few words: `int8 by level`, `topk(0.01) on cpu`, `int4 twice`, `int4, then int8`."""
    name = ", then ".join(map(str, strategy.compressors)) or "dense"
    if len(strategy.compressors) == 2 and len(set(strategy.compressors)) == 1:
        name = f"{strategy.compressor} twice"
    levels = " by level" if strategy.is_hierarchical else ""
    return f"{name}{levels}{' on cpu' if Device.CPU in strategy.devices else ''}"


def members(names: Sequence[str]) -> str:
    """Name the first and count the others: `fc.weight and 3 more`."""
    first, number = names[0], len(names)
    return first if number == 1 else f"{first} and {number - 1} more"


def in_types(types: Mapping[str, ElementType]) -> str:
    """Name gradients' types, those of most gradients first; empty if all are fp32."""
    counts = Counter(types.values())
    if counts.keys() <= {ElementType.F32}:
        return ""
    return f" in {' and '.join(str(each) for each, _ in counts.most_common())}"
