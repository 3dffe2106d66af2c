"""Keep the gradients of some backward passes on this rank, as DistributedDataParallel.no_sync does.

    with fxcomp.no_sync(model):
        loss_of(compiled, first).backward()     .grad has this rank's own gradients
    loss_of(compiled, second).backward()        .grad has the mean over the ranks of the sum of both

As under DistributedDataParallel, the forward pass decides: a backward pass whose forward pass ran inside stays local,
wherever it runs itself.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxcomp import compat
from fxcomp.errors import BadOption

_local: list[frozenset[int]] = []
"""The parameters of each model that stays local now, by id."""


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Let backward passes of a model that torch.compile compiled reduce nothing if their forward pass runs inside.

    The next backward pass whose forward pass ran outside reduces what has come together in `.grad`. All ranks must do
    the same, as under DistributedDataParallel.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadOption(f"no_sync takes the model that was compiled, a torch.nn.Module; it is a {type(model).__name__}")
    mine = frozenset(map(id, model.parameters()))
    _local.append(mine)
    try:
        yield
    finally:
        _local.remove(mine)


class Passes:
    """Tells the backward passes of one graph whether their forward pass ran inside `no_sync`."""

    def __init__(self) -> None:
        self._next_is_local = False

    def forward_has_run(self, parameter: Any, results: Sequence[Any]) -> None:
        """Remember with the results of a forward pass, which reads a parameter, that their gradients stay here."""
        if any(id(parameter) in parameters for parameters in _local):
            compat.before_backward(results, self._begin_local)

    def take(self) -> bool:
        """Tell if the backward pass that begins now stays on this rank."""
        is_local, self._next_is_local = self._next_is_local, False
        return is_local

    def _begin_local(self) -> None:
        self._next_is_local = True
