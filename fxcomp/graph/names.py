"""Reserve the names that emitted source uses itself, so that a model's names for its tensors do not hide them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fxcomp.graph.info import InputKind

ARGUMENTS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.STATE: "states",
    InputKind.HYPER: "numbers",
    InputKind.SUM: "sums",
    InputKind.COUNT: "counts",
    InputKind.SCALE: "scales",
    InputKind.FACTOR: "factors",
    InputKind.VELOCITY: "velocities",
    InputKind.RESIDUAL: "residuals",
    InputKind.COMPRESSOR_STATE: "compressor_states",
    InputKind.BATCH: "batch",
}
"""The arguments of a step function after its runtime, by the kind of input in each."""


def arguments_of(given: Mapping[InputKind, Sequence[Any]]) -> list[Sequence[Any]]:
    """List a step function's arguments after its runtime; kinds of input that are not given have none."""
    return [given.get(kind, ()) for kind in ARGUMENTS]


_OWN = {"step", "rt", "aten", "math", "operator", "torch", "float", "slice", "complex", *ARGUMENTS.values()}

_FUNCTION = re.compile(r"(region|update|optimizer_step)(_\d+)?")
"""The functions of an emitted module."""


def free_name(name: str) -> str:
    """Make a name usable for a value in emitted source, with an underscore after it if it is reserved."""
    return f"{name}_" if name in _OWN or _FUNCTION.fullmatch(name) else name
