"""Run one step's loss and gradients with eager PyTorch, without side effects."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.forward_backward import swapped
from fxcomp.capture.stand_ins import EqualToReal, StandIns
from fxcomp.capture.structures import flatten
from fxcomp.capture.training import Training, WeightedLoss
from fxcomp.errors import CaptureFailed
from fxcomp.graph.captured import Captured, written_parameters


@dataclass(slots=True)
class EagerResult:
    """Eager results for one batch on this rank."""

    loss: Tensor
    count: Tensor | None
    """Number of elements over which a WeightedLoss sums; None for a plain loss."""
    aux: list[Any]
    aux_spec: pytree.TreeSpec
    gradients: dict[str, Tensor]
    """Gradients of the parameters that the compiled step updates, in separate memory; zero if eager has none."""
    unexpected: tuple[str, ...]
    """Parameters with a gradient that the compiled step does not update."""
    buffers: dict[str, Tensor]
    """Buffers after the forward pass."""


def run_eagerly(training: Training, captured: Captured, batch: Any, seed: Tensor | None = None) -> EagerResult:
    """Run the loss function twice, and restore everything that the loss function writes.

    The first run, on the user's tensors, gives the loss and the auxiliary values. The second, on aliases of the
    parameters without hooks, gives the gradients; `backward()` starts from `seed`, or 1. Raises CaptureFailed if the
    backward graphs differ: then the loss function compares the identity of parameters.
    """
    with _undisturbed(training, captured, {}), _same_hooks(training.model):
        loss, weighted, aux = _forward(training, captured, batch)
        way = _way(loss)
        value, count = (weighted.mean, weighted.counted) if weighted else (loss.detach(), None)
        leaves, aux_spec = flatten(aux)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        del loss, weighted, aux
    gradients, unexpected, buffers = _gradients(training, captured, batch, seed, way)
    return EagerResult(value, count, leaves, aux_spec, gradients, unexpected, buffers)


def _forward(training: Training, captured: Captured, batch: Any) -> tuple[Tensor, WeightedLoss | None, Any]:
    result = training.loss_fn(training.model, _copied(batch))
    returned, aux = result if captured.has_aux else (result, ())
    return (returned.sum, returned, aux) if isinstance(returned, WeightedLoss) else (returned, None, aux)


def _way(loss: Tensor) -> list[str]:
    return [node.name() for node in compat.nodes_of(loss)]


def _gradients(
    training: Training, captured: Captured, batch: Any, seed: Tensor | None, way: list[str] | None = None
) -> tuple[dict[str, Tensor], tuple[str, ...], dict[str, Tensor]]:
    """Run the loss function and `backward()` on aliases of the parameters.

    Return the gradients, the names of unexpected gradients, and the buffers after the forward pass.
    """
    tensors = {**dict(training.model.named_parameters()), **dict(training.model.named_buffers())}
    buffers: dict[str, Tensor] = {}
    with _undisturbed(training, captured, buffers):
        aliases = {name: _alias(tensor) for name, tensor in tensors.items() if tensor.requires_grad and tensor.is_leaf}
        stand_ins = StandIns({name: (tensors[name], alias) for name, alias in aliases.items()})
        with swapped(training.model, stand_ins.by_id), stand_ins.taken_for_real(), EqualToReal(stand_ins):
            loss, *_ = _forward(training, captured, batch)
            if way is not None and _way(loss) != way:
                raise CaptureFailed(
                    "with stand-ins for parameters, loss_fn leads to another backward graph, as where it asks if a"
                    " parameter is a tensor that was kept (`p is q`).\n  Keep names, a set of parameters, or id(p)"
                )
            with compat.without_autocast():
                compat.backward(loss, torch.ones_like(loss) if seed is None else seed.to(loss.dtype))
    found = {owner.name: aliases[owner.name].grad for owner in training.owned if owner.name in aliases}
    gradients = {name: None if g is None else _written_into(g) for name, g in found.items()}
    expected = {name: gradients.pop(name, None) for name in captured.gradient_names}
    made = {name: torch.zeros_like(tensors[name]) if g is None else g for name, g in expected.items()}
    unexpected = tuple(name for name, gradient in gradients.items() if gradient is not None)
    return _apart(made, list(tensors.values())), unexpected, buffers


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor, with its own `.grad` and no hooks."""
    alias = tensor.detach()
    return nn.Parameter(alias) if isinstance(tensor, nn.Parameter) else alias.requires_grad_()


FACTORS = (0.7, 1.3, 0.9)
"""Factors of the backward seed. They change mantissas, so rounding differs."""


