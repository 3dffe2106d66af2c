"""Record the origin of each gradient before autograd adds it to `.grad`.

If torch.compile silently falls back to eager code, unaveraged gradients reach `.grad`.

    compiled backward pass   ── note_averaged / note_local ──►  Arrivals
    autograd's engine        ── gradient ─────────────────────► Arrivals ──► the guards, if neither was noted

A parameter's Arrivals is a hook of `Tensor.register_hook`, shared by all models with that parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fxcomp import compat

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Arrivals:
    __slots__ = ("_averaged_in", "_guards", "_is_sampled", "_local_in", "_parameter", "digest")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._guards: dict[int, Callable[[], None]] = {}
        self._averaged_in: int | None = None
        self._local_in: int | None = None
        self._is_sampled = False
        self.digest: Tensor | None = None
        """`digest_of` the latest sampled gradient; None until it arrives."""
        compat.register_hook(parameter, self)

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Arrivals:
        hooks: Mapping[int, object] = parameter._backward_hooks or {}
        return next((hook for hook in hooks.values() if isinstance(hook, cls)), None) or cls(parameter)

    def guard(self, owner: object, refuse: Callable[[], None] | None) -> None:
        """Call `refuse` before an uncompiled backward pass stores a gradient. `refuse=None` removes `owner`'s guard."""
        if refuse is None:
            self._guards.pop(id(owner), None)
        else:
            self._guards[id(owner)] = refuse

    def note_averaged(self, call: int | None, is_sampled: bool) -> None:
        """Record that this backward() call returned an averaged gradient. `is_sampled` requests a gradient digest."""
        self._averaged_in = call
        if is_sampled:
            self._is_sampled, self.digest = True, None

    def note_local(self, call: int | None) -> None:
        """Record that this backward() call returns a gradient that is not averaged yet."""
        self._local_in = call

    def __call__(self, gradient: Tensor) -> None:
        call = compat.backward_call()
        if call not in (self._averaged_in, self._local_in):
            for refuse in self._guards.values():
                refuse()
        elif self._is_sampled:
            self._is_sampled, self.digest = False, digest_of(gradient)

    def is_stored(self) -> bool:
        """Return whether autograd adds the gradient to `.grad`; torch.autograd.grad only returns gradients."""
        parameter = self._parameter()
        return parameter is not None and compat.will_accumulate(parameter)


def digest_of(tensor: Tensor) -> Tensor:
    """Sum a tensor's bits as integers, int64[]. Almost surely, any change changes the sum."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.contiguous().view(-1).view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def has_foreign_hooks(parameter: nn.Parameter) -> bool:
    hooks: Mapping[int, object] | None = parameter._backward_hooks
    if hooks and not all(isinstance(hook, Arrivals) for hook in hooks.values()):
        return True
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
