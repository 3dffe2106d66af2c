"""Symbolic numbers and sizes of a trace, and the guard of a capture with symbolic sizes.

    batch_0  f32[s0, 20]   traced with s0 = 5       [7, 20] and [7] fit: every assumption holds for s0 = s1 = 7
    batch_1  i64[s1]       tracing assumed s0 = s1  [7, 20] and [8] do not
                                                    [7, 21] and [7] do not: 20 is no symbol
                                                    [1, 20] and [1] do not: symbols are neither 0 nor 1

A size that tracing replaced by a number must equal that number.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from fxcomp.compat.source_lines import is_called_by_user

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def live_number(shapes: ShapeEnv, value: float, name: str) -> Any:
    """Make a symbolic float. Comparisons use `value` and add a guard; arithmetic is traced."""
    source = constant_source(f"live_{name}".replace(".", "_"))
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symfloatnode(symbol, hint=value, source=source)


def constant_source(name: str) -> Any:
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def decisions(shapes: ShapeEnv) -> list[tuple[str, bool]]:
    """Return each guard of a trace as text, with True if the guard only tests the sign of one symbol."""
    return [(str(guard.expr), _is_sign(guard.expr)) for guard in shapes.guards]


def _is_sign(relation: Any) -> bool:
    sides = relation.args
    if len(sides) != 2 or not sides[1].is_number or float(sides[1]) != 0:
        return False
    more, symbol = sides[0].as_coeff_Add() if sides[0].is_Add else (0, sides[0])  # a counter after its step
    return symbol.is_Symbol and more >= 0


def decided_symbols(shapes: ShapeEnv) -> set[str]:
    found = {str(symbol) for guard in shapes.guards for symbol in guard.expr.free_symbols}
    return found | set(map(str, shapes.replacements))


def symbols_of_number(number: torch.SymFloat) -> set[str]:
    return set(map(str, number.node.expr.free_symbols))


def noting_texts(note: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `note` if the user's code formats a float symbol as text."""

    def noting(method: Callable[..., str]) -> Callable[..., str]:
        def text(number: torch.SymFloat, *form: str) -> str:
            if is_called_by_user():
                note()
            return method(number, *form)

        return text

    methods = {name: noting(getattr(torch.SymFloat, name)) for name in ("__str__", "__repr__", "__format__")}
    return attributes_instead({torch.SymFloat: methods})


def limit(symbol: torch.SymFloat, low: float, high: float) -> None:
    symbol.node.shape_env.var_to_range[symbol.node.expr] = ValueRanges(low, high)


def symbols(leaves: Iterable[Any]) -> set[str]:
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    return {str(symbol) for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def unbacked_symbols(number: Any) -> list[str]:
    """Return the names of data-dependent symbols in a number."""
    return sorted(map(str, symbolic_shapes.free_unbacked_symbols(number))) if isinstance(number, SYMBOLS) else []


def bound_symbols(values: Iterable[Any]) -> set[Any]:
    """Return the symbols that are alone a size, a stride or an integer of `values`."""
    return {expression for expression in _sizes(values) if expression.is_Symbol}


def unbound_symbols(values: Iterable[Any]) -> set[Any]:
    """Return the symbols that only occur in expressions such as s0 + 1, never alone as a size, stride or integer."""
    found = _sizes(values)
    told = {expression for expression in found if expression.is_Symbol}
    return {symbol for expression in found for symbol in expression.free_symbols} - told


def _sizes(values: Iterable[Any]) -> list[Any]:
    numbers: list[Any] = []
    for value in values:
        numbers += (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]


def has_symbols(value: Tensor) -> bool:
    return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))


def is_open(value: Any) -> bool:
    """Return whether a number depends on symbols that were not specialized."""
    return isinstance(value, SYMBOLS) and _as_constant(value) is None


def as_number(value: Any) -> Any:
    """Return the number of a specialized symbol, and other values unchanged."""
    return _as_constant(value) if isinstance(value, SYMBOLS) else value


def _as_constant(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    expression = getattr(value.node, "expr", None)
    if expression is None or expression.free_symbols:
        return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](expression)


def hint(value: Any) -> Any:
    """Return the value that a symbol had while tracing; None if data-dependent."""
    return value.node.hint


def size_hint(size: Any) -> int:
    """Return the value that a size had while tracing; 1 if data-dependent."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return 1 if size.node.hint is None else int(size.node.hint)


def without_locations() -> AbstractContextManager[None]:
    """Do not record where symbols are made, which would import torch's exporter."""
    return attributes_instead({symbolic_shapes: {"uninteresting_files": set[str]}})


@contextmanager
def attributes_instead(attributes: Mapping[type | ModuleType, Mapping[str, Any]]) -> Generator[None]:
    """Replace attributes of classes and modules inside the context."""
    before = {kind: {name: vars(kind)[name] for name in new if name in vars(kind)} for kind, new in attributes.items()}
    try:
        for kind, new in attributes.items():
            for name, value in new.items():
                setattr(kind, name, value)
        yield
    finally:
        for kind, new in attributes.items():
            for name in new:
                if name in before[kind]:
                    setattr(kind, name, before[kind][name])
                else:
                    delattr(kind, name)


SPECIAL_SIZES = (0, 1)
"""Sizes that are never symbols. For broadcasting, strides and empty tensors, torch assumes, without a guard, that no
symbol is 0 or 1."""


@dataclass(frozen=True, slots=True)
class ShapeGuard:
    """Predicate that checks a batch's sizes against the sizes and assumptions of a capture."""

    shapes: ShapeEnv
    tensors: tuple[Tensor, ...]
    """Fakes of the batch."""

    @property
    def is_open(self) -> bool:
        """True if some size is still symbolic."""
        sizes = [size for fake in self.tensors for size in fake.shape if isinstance(size, torch.SymInt)]
        return any(size.node.expr.free_symbols for size in sizes)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """Return whether a batch that differs only in sizes fits the graph.

        Assumptions are read at each call, because later passes may add assumptions.
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
    """Make a capture's guard; None without symbolic sizes."""
    guard = ShapeGuard(shapes, tuple(leaf for leaf in batch if isinstance(leaf, Tensor)))
    return guard if guard.is_open else None


def _numbers(fake: Tensor, real: Tensor) -> Iterator[tuple[int | torch.SymInt, int]]:
    """Pair sizes, strides and symbolic storage offsets of a fake with the real tensor's.

    Plain storage offsets are left out, because they may differ between tensors of one size.
    """
    assert fake.dim() == real.dim(), "a guard is asked of batches that differ in sizes alone"
    yield from zip(fake.shape, real.shape, strict=True)
    yield from zip(fake.stride(), real.stride(), strict=True)
    if isinstance(fake.storage_offset(), torch.SymInt):
        yield fake.storage_offset(), int(real.storage_offset())


def _is(given: int | torch.SymInt, number: int, values: dict[Any, Any]) -> bool:
    """Return whether `given` equals `number`. A symbol's original and simplified form must both equal `number`."""
    if not isinstance(given, torch.SymInt):
        return given == number
    return all(expression.xreplace(values) == number for expression in (given.node._expr, given.node.expr))
