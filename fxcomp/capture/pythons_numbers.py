"""Make symbols of a trace behave as Python numbers in the user's code.

    str(ids[0].item()), {3: ...}.get(n)     reads the number, because text and hash depend on it
    isinstance(rows.shape[0], int)          true, as in eager PyTorch
    flag.item() is True                     a truth value is read at once
    v != v, v * 0 == 0, copysign(1, v)      a float that is nan, infinite or -0.0 becomes a constant when it is read

A number that cannot be computed before the step cannot be read (`questions.py`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.fake_mode import StepFakes
from fxcomp.errors import CaptureFailed

_KINDS: Mapping[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

LONG = 100
"""Maximum number of values read one by one; longer tensors are read as a whole."""

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_OF_TRUTHS = ("__index__", "__xor__", "__rxor__")


class NumberReader:
    def __init__(self, fakes: StepFakes):
        self._fakes = fakes
        self._tolist: Callable[[Tensor], Any] = vars(compat.Fake)["tolist"]
        self.open: set[str] = set()
        """Symbols of floats that may be nan, infinite or -0.0."""

    def read(self, how: str, tensor: Tensor) -> Any:
        """Return the result of the tensor's method named `how`: `item` or `tolist`."""
        traced = compat.traced(tensor)
        if how == "tolist" and compat.is_fake(traced):
            is_long = traced.numel() > LONG
            if (known := self.known(traced, of_batch=is_long)) is not None:
                with compat.plain_values():
                    return known.tolist()
            if is_long:
                raise CaptureFailed(
                    f"the step reads {traced.numel()} numbers of a tensor that only the step itself computes, which"
                    f" takes minutes to trace.\n  {compat.users_line() or 'loss_fn'}\n"
                    f"  Compute with the tensor, or read at most {LONG} of its numbers."
                )
            found = self._tolist(traced)
        else:
            found = getattr(traced, how)()
        symbols = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, compat.SYMBOLS)]
        if not symbols:
            return found
        asks = tensor.dtype is torch.bool or (tensor.is_floating_point() and self._is_special(tensor, symbols))
        if asks or compat.users_code_tells_kinds():
            return pytree.tree_map_only(compat.SYMBOLS, _number if asks else _number_if_known, found)
        return found

    def number(self, value: Tensor | torch.SymFloat) -> Any:
        """Read a scalar tensor or a symbol as a number."""
        found = self.read("item", value) if isinstance(value, Tensor) else value
        return _plain(found)

    def known(self, tensor: Tensor, *, of_batch: bool = False) -> Tensor | None:
        """Return a tensor's values if the step's inputs and draws do not affect them, else None.

        With `of_batch`, the batch, buffers and frozen parameters may affect them.
        """
        traced, questions = compat.traced(tensor), self._fakes.questions
        if questions is None or not compat.is_fake(traced) or compat.knows_values(traced):
            return None
        now = traced.detach().clone()
        values = questions.value_of(now, of_batch=of_batch)
        return values if values is not None and _is_same(now, values) else None

    def _is_special(self, tensor: Tensor, symbols: list[Any]) -> bool:
        tensor = tensor.detach()
        try:
            return bool((~tensor.isfinite() | ((tensor == 0) & tensor.signbit())).any())
        except compat.DATA_DEPENDENT:
            names = {name for symbol in symbols for name in compat.unbacked_symbols(symbol)}
            self.open |= {name for name in names if not self._fakes.unknown[name].is_drawn}
            return False


@contextmanager
def pythons_numbers(fakes: StepFakes) -> Generator[NumberReader]:
    reader = NumberReader(fakes)
    attributes: dict[type | ModuleType, Mapping[str, Any]] = {kind: _attributes(kind, reader) for kind in _KINDS}
    # A fake's own `tolist` reads elements one by one.
    attributes[compat.Fake] = {"tolist": lambda self: reader.read("tolist", self)}  # pyright: ignore[reportUnknownLambdaType]
    with compat.attributes_instead(attributes):
        yield reader


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal; nan equals nan, -0.0 differs from 0.0."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    same = one == other
    if one.is_floating_point():
        same = (same & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())
    return bool(same.all())


