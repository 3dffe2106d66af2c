"""Plain values: what may stand beside tensors in a batch and in an auxiliary result, and what tells two apart."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""Values that nobody changes in place."""


def is_plain(value: object) -> bool:
    """Whether a value is what tracing may take for a constant. numpy's scalars are not: operators do not take them."""
    return isinstance(value, _PLAIN) and type(value).__module__ != "numpy"


def key_of(value: object) -> Hashable:
    """What tells a plain value from every other one: 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value


def what_is(value: object) -> str:
    """The name of a value's class, as a message shows it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
