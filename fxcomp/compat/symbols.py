"""Symbols that stand for numbers and sizes while tracing."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def live_number(shapes: ShapeEnv, value: float, name: str) -> Any:
    """Make a float symbol with a hint: comparisons decide by the hint, arithmetic becomes nodes."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"live_{name}".replace(".", "_"))
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symfloatnode(symbol, hint=value, source=source)


def decisions(shapes: ShapeEnv) -> list[tuple[str, bool]]:
    """List what tracing has assumed of symbols so far, and whether it is the sign of one alone."""
    return [(str(guard.expr), _is_sign(guard.expr)) for guard in shapes.guards]


def _is_sign(relation: Any) -> bool:
    sides = relation.args
    return len(sides) == 2 and sides[0].is_Symbol and sides[1].is_number and float(sides[1]) == 0


def limit(symbol: torch.SymFloat, low: float, high: float) -> None:
    """Tell a symbol's environment that its value lies between two numbers."""
    symbol.node.shape_env.var_to_range[symbol.node.expr] = ValueRanges(low, high)


def symbols(leaves: Iterable[Any]) -> set[str]:
    """Name the symbols in tensors' sizes."""
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    return {str(symbol) for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def unbacked_symbols(number: Any) -> list[str]:
    """Name the symbols in a number or a size that only the data will tell."""
    return sorted(map(str, symbolic_shapes.free_unbacked_symbols(number))) if isinstance(number, SYMBOLS) else []


def bound_symbols(values: Iterable[Any]) -> set[Any]:
    """The symbols that these tensors and whole numbers tell: one of their sizes is that symbol, and nothing else."""
    return {expression for expression in _sizes(values) if expression.is_Symbol}


def unbound_symbols(values: Iterable[Any]) -> set[Any]:
    """The symbols that these tensors and whole numbers do not tell: they have them in products and sums alone."""
    found = _sizes(values)
    told = {expression for expression in found if expression.is_Symbol}
    return {symbol for expression in found for symbol in expression.free_symbols} - told


def _sizes(values: Iterable[Any]) -> list[Any]:
    numbers: list[Any] = []
    for value in values:
        numbers += (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]


def has_symbols(value: Tensor) -> bool:
    """Ask if a fake value's sizes or strides are symbols."""
    return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))


def is_open(value: Any) -> bool:
    """Ask if a number follows from symbols, and not from what tracing has assumed of them."""
    return isinstance(value, SYMBOLS) and _as_constant(value) is None


def as_number(value: Any) -> Any:
    """Turn a symbol with one possible value into that number; other values pass."""
    return _as_constant(value) if isinstance(value, SYMBOLS) else value


def _as_constant(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    expression = getattr(value.node, "expr", None)
    if expression is None or expression.free_symbols:
        return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](expression)


def hint(value: Any) -> Any:
    """Turn a symbol into the number that it was traced with; None for one that only the data will tell."""
    return value.node.hint


def size_hint(size: Any) -> int:
    """Turn a symbolic size into the number that it was traced with; one that only the data will tell counts as 1."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return 1 if size.node.hint is None else int(size.node.hint)


@contextmanager
def without_locations() -> Generator[None]:
    """Keep symbols from noting where they are made, for which torch would import its exporter."""
    before = symbolic_shapes.uninteresting_files
    symbolic_shapes.uninteresting_files = cast("Any", set[str])
    try:
        yield
    finally:
        symbolic_shapes.uninteresting_files = before


@contextmanager
def attributes_instead(attributes: Mapping[type, Mapping[str, Any]]) -> Generator[None]:
    """Give classes other attributes meanwhile."""
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
