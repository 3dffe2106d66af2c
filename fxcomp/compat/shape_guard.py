"""The guard of a capture with symbolic sizes: which other batch tensors its graph is right for.

    batch_0  f32[s0, 20]   traced with s0 = 5       [7, 20] and [7] fit: every assumption holds for s0 = s1 = 7
    batch_1  i64[s1]       tracing assumed s0 = s1  [7, 20] and [8] do not
                                                    [7, 21] and [7] do not: 20 is no symbol
                                                    [1, 20] and [1] do not: symbols are neither 0 nor 1

What tracing made a number of is compared as it is.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

SPECIAL_SIZES = (0, 1)
"""Sizes that are never symbols. Of a symbol torch takes for granted that it is neither, and notes no assumption where
it decides by that: for broadcasting, strides, empty tensors."""


@dataclass(frozen=True, slots=True)
class ShapeGuard:
    """The sizes that a capture was traced with, and what was assumed of those that are symbols."""

    shapes: ShapeEnv
    tensors: tuple[Tensor, ...]
    """The fake tensors of the batch."""

    @property
    def is_open(self) -> bool:
        """Some size may be another: tracing has not made a number of every symbol."""
        sizes = [size for fake in self.tensors for size in fake.shape if isinstance(size, torch.SymInt)]
        return any(size.node.expr.free_symbols for size in sizes)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """Ask if the tensors among these leaves may run through the graph: a batch that differs in sizes alone.

        Assumptions are read now, not when the graph was made: whatever has worked on it since may have added some.
        """
        real = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        pairs = [pair for fake, tensor in zip(self.tensors, real, strict=True) for pair in _numbers(fake, tensor)]
        values: dict[Any, Any] = {}
        for given, number in pairs:
            if isinstance(given, torch.SymInt) and (symbol := given.node._expr).is_Symbol:
                values.setdefault(symbol, sympy.Integer(number))
        return all(_is(given, number, values) for given, number in pairs) and self._holds(values)

    def _holds(self, values: dict[Any, Any]) -> bool:
        if any(value not in self.shapes.var_to_range[symbol] for symbol, value in values.items()):
            return False
        return all(guard.expr.xreplace(values) == sympy.true for guard in self.shapes.guards)


def shape_guard(shapes: ShapeEnv, batch: Sequence[Any]) -> ShapeGuard | None:
    """Make the guard of a capture; None where no size is a symbol, so that it serves the traced sizes alone."""
    guard = ShapeGuard(shapes, tuple(leaf for leaf in batch if isinstance(leaf, Tensor)))
    return guard if guard.is_open else None


def _numbers(fake: Tensor, real: Tensor) -> Iterator[tuple[int | torch.SymInt, int]]:
    """Pair each property of a fake tensor with the real one's, all that a graph may depend on.

    A plain offset is no part of it: tensors of one size begin at any place of their memory.
    """
    assert fake.dim() == real.dim(), "a guard is asked of batches that differ in sizes alone"
    yield from zip(fake.shape, real.shape, strict=True)
    yield from zip(fake.stride(), real.stride(), strict=True)
    if isinstance(fake.storage_offset(), torch.SymInt):
        yield fake.storage_offset(), int(real.storage_offset())


def _is(given: int | torch.SymInt, number: int, values: dict[Any, Any]) -> bool:
    """Compare a number with the traced one, or with what a symbolic one is: as it was made, and as it is known now."""
    if not isinstance(given, torch.SymInt):
        return given == number
    return all(expression.xreplace(values) == number for expression in (given.node._expr, given.node.expr))
