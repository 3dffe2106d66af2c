"""Make the programs of micro-batches that end no group: one a capture, whatever plan is followed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from fxcomp.codegen.program import Program
from fxcomp.graph.captured import Captured
from fxcomp.step.programs import CAPTURES

Emit = Callable[[Captured], Program]


class MicroPrograms:
    """The programs that were used last. Local: ranks do not communicate in it."""

    def __init__(self, emit: Emit):
        self._emit = emit
        self._known: OrderedDict[int, Program] = OrderedDict()
        """By the capture's id, which its program keeps alive."""

    def of(self, captured: Captured) -> Program:
        """Find the program of a capture; made at its first use."""
        key = id(captured)
        if key not in self._known:
            self._known[key] = self._emit(captured)
        self._known.move_to_end(key)
        while len(self._known) > CAPTURES:
            self._known.popitem(last=False)
        return self._known[key]
