"""What every place tells: its name, what it holds, and what shows cheaply that it holds something else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

MISSING = object()
"""What a slot holds that is not there."""

LARGE = 1000
"""Collections of up to so many items are compared item by item; larger ones are taken for data."""

Held = Iterable[tuple[str, Any]]
View = Collection[Any]
Slot = tuple[Any, str]
"""An owner and a key of it, or an attribute where the owner is no dict."""


class Place(Protocol):
    """Something that holds values."""

    @property
    def name(self) -> str:
        """What stands before the labels of its values."""
        ...

    @property
    def owner(self) -> object:
        """The object itself."""
        ...

    def held(self) -> Held:
        """The values, each with its label."""
        ...

    def views(self) -> Iterable[View]:
        """Live views of which every item is compared by identity."""
        ...

    def slots(self) -> Iterable[Slot]:
        """Single values that are compared by identity."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """The attributes and keys that followed code names; grows while code is followed."""

    found: set[str]

    def of(self, table: Mapping[str, Any]) -> list[str]:
        """The keys of a table that code names, in the table's order."""
        return [key for key in table if key in self.found]
