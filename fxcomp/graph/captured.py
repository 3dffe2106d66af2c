"""A captured training step: its graph, and what must be known to feed it and to read its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.graph.prelude import Prelude


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the auxiliary result that neither tensors nor sizes decide: it is what it was when it was captured."""

    value: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """The captured step and what must be known to feed it."""

    graph: GraphModule
    aux_spec: pytree.TreeSpec | None
    aux: tuple[Constant | None, ...]
    """The leaves of the auxiliary result: None for a tensor, or what follows from sizes, which the graph returns."""
    has_aux: bool
    gradient_names: tuple[str, ...]
    without_gradient: tuple[str, ...]
    guard: compat.ShapeGuard | None
    """Tells batches of other sizes that may run through the graph; None if none may."""
    is_weighted: bool = False
    """The loss is a sum over elements that are counted."""
    densified: tuple[str, ...] = ()
    """Parameters whose gradients are dense here and sparse in eager PyTorch."""
    unused: tuple[str, ...] = ()
    """Those of `gradient_names` that the loss does not depend on: their gradients are zeros."""

    prelude: Prelude | None = None
    """What the traced Python asked about values; another answer needs another capture."""

    def aux_leaves(self, returned: Sequence[Any]) -> list[Any]:
        """The leaves of the auxiliary result, with what the graph has returned of them."""
        values = iter(returned)
        return [next(values) if constant is None else constant.value for constant in self.aux]

    def result(self, loss: Any, returned: Sequence[Any]) -> Any:
        """The loss, or the loss and the auxiliary result, as the loss function returns them."""
        if self.aux_spec is None:
            return loss
        return loss, pytree.tree_unflatten(self.aux_leaves(returned), self.aux_spec)

    @property
    def device(self) -> torch.device:
        """The device of the model, and of everything else."""
        return next(iter(self.graph.graph.nodes)).meta["val"].device
