"""Keep the gradients of some backward passes local, as DistributedDataParallel.no_sync does.

    with fxcomp.no_sync(model):
        loss_of(compiled, first).backward()     .grad is the local gradient
    loss_of(compiled, second).backward()        .grad is the mean over ranks of the sum of both

One call of backward() averages all gradients, also those accumulated in `.grad`, or none:

    forward passes of the call     the call averages
    any ran outside no_sync        always
    all ran inside no_sync         if another pass ran outside since the last averaging
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxcomp import compat
from fxcomp.errors import BadOption

_local: list[frozenset[int]] = []
"""Parameter ids of each model inside `no_sync`."""


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Skip the reduction of a compiled `model` for forward passes inside the context.

    The next backward() through a forward pass outside averages the accumulated gradients. All ranks must do the same.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadOption(f"no_sync takes the model that was compiled, a torch.nn.Module; it is a {type(model).__name__}")
    mine = frozenset(map(id, model.parameters()))
    _local.append(mine)
    try:
        yield
    finally:
        _local.remove(mine)


@dataclass(slots=True)
class Averaging:
    """State that decides which backward passes of one model average, shared by its graphs."""

    _is_open: bool = False
    """True if a forward pass has run outside `no_sync` since the last averaging."""
    _outside: list[weakref.ref[Any]] = field(default_factory=list[weakref.ref[Any]])
    """Autograd nodes of forward passes outside `no_sync` that may still run backward."""
    _local_in: int | None = None
    """Id of the current backward() call if it includes a forward pass from inside `no_sync`."""
    _decided: tuple[int | None, bool] = (None, True)
    """Id of the latest backward() call, and True if it averages."""

    def forward_has_run(self, parameter: Any, results: Sequence[Any]) -> None:
        node = compat.backward_node(results)
        if node is None:
            return
        if any(id(parameter) in parameters for parameters in _local):
            compat.before_backward(node, self._begin_local)
        elif compat.backward_call() is None:  # not None: checkpointing recomputes the forward pass
            self._is_open = True
            self._outside = [reference for reference in self._outside if reference() is not None]
            self._outside.append(weakref.ref(node))

    def is_due(self) -> bool:
        """Return True if the current backward pass averages. The answer is fixed per backward() call."""
        call = compat.backward_call()
        is_local, self._local_in = call is not None and self._local_in == call, None
        if call is None or self._decided[0] != call:
            self._decided = (call, not is_local or self._is_open or any(map(_will_run, self._outside)))
        if self._decided[1]:
            self._is_open = False
        return self._decided[1]

    def _begin_local(self) -> None:
        self._local_in = compat.backward_call()


def _will_run(reference: weakref.ref[Any]) -> bool:
    node = reference()
    return node is not None and compat.will_run_backward(node)
