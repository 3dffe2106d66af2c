"""Raise if a gradient of a compiled model reaches `.grad` without averaging.

torch may silently run a model eagerly, and each rank would train alone. The watch hooks every parameter, also frozen
ones. When backward() stores a gradient:

    a compiled backward pass has averaged it                       no error
    a compiled pass has kept it local (fxcomp.no_sync)             no error
    eager code has made it                                         the backend's own error, or CaptureFailed

The other ranks, which wait in a meeting or a collective, raise too. Gradients of torch.autograd.grad are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from fxcomp import compat
from fxcomp.errors import CaptureFailed, FxcompError
from fxcomp.runtime.arrivals import Arrivals
from fxcomp.runtime.members import Members


class GradientWatch:
    """Watch of one model's parameters."""

    def __init__(self, process_group: Any, tell: Callable[[FxcompError], None], is_of_graph: bool = False) -> None:
        self.process_group, self.tell = process_group, tell
        self.is_of_graph = is_of_graph
        """True if the backend started the watch at a graph, without `compile_model`."""
        self._watched = set[Arrivals]()
        self._kept: FxcompError | None = None
        self._is_told = False

    def lay(self, parameters: Mapping[str, nn.Parameter], ignore: Collection[str] = ()) -> None:
        """Watch parameters. Errors show a parameter's latest name."""
        for name, parameter in parameters.items():
            if name not in ignore and (parameter.is_floating_point() or parameter.is_complex()):
                arrivals = Arrivals.of(parameter)
                arrivals.guard(self, partial(self._refuse, name, arrivals))
                self._watched.add(arrivals)

    def lift(self) -> None:
        for arrivals in self._watched:
            arrivals.guard(self, None)

    def keep(self, error: FxcompError) -> None:
        """Keep an error that torch may suppress; the next gradient of eager code raises it."""
        self._kept, self._is_told = error, True

    def forget(self) -> None:
        self._kept, self._is_told = None, False

    def _refuse(self, name: str, arrivals: Arrivals) -> None:
        if not has_others(self.process_group) or not arrivals.is_stored():
            return
        error = self._kept or _not_averaged(name)
        if not self._is_told:
            self.tell(error)
        self._is_told = False  # another call of backward() is another failure
        raise error


def has_others(process_group: Any) -> bool:
    is_joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return is_joined and len(Members.of(process_group)) > 1


def _not_averaged(name: str) -> CaptureFailed:
    why = compat.why_not_compiled()
    return CaptureFailed(
        f"the gradient of {name!r} never reaches a collective: it comes from a backward pass without the compiled"
        " graph, and is this rank's own.\n"
        + (f"  Nothing is compiled: {why}.\n" if why else "")
        + "  Call the compiled model, and no other method or the module itself. torch runs it eagerly where it makes no"
        " graph: compile with\n"
        "  fullgraph=True to see why (a hook, an operator, a graph break; TORCH_LOGS=recompiles for the recompile"
        " limit).\n"
        f'  Set requires_grad=False for untrained parameters, or pass "ignore": [{name!r}] for those you average.\n'
        "  fxcomp.ddp_hook compresses models that torch cannot compile, under eager DistributedDataParallel."
    )
