"""An example of each compressor, for `calibrate --compressors all`, pages and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, cast

import torch

from fxcomp.compressors import CATALOGUE, Compressor, Parameter

TYPICAL: dict[str, float] = {"ratio": 0.01, "rank": 4}


def examples() -> list[Compressor]:
    """Return each built-in compressor with typical parameters, and variants with each other bool or choice."""
    found: list[Compressor] = []
    for kind in sorted(ours(), key=lambda kind: kind.facts.name):
        first = example_of(kind)
        found.append(first)
        found += [_with(first, {name: value}) for name, value in _other_choices(first)]
    return found


def ours() -> list[type[Compressor]]:
    return [kind for kind in CATALOGUE.values() if kind.__module__.startswith("fxcomp.")]


def example_of(kind: type[Compressor], **values: float) -> Compressor:
    """Return a compressor with typical values for parameters without a default."""
    ranges = {parameter.name: parameter for parameter in kind.facts.parameters}
    required = [field for field in fields(cast(Any, kind)) if field.default is MISSING and field.name in ranges]
    for field in required:
        value = values.get(field.name, TYPICAL.get(field.name, _middle(ranges[field.name])))
        values[field.name] = round(value) if field.type == "int" else value
    make = cast(Callable[..., Compressor], kind)
    return make(**values)


def bits_per_value(compressor: Compressor, shape: Sequence[int]) -> float:
    """Return the bits that a rank sends for each value of a parameter of this shape, proposals included."""
    size = torch.Size(shape).numel()
    bound = compressor.bound_to([shape], 1)
    return 8 * (bound.payload_bytes((size,)) + bound.proposal_bytes((size,))) / size


def _other_choices(compressor: Compressor) -> Iterator[tuple[str, Any]]:
    for parameter in compressor.facts.parameters:
        value = getattr(compressor, parameter.name)
        others = (not value,) if isinstance(value, bool) else parameter.choices
        yield from ((parameter.name, other) for other in others if other != value)


def _with(compressor: Compressor, other: dict[str, Any]) -> Compressor:
    values = {field.name: getattr(compressor, field.name) for field in fields(cast(Any, compressor))}
    return cast(Callable[..., Compressor], type(compressor))(**values | other)


def _middle(parameter: Parameter) -> float:
    low, high = parameter.low, parameter.high
    return (low * high) ** 0.5 if low > 0 else (low + high) / 2
