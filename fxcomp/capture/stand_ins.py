"""Make a traced tensor (stand-in) behave as the parameter or buffer that it replaces.

    p.no_decay          attributes are copied to the stand-in, and the step's writes are copied back
    fisher[p]           a key made before compiling: the stand-in has the real tensor's hash and compares equal
    id(p) in chosen     the user's code gets the real tensor's id

`p is q` with a real tensor `q` stays false: see docs/contract.md.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxcomp import compat
from fxcomp.capture.fake_mode import MAKER
from fxcomp.errors import CaptureFailed


class StandIns:
    """Stand-ins of one trace. `traced` maps names to (real tensor, stand-in)."""

    def __init__(self, traced: Mapping[str, tuple[Tensor, Tensor]]):
        self._traced = traced
        self._names = {id(stand_in): name for name, (_, stand_in) in traced.items()}
        self._real = {id(stand_in): real for real, stand_in in traced.values()}
        self.by_id = {id(real): stand_in for real, stand_in in traced.values()}

    def name(self, traced: Any) -> str | None:
        return self._names.get(id(traced))

    def stand_in_of(self, one: Any, other: Any) -> Tensor | None:
        """Return the argument that is the stand-in of the other; None if neither is."""
        if self._real.get(id(one), one) is other and one is not other:
            return one
        return other if self._real.get(id(other), other) is one and one is not other else None

    @contextmanager
    def taken_for_real(self) -> Generator[None]:
        """Give stand-ins the real tensors' attributes, hashes, and ids in user code."""
        real = {stand_in: id(tensor) for stand_in, tensor in self._real.items()}
        true_id = id

        def users_id(obj: object, /) -> int:
            true = true_id(obj)
            return real[true] if true in real and compat.is_users_call() else true

        try:
            with compat.attributes_instead({builtins: {"id": users_id}}), self._attributes_carried():
                yield
        finally:
            real.clear()  # the user's code may keep `users_id`

    @contextmanager
    def _attributes_carried(self) -> Generator[None]:
        own = {name: set(vars(stand_in)) for name, (_, stand_in) in self._traced.items()}
        given: dict[str, dict[str, Any]] = {}
        try:
            for name, (real, stand_in) in self._traced.items():
                attributes = {key: self.by_id.get(id(value), value) for key, value in vars(real).items()}
                _check_free(name, attributes, stand_in)
                given[name] = {key: value for key, value in attributes.items() if key not in own[name]}
                vars(stand_in).update(given[name])
            yield
        finally:
            for name, before in given.items():
                self._carry_back(*self._traced[name], before, own[name])

    def _carry_back(self, real: Tensor, stand_in: Tensor, before: Mapping[str, Any], own: set[str]) -> None:
        """Apply the attribute writes of the step to the real tensor; `untouched` then removes traced tensors."""
        now = {key: value for key, value in vars(stand_in).items() if key not in own and key != MAKER}
        for key, value in now.items():
            if key not in before or value is not before[key]:
                vars(real)[key] = self._real.get(id(value), value)
        for key in before.keys() - now.keys():
            vars(real).pop(key, None)
        for key in now:
            del vars(stand_in)[key]


class EqualToReal(TorchFunctionMode):
    """Function mode in which a stand-in equals its real tensor as a dict key."""

    def __init__(self, stand_ins: StandIns):
        super().__init__()
        self._stand_ins = stand_ins
        self._ones: list[Tensor] = []
        """Results of comparisons of a stand-in and its real tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__eq__ and (one := self._stand_ins.stand_in_of(*args)) is not None:
            self._ones.append(one == one)
            return self._ones[-1]
        if func is Tensor.__bool__ and any(args[0] is each for each in self._ones):
            return True  # a dict checks if two keys are equal
        return func(*args, **(kwargs or {}))


def _check_free(name: str, attributes: Mapping[str, Any], stand_in: Tensor) -> None:
    for key, value in attributes.items():
        is_tracings = key == MAKER or vars(stand_in).get(key, value) is not value
        if is_tracings or (hasattr(type(stand_in), key) and not hasattr(Tensor, key)):
            raise CaptureFailed(
                f"{name!r} has an attribute {key!r}, which a traced tensor has for its own use.\n"
                "  Give the attribute another name."
            )
