"""The parts of a document before it has a format: titled sections of sentences, tables, and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cost.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    is_text: bool = False
    """Aligned left and folded; other columns are numbers."""
    is_optional: bool = False
    """Left out where columns are few."""


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Names, each with a sentence: a table of two columns without a head."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Timelines:
    """Predicted steps by name, to be drawn one above the other on one scale."""

    named: Sequence[tuple[str, Timeline]]


Block = str | Table | Pairs | Timelines
"""A string is a sentence, or a few."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    """Empty if the section continues the one before."""
    blocks: Sequence[Block]
