"""Attributes that the user gave a tensor, as `bias.no_decay = True`: places of values that traced Python can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fxcomp.capture.reach.places import Held, Names, Place, Slot, View


class TensorPlace(Place):
    """A tensor: those of its attributes that code names. Its values are no business of a place."""

    name = ""

    def __init__(self, called: str, owner: Tensor, names: Names):
        self.called, self._names = called, names
        self.owner: Tensor = owner
        self.table: dict[str, Any] = vars(owner)

    def held(self) -> Held:
        return [(f"{self.called}.{key}", self.table[key]) for key in self._names.of(self.table)]

    def views(self) -> Iterable[View]:
        return (self.table.keys(),)

    def slots(self) -> Iterable[Slot]:
        return [(self.table, key) for key in self._names.of(self.table)]
