"""Parameters that the loss does not reach: skipped with a warning, as eager PyTorch skips them, and watched.

A parameter that a compiled call does not reach may be used outside of it; its gradient, which no rank reduces, is
refused when it arrives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxcomp import compat
from fxcomp.errors import UnsynchronizedGradient


def warn_unreached(names: Iterable[str]) -> None:
    """Warn of parameters that stay as they are."""
    for name in names:
        warnings.warn(
            f"fxcomp: the loss does not depend on {name!r}, which gets no gradient and is skipped, as eager PyTorch"
            " skips it. Set requires_grad=False if that is meant.",
            stacklevel=compat.users_level(),
        )


def refuse_gradients(parameters: Mapping[str, nn.Parameter]) -> list[RemovableHandle]:
    """Raise when a gradient arrives at a parameter after all."""
    return [_refuse_gradient(name, parameter) for name, parameter in parameters.items()]


def _refuse_gradient(name: str, parameter: nn.Parameter) -> RemovableHandle:
    def refuse(_: Tensor) -> None:
        raise UnsynchronizedGradient(
            f"the gradient of {name!r} never reaches a collective: the compiled graph does not make it, and something"
            " outside of it does.\n"
            f'  Use it inside the compiled call, set requires_grad=False, or pass "ignore": [{name!r}].'
        )

    register = cast("Callable[..., RemovableHandle]", parameter.register_hook)  # pyright: ignore[reportUnknownMemberType]
    return register(refuse)
