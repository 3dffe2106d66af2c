"""Replace each real tensor in a trace by one fake. In-place operators write to the fake.

   c = torch.ones(3)          outside the traced function
   c.mul_(0.5)                torch's fake mode would change the real `c`, because the other operand is a number
-->
   %c     f32[3]  constant
   %mul_  f32[3]  mul_(%c, 0.5)
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from fxcomp.compat.modes import DispatchMode, Fake, FakeMode, dispatch_mode_stack
from fxcomp.compat.source_lines import is_called_by_user

_LIFTS = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators whose argument was made in the trace by torch.tensor(...)."""


class Constants(DispatchMode):
    """Dispatch mode around the tracer that replaces real tensors by traced fakes.

    `equal` has no fake kernel and is decomposed. `allclose` inside a torch operator becomes an assertion.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Any):
        super().__init__()
        modes = [leaf.fake_mode for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Fake)]
        modes += [mode for mode in dispatch_mode_stack() if isinstance(mode, FakeMode)]
        self._fakes = modes[0] if modes else None
        proxies = get_proxy_mode()
        assert proxies is not None, "constants belong to a trace"
        self._tracer: Any = proxies.tracer
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        """Real tensors and fakes, by id of the real tensor."""
        self._gradients: list[tuple[Tensor, Tensor | None, Any]] = []
        """Real tensors, their `.grad` before the trace, and hook handles."""
        self.trained: list[Tensor] = []
        """Real tensors that got a fake `.grad`."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, gradient, hook in self._gradients:
            tensor.grad = gradient
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], Fake):  # torch reads it twice per operator
            return args[0].fake_device
        if func is torch.ops.aten.equal.default:  # also inside operators: torch.cov checks weights
            return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())
        if func is torch.ops.aten.allclose.default and not is_called_by_user():
            message = "a check inside of an operator failed: of svd's backward pass, that no loss depends on a phase"
            torch.ops.aten._assert_async.msg(torch.isclose(*args, **(kwargs or {})).all(), message)
            return True
        given: Any = (args, kwargs or {})
        if not _is_torchs_own(func) and any(map(_holds_real, (*args, *given[1].values()))):
            given = pytree.tree_map_only(Tensor, self.traced, given)
        return func(*given[0], **given[1])

    def traced(self, tensor: Tensor) -> Tensor:
        """Return a real tensor's fake, and other tensors unchanged."""
        if self._fakes is None or not _is_real(tensor):
            return tensor
        if id(tensor) not in self._known:
            fake = self._fakes.from_tensor(tensor, static_shapes=True)
            proxy = Proxy(self._tracer.create_arg(tensor), self._tracer)
            track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
            self._known[id(tensor)] = tensor, fake
            if tensor.requires_grad and tensor.is_leaf:
                with torch.DisableTorchFunction():  # not a hook of the user
                    hook = cast("Any", tensor.register_post_accumulate_grad_hook(self.trained.append))
                    self._gradients.append((tensor, tensor.grad, hook))
        return self._known[id(tensor)][1]


def traced(tensor: Tensor) -> Tensor:
    """Return a tensor's fake while tracing, else the tensor."""
    modes = _under_way()
    return modes[-1].traced(tensor) if modes else tensor


def trained_outside() -> list[Tensor]:
    return [tensor for mode in _under_way() for tensor in mode.trained]


def _under_way() -> list[Constants]:
    return [mode for mode in dispatch_mode_stack() if isinstance(mode, Constants)]


def _is_torchs_own(func: Any) -> bool:
    """Return whether an operator keeps real arguments: torch lifts constants, and raises for in-place reshapes."""
    return func in _LIFTS or (isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags)


def _holds_real(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_real, cast("dict[Any, Any]", value).values()))
    return any(map(_holds_real, cast("list[Any]", value))) if isinstance(value, list | tuple) else _is_real(value)


def _is_real(leaf: Any) -> bool:
    return type(leaf) in (Tensor, torch.nn.Parameter)
