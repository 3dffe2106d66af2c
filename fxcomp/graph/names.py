"""Reserve the names that emitted source uses itself, so that a model's names for its tensors do not hide them."""

from __future__ import annotations

import re

from fxcomp.graph.info import InputKind

ARGUMENTS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.STATE: "states",
    InputKind.HYPER: "numbers",
    InputKind.VELOCITY: "velocities",
    InputKind.RESIDUAL: "residuals",
    InputKind.COMPRESSOR_STATE: "compressor_states",
    InputKind.BATCH: "batch",
}
"""The arguments of a step function after its runtime, by the kind of input in each."""

_OWN = {"step", "rt", "aten", "math", "operator", "torch", "float", "slice", "complex", *ARGUMENTS.values()}

_FUNCTION = re.compile(r"(region|update|optimizer_step)(_\d+)?")
"""The functions of an emitted module."""


def free_name(name: str) -> str:
    """Make a name usable for a value in emitted source, with an underscore after it if it is reserved."""
    return f"{name}_" if name in _OWN or _FUNCTION.fullmatch(name) else name
