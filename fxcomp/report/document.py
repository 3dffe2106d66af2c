"""Report sections of sentences, tables, and timelines, for all formats.

This file formats quantities, strategies and lists of gradients, so that all formats agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fxcomp.cost.timeline import Timeline
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.strategy import Device, Strategy


def decimals(step_us: float) -> int:
    """Return the number of decimals that gives a step time in ms about four digits."""
    return 1 if step_us >= 100e3 else 2 if step_us >= 10e3 else 3


def ms(us: float, digits: int) -> str:
    return f"{us / 1e3:.{digits}f}"


def mb(size: float) -> str:
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def count(number: int, noun: str) -> str:
    """Format a count: `1 host`, `2 hosts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def short(strategy: Strategy) -> str:
    """Return a short name: `int8 by level`, `topk(0.01) on cpu`, `int4 twice`, `int4, then int8`."""
    name = ", then ".join(map(str, strategy.compressors)) or "dense"
    if len(strategy.compressors) == 2 and len(set(strategy.compressors)) == 1:
        name = f"{strategy.compressor} twice"
    levels = " by level" if strategy.is_hierarchical else ""
    return f"{name}{levels}{' on cpu' if Device.CPU in strategy.devices else ''}"


def members(names: Sequence[str]) -> str:
    """Abbreviate names: `fc.weight and 3 more`."""
    first, number = names[0], len(names)
    return first if number == 1 else f"{first} and {number - 1} more"


def in_types(types: Mapping[str, ElementType]) -> str:
    """Format the types of gradients, the most frequent first; empty if all are fp32."""
    counts = Counter(types.values())
    if counts.keys() <= {ElementType.F32}:
        return ""
    return f" in {' and '.join(str(each) for each, _ in counts.most_common())}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below column names. If `names` is empty, each row is a name and a sentence."""

    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Collection[str] = ("",)
    """Names of text columns, which are aligned left and wrapped."""
    optional: Collection[str] = ()
    """Names of columns omitted in narrow output."""


Timelines = Sequence[tuple[str, Timeline]]
"""(name, timeline) of steps drawn on one scale."""

Block = str | Table | Timelines


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    """Empty to continue the previous section."""
    blocks: Sequence[Block]
