"""Fake stand-ins for everything that enters a step: parameters, buffers, the batch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.capture.fake_mode import StepFakes
from fxcomp.capture.questions import Given, Questions
from fxcomp.capture.shared_memory import distinct, first_places
from fxcomp.capture.training import Training
from fxcomp.graph.prelude import Feed

Varying = Mapping[int, frozenset[int]]
"""The dimensions of batch tensors whose size may vary, by the index of the leaf."""

FIXED_SIZES: Varying = MappingProxyType({})


class StepInputs:
    """The inputs of one capture, real and fake, in the order of the traced function's arguments."""

    def __init__(self, training: Training, batch: Any, varying: Varying):
        self.mode = StepFakes()
        # The optimizer's live numbers are symbols too; apart, they are no conditions on the batch's shapes.
        self.update_mode, self.update_shapes = compat.fake_mode()
        self.parameters = [(name, p, self.of(p)) for name, p in training.model.named_parameters()]
        self.buffers = [(name, b, self.of(b)) for name, b in training.model.named_buffers()]
        leaves, self.batch_spec = pytree.tree_flatten(batch)
        self.first_places = first_places(leaves)
        self._model, self._leaves = training.model, leaves
        self.batch = [
            compat.fake_with_dynamic_dims(self.mode, leaf, varying.get(i, frozenset()), f"batch_{i}")
            for i, leaf in enumerate(leaves)
        ]
        scale = training.loss_scale
        self.scale = [] if scale is None else [self.of(scale.scale)]
        """The scale of the loss, if it has one."""
        self.named: list[tuple[str, Any]] = [
            *((repr(name), tensor) for name, tensor, _ in (*self.parameters, *self.buffers)),
            *((f"batch{path}", leaf) for path, leaf in distinct(batch)),
            *([("the scale of the loss", scale.scale)] if scale is not None else []),
        ]
        """Every real input and the name that an error gives it; None instead of a tensor that came before."""

    @contextmanager
    def asked(self) -> Generator[Questions]:
        """Answer questions about values while it is open; what answers them holds the batch."""
        self.mode.questions = Questions(self._givens())
        try:
            yield self.mode.questions
        finally:
            self.mode.questions = None

    def _givens(self) -> list[Given]:
        batch = [Given(leaf, itemgetter(place)) for place, leaf in enumerate(self._leaves)]
        model = [Given(value, _feed(self._model, name, value)) for name, value, _ in (*self.parameters, *self.buffers)]
        return [*model, *batch, *(Given(fake, None) for fake in self.scale)]

    @property
    def fakes(self) -> tuple[list[Tensor], list[Tensor], list[Any], list[Tensor]]:
        """The arguments of the traced function."""
        return [f for _, _, f in self.parameters], [f for _, _, f in self.buffers], self.batch, self.scale

    @property
    def symbols(self) -> set[str]:
        """The names of the batch's sizes that may vary."""
        return compat.symbols(self.batch)

    def stand_ins(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """Traced tensors, by the id of the real tensor that each stands for."""
        entries = zip((*self.parameters, *self.buffers), (*parameters, *buffers), strict=True)
        return {id(real): traced for (_, real, _), traced in entries}

    def names(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[int, str]:
        """The names of traced parameters and buffers, by id."""
        entries = zip((*self.parameters, *self.buffers), (*parameters, *buffers), strict=True)
        return {id(traced): name for (name, _, _), traced in entries}

    def whole_batch(self, traced: Sequence[Any]) -> Any:
        """The batch made of traced leaves; what was one tensor in it is one again."""
        return pytree.tree_unflatten([traced[place] for place in self.first_places], self.batch_spec)

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor of the forward and backward pass."""
        return self.mode.from_tensor(tensor, static_shapes=True)

    def of_update(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor of the optimizer's update."""
        return self.update_mode.from_tensor(tensor.detach(), static_shapes=True)


def _feed(model: nn.Module, name: str, value: Tensor) -> Feed | None:
    """Find a buffer or a frozen parameter where it is at the time; None for what is trained."""
    if value.requires_grad:
        return None
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return lambda _: getattr(module, attribute)
