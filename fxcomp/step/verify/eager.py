"""One step's loss and gradients by eager PyTorch, as if it had not happened."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.capture.training import Training
from fxcomp.graph.buffers import written_parameters
from fxcomp.graph.captured import Captured
from fxcomp.step.verify.outside import unwritten


@dataclass(slots=True)
class Eager:
    """What eager PyTorch computed of one batch on this rank."""

    loss: Tensor
    aux: list[Any]
    structure: pytree.TreeSpec
    gradients: dict[str, Tensor]
    """Of the parameters that the compiled step updates, each in memory of its own; zero where eager has none."""
    unexpected: tuple[str, ...]
    """Parameters with a gradient that the compiled step does not update."""
    buffers: dict[str, Tensor]
    """As the forward pass left them."""


def run_eagerly(training: Training, captured: Captured, batch: Any) -> Eager:
    """Run the loss function and its backward pass; buffers, random numbers and the batch stay as they were."""
    parameters = dict(training.model.named_parameters())
    names = [owner.name for owner in training.owned]
    buffers: dict[str, Tensor] = {}
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _same_random_numbers(training.model),
        _same_buffers(training.model, buffers, [parameters[name] for name in written_parameters(captured.graph)]),
        unwritten(captured.graph),
    ):
        result = training.loss_fn(training.model, _copied(batch))
        loss, aux = result if captured.has_aux else (result, ())
        with compat.without_autocast():
            found: Any = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    leaves, structure = pytree.tree_flatten(aux)
    # A gradient may be one number, spread: it is written into later, as `.grad` may be.
    own = [g.contiguous() if isinstance(g, Tensor) and 0 in compat.strides(g) else g for g in found]
    gradients: dict[str, Tensor | None] = dict(zip(names, own, strict=True))
    expected = {name: gradients.pop(name) for name in captured.gradient_names}
    others = [*parameters.values(), *training.model.buffers()]
    return Eager(
        loss.detach(),
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        structure,
        _apart({name: torch.zeros_like(parameters[name]) if g is None else g for name, g in expected.items()}, others),
        tuple(name for name, gradient in gradients.items() if gradient is not None),
        buffers,
    )


def _apart(gradients: dict[str, Tensor], others: Sequence[Tensor]) -> dict[str, Tensor]:
    """Copies of those gradients that share memory: of a sum's terms they are one tensor, and of ones a single value."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage().data_ptr()
        if memory in taken or 0 in compat.strides(gradient):
            gradients[name] = gradient.clone(memory_format=torch.contiguous_format)
        taken.add(memory)
    return gradients


def _copied(batch: Any) -> Any:
    """The same batch in other memory: a forward pass may write into it."""
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or 0 in compat.strides(leaf):
            return leaf
        if id(leaf) not in copies:
            twin = leaf.detach().clone(memory_format=torch.preserve_format)
            copies[id(leaf)] = twin.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(copy, batch)


@contextmanager
def _same_random_numbers(model: nn.Module) -> Generator[None]:
    """Give generators back the state that they had: torch's, Python's and numpy's."""
    devices: set[int | None] = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(sorted(d for d in devices if d is not None)):  # pyright: ignore[reportUnknownMemberType]  # untyped
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def _same_buffers(model: nn.Module, after: dict[str, Tensor], written: Iterable[Tensor]) -> Generator[None]:
    """Put buffers back, and parameters that a forward pass writes; `after` gets what buffers were made to be."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
    # Versions do not tell which ones are written: batch norm writes its running statistics without counting.
    before = [(buffer, buffer.detach().clone()) for buffer in (*model.buffers(), *written)]
    try:
        yield
        after.update((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    finally:
        with torch.no_grad():
            for table, original in tables:
                table.update(original)  # the forward pass may have put new ones in their places
            for buffer, value in before:
                buffer.copy_(value)
