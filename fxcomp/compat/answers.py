"""Resolve data-dependent values of a trace through a callback."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _constrain_range_for_size,
)
from torch.utils._sympy.printers import PythonPrinter

from fxcomp.compat.operators import is_view
from fxcomp.compat.source_lines import is_called_by_user

Expression = Any
"""SymPy expression whose value is requested."""


_CACHED_METHODS = [method for method in vars(ShapeEnv).values() if hasattr(method, "cache_clear")]
"""Methods whose caches, one for all environments, keep the environments and fakes of earlier traces alive."""


class AskingShapes(ShapeEnv):
    """Shape environment that gets data-dependent values from `ask`, and raises if `ask` returns None.

    A new one frees unused environments of earlier traces.
    """

    def __init__(self, ask: Callable[[Expression], Any]):
        for method in _CACHED_METHODS:
            method.cache_clear()
        # Equal sizes get separate symbols, which tracing compares when needed.
        super().__init__(duck_shape=False)
        self._ask = ask

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: Any = None) -> Any:
        return self._answered(
            sym_node.expr, lambda: super(AskingShapes, self).evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        )

    # torch caches this method.
    def guard_or_defer_runtime_assert(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, orig_expr: Expression, msg: str, fx_node: Any = None
    ) -> bool:
        """Evaluate a user's `torch._check`. Leave other checks to torch, because operators repeat these checks."""
        if is_called_by_user():
            return bool(self._answered(orig_expr, lambda: self.evaluate_expr(orig_expr)))
        return super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)

    def _answered(self, expression: Expression, evaluate: Callable[[], Any]) -> Any:
        try:
            return evaluate()
        except GuardOnDataDependentSymNode:
            answer = self._ask(expression)
            if answer is None:
                raise
            return answer


def unknown_size(shapes: ShapeEnv) -> Any:
    size = shapes.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def current_tracer() -> Any:
    """Return the active tracer; its `graph` has the nodes traced so far."""
    mode = get_proxy_mode()
    assert mode is not None, "the tracer is looked up while tracing"
    return mode.tracer


def node_of(tensor: torch.Tensor) -> Node:
    return get_proxy_slot(tensor, current_tracer()).proxy.node


def symbols_of(expression: Expression) -> list[str]:
    return sorted(map(str, expression.free_symbols))


def as_symbol(number: Any) -> str | None:
    """Return the symbol's name if `number` is a symbol, or a boolean expression of one symbol; else None."""
    if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    names = symbols_of(number.node.expr)
    is_alone = isinstance(number, torch.SymBool) or number.node.expr.is_Symbol
    return names[0] if len(names) == 1 and is_alone else None


class _Printer(PythonPrinter):
    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))


def evaluator(expression: Expression) -> tuple[str, Callable[[Mapping[str, Any]], Any]] | None:
    """Return an expression as Python text and as a function of its symbols' values.

    Return None if the expression has sums, products or powers of floats, because SymPy's order of operands changes the
    result, or if the text cannot be printed.
    """
    if not _is_exact(expression):
        return None
    try:
        text = _Printer().doprint(expression)
    except (NotImplementedError, AssertionError):  # unsupported by the printer
        return None
    code = compile(text, "<question>", "eval")
    return text, lambda values: eval(code, SYMPY_INTERP, values)


def _is_exact(expression: Expression) -> bool:
    if (expression.is_Add or expression.is_Mul or expression.is_Pow) and not expression.is_integer:
        return False
    return all(map(_is_exact, expression.args))


def can_fail(node: Node) -> bool:
    """Return whether an operator may raise for some values. Pointwise operators, views and `_HARMLESS` do not."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not (torch.Tag.pointwise in target.tags or target in _HARMLESS or is_view(target))


_aten = torch.ops.aten
_HARMLESS = frozenset(
    overload
    for packet in (
        *(_aten.max, _aten.min, _aten.amax, _aten.amin, _aten.any, _aten.all, _aten.sum, _aten.mean, _aten.prod),
        *(_aten.cumsum, _aten.argmax, _aten.argmin, _aten.full, _aten.zeros, _aten.ones, _aten.arange, _aten.cat),
        *(_aten.full_like, _aten.zeros_like, _aten.ones_like, _aten.lift_fresh_copy, _aten._to_copy, _aten.clone),
        *(_aten.copy_, _aten.fill_, _aten.zero_, _aten.stack, _aten.diff, _aten.sym_size, _aten.scalar_tensor),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return `.grad` without function modes, because the capture's function mode raises if `.grad` is read."""
    with torch.DisableTorchFunction():
        return parameter.grad
