"""Keep the gradients of some backward passes on this rank, as DistributedDataParallel.no_sync does.

    with fxcomp.no_sync(model):
        loss_of(compiled, first).backward()     .grad has this rank's own gradients
    loss_of(compiled, second).backward()        .grad has the mean over the ranks of the sum of both

As under DistributedDataParallel, forward passes decide, and one call of backward() averages everything or nothing: what
it makes, and what has come together in `.grad` before it.

    forward passes that it runs through         it averages
    one or more ran outside                     always
    all ran inside                              if one outside has run since gradients were last averaged
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
"""The parameters of each model that stays local now, by id."""


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Let backward passes of a `model` that torch.compile compiled reduce nothing if their forward pass runs inside.

    The next call of backward() that also runs through a forward pass outside reduces what has come together in `.grad`.
    All ranks must do the same, as under DistributedDataParallel.
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
    """Tells which backward passes of one model average, for all graphs that torch makes of it."""

    _is_open: bool = False
    """A forward pass has run outside of `no_sync` since gradients were last averaged."""
    _outside: list[weakref.ref[Any]] = field(default_factory=list[weakref.ref[Any]])
    """The nodes of forward passes that ran outside, as long as they may run backward."""
    _local_in: int | None = None
    """The call of backward() in which a node of a forward pass inside runs now."""
    _decided: tuple[int | None, bool] = (None, True)
    """The latest call of backward(), and whether it averages."""

    def forward_has_run(self, parameter: Any, results: Sequence[Any]) -> None:
        """Note a forward pass that reads a parameter, by its results."""
        node = compat.backward_node(results)
        if node is None:
            return
        if any(id(parameter) in parameters for parameters in _local):
            compat.before_backward(node, self._begin_local)
        elif compat.backward_call() is None:  # else checkpointing runs it again
            self._is_open = True
            self._outside = [reference for reference in self._outside if reference() is not None]
            self._outside.append(weakref.ref(node))

    def is_due(self) -> bool:
        """Return whether the backward pass that begins averages. All passes of one backward() are told the same."""
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