def rounding_of(training: Training, captured: Captured, batch: Any, seed: Tensor | None = None) -> dict[str, float]:
    """Estimate the rounding error of each gradient, relative to the largest element of all gradients.

    The backward pass runs again with other seeds. Gradients are proportional to the seed, except for rounding.
    """
    one = torch.ones((), device=training.device) if seed is None else seed
    first, *_ = _gradients(training, captured, batch, one)
    moved = dict.fromkeys(first, 0.0)
    for factor in FACTORS:
        again, *_ = _gradients(training, captured, batch, one * factor)
        for name, value in first.items():
            moved[name] = max(moved[name], largest(again[name] / factor - value))
    scale = max(map(largest, first.values()), default=0.0)
    return {name: value / scale for name, value in moved.items()} if scale > 0 else {}


@contextmanager
def _undisturbed(training: Training, captured: Captured, buffers: dict[str, Tensor]) -> Generator[None]:
    """Restore everything that eager PyTorch writes. `buffers` receives the buffers after the forward pass."""
    parameters = dict(training.model.named_parameters())
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        compat.compiled_functions_eager(),
        _same_random_numbers(training.model),
        _same_buffers(training.model, buffers, [parameters[name] for name in written_parameters(captured.graph)]),
        _same_constants(captured.graph),
    ):
        yield


@contextmanager
def _same_hooks(model: nn.Module) -> Generator[None]:
    """Remove hooks that the loss function registers on parameters inside the context.

    Earlier hooks stay: they are fxcomp's, because capture raises for any others.
    """
    places = [(p, name) for p in model.parameters() for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    empty = [place for place in places if not getattr(*place)]
    try:
        yield
    finally:
        for hooks in filter(None, (getattr(*place) for place in empty)):
            hooks.clear()


def _written_into(gradient: Tensor) -> Tensor:
    """Return a dense gradient without stride 0, which can be written to."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient.contiguous() if 0 in compat.strides(gradient) else gradient


def _apart(gradients: dict[str, Tensor], others: Sequence[Tensor]) -> dict[str, Tensor]:
    """Copy gradients that share memory with each other or with `others`: `a + b` may give both the same tensor."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    for name, gradient in gradients.items():
        memory = gradient.untyped_storage().data_ptr()
        if memory in taken or 0 in compat.strides(gradient):
            gradients[name] = gradient.clone(memory_format=torch.contiguous_format)
        taken.add(memory)
    return gradients


def _copied(batch: Any) -> Any:
    """Copy a batch, because a forward pass may write to it."""
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            twin = leaf.detach()
            if 0 not in compat.strides(leaf):
                twin = twin.clone()
            copies[id(leaf)] = twin.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    leaves, structure = flatten(batch)
    return pytree.tree_unflatten(map(copy, leaves), structure)


@contextmanager
def _same_random_numbers(model: nn.Module) -> Generator[None]:
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
    """Restore buffers, and parameters that the forward pass writes. `after` receives the resulting buffers."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
    # Not by tensor versions: batch norm writes running statistics without raising versions.
    before = [(buffer, buffer.data, buffer.detach().clone()) for buffer in (*model.buffers(), *written)]
    try:
        yield
        after.update((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    finally:
        with torch.no_grad():
            for table, original in tables:
                table.update(original)  # the forward pass may have replaced them
            for buffer, data, value in before:
                buffer.data = data  # the forward pass may have assigned to it
                buffer.copy_(value)


@contextmanager
def _same_constants(captured: GraphModule) -> Generator[None]:
    """Restore tensors and generators outside of the model, such as a teacher's statistics."""
    tensors = [(tensor, tensor.detach().clone()) for tensor in _written(captured)]
    generators = [(generator, generator.get_state()) for generator in compat.generators_in(captured)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
        for generator, state in generators:
            generator.set_state(state)


def _written(captured: GraphModule) -> list[Tensor]:
    roots = {_root(place): None for node in captured.graph.nodes for place in _places(node)}
    return [getattr(captured, str(root.target)) for root in roots if root.op == "get_attr"]


_UNDECLARED = ("running_mean", "running_var")
"""Arguments that batch norms write without declaring it."""


def _places(node: Node) -> Iterator[Node]:
    if compat.is_operator(node.target):
        given = dict(zip(compat.places_of_arguments(node.target), node.args, strict=False)) | node.kwargs
        written = (given.get(name) for name in (*compat.written_arguments(node.target), *_UNDECLARED))
        yield from (value for value in written if isinstance(value, Node))


def _root(node: Node) -> Node:
    while compat.is_operator(node.target) and compat.is_view(node.target) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def largest(value: Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    if value.numel() == 0:
        return 0.0
    found = value.detach().abs().max().item()
    if found == found and found != float("inf"):
        return float(found)
    finite = value[value.isfinite()]
    return float(finite.abs().max().item()) if finite.numel() else 0.0