def _number(symbol: Any) -> Any:
    """Return a symbol's number. Raises one of compat.DATA_DEPENDENT if the number is unknown."""
    return _KINDS[type(symbol)](symbol)


def _number_if_known(symbol: Any) -> Any:
    try:
        return _number(symbol)
    except compat.DATA_DEPENDENT:
        return symbol


def _attributes(kind: type, reader: NumberReader) -> dict[str, Callable[..., Any]]:
    plain: Any = kind
    text, hashed, attribute = plain.__repr__, plain.__hash__, plain.__getattribute__

    def __repr__(self: Any) -> str:
        return repr(_number(self)) if compat.is_asked_by_user() else text(self)

    def __format__(self: Any, form: str) -> str:
        return format(_number(self), form) if compat.is_asked_by_user() else object.__format__(self, form)

    def __hash__(self: Any) -> int:
        # Symbols of sizes stay unhashable, which libraries handle.
        if compat.unbacked_symbols(self) and compat.is_asked_by_user():
            return hash(_number(self))
        return hashed(self)

    def __getattribute__(self: Any, name: str) -> Any:
        return _KINDS[kind] if name == "__class__" and compat.is_asked_by_user() else attribute(self, name)

    def __divmod__(self: Any, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self: Any, other: Any) -> Any:
        return other // self, other % self

    def is_integer(self: Any) -> bool:
        return _number(self).is_integer()

    methods = [__repr__, __format__, __hash__, __getattribute__]
    methods += {torch.SymInt: [__divmod__, __rdivmod__], torch.SymFloat: [__divmod__, __rdivmod__, is_integer]}.get(
        kind, []
    )
    named: dict[str, Callable[..., Any]] = {method.__name__: method for method in methods}
    if kind is torch.SymBool:
        return named | {name: _of_truth(name, getattr(kind, name, None)) for name in (*_COMPARISONS, *_OF_TRUTHS)}
    return named | {name: _comparison(getattr(kind, name), reader) for name in _COMPARISONS}


def _of_truth(name: str, of_symbol: Callable[..., Any] | None) -> Callable[..., Any]:
    of_number = getattr(bool, name)

    def method(self: Any, *others: Any) -> Any:
        if of_symbol is not None and not compat.is_asked_by_user():
            return of_symbol(self, *others)
        return of_number(_number(self), *map(_plain, others))

    return method


def _plain(value: Any) -> Any:
    return _number(value) if isinstance(value, compat.SYMBOLS) else value


def _comparison(compare: Callable[[Any, Any], Any], reader: NumberReader) -> Callable[[Any, Any], Any]:
    def compared(self: Any, other: Any) -> Any:
        if isinstance(other, bool):
            other = int(other)
        result = compare(self, other)
        if not compat.is_asked_by_user():
            return result
        if reader.open and not compat.is_open(result):
            _check_algebra((self, other), reader.open)
        if isinstance(result, torch.SymBool) and compat.users_code_tells_kinds():
            return _number_if_known(result)
        return result

    return compared


def _check_algebra(sides: Sequence[Any], open_: set[str]) -> None:
    """Raise if a compared float may be nan, because SymPy simplifies `v != v` to false."""
    floats = [compat.symbols_of(side.node.expr) for side in sides if isinstance(side, torch.SymFloat)]
    if any(not names or open_.intersection(names) for names in floats):
        line = compat.users_line()
        raise CaptureFailed(
            "the step decides by the values of tensors, which one graph cannot: here, if a number is nan or infinite.\n"
            f"  {line or 'loss_fn'}\n"
            "  Move the decision out of loss_fn: return the number with the loss. To leave out steps whose gradients"
            " are not finite, pass skip_nonfinite=True."
        )
