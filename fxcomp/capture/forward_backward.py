"""Trace the loss function and its backward pass into one functional graph; raise if the graph would train wrongly.

While tracing, traced tensors replace the model's parameters and buffers. If the forward pass assigns a new tensor to a
buffer, the graph copies the new tensor into the old buffer, so both need the same shape and dtype.
"""

# private tables of nn.Module
# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat, errors
from fxcomp.capture.batch_type import name_of_class
from fxcomp.capture.faithful import explaining, faithful, puts_gradient
from fxcomp.capture.fake_mode import StepInputs
from fxcomp.capture.random_state import check_draws_again, check_generators, drop_idle_states, keeping_random_states
from fxcomp.capture.stand_ins import StandIns
from fxcomp.capture.structures import flatten, is_plain
from fxcomp.capture.training import Training, WeightedLoss, split
from fxcomp.capture.untouched import untouched
from fxcomp.capture.user_collectives import keeping_collectives
from fxcomp.errors import CaptureFailed
from fxcomp.graph.captured import Constant
from fxcomp.graph.functional import functional
from fxcomp.graph.prelude import Prelude
from fxcomp.graph.uncertain_views import reshape_uncertain_views

Table = dict[str, Any]


@contextmanager
def swapped(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Generator[None]:
    """Replace the model's parameters and buffers by `stand_ins`, which are keyed by the real tensor's id."""
    saved: list[tuple[Table, Table]] = []
    places: list[str] = []
    try:
        for place, module in list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules())):  # untyped in torch
            tables: list[Table] = [module._parameters, module._buffers]
            for table in tables:
                saved.append((table, dict(table)))
                places.append(place)
                for name, tensor in saved[-1][1].items():
                    table[name] = stand_ins.get(id(tensor), tensor)
            _refresh_flat_weights(module)
        held = [(place, table, _kinds(table)) for place, (table, _) in zip(places, saved, strict=True)]
        yield
        _write_back(held)
    finally:
        for table, original in saved:
            table.clear()
            table.update(original)
        for module in model.modules():
            _refresh_flat_weights(module)


_Kind = tuple[tuple[int, ...], torch.dtype, torch.device] | None
"""Shape, dtype and device of a parameter or buffer; None if missing."""


def _write_back(held: Sequence[tuple[str, Table, Mapping[str, tuple[Any, _Kind]]]]) -> None:
    """Copy tensors that the forward pass assigned to buffers into the original buffers.

    Raises CaptureFailed if the shape, dtype or device changes, by assignment or in place (resize_).
    """
    with torch.no_grad():
        for place, table, original in held:
            now = _kinds(table)
            for name in {**original, **now}:
                (was, kind), (value, new_kind) = original.get(name, (None, None)), now.get(name, (None, None))
                if kind != new_kind:
                    raise _replaced(f"{place}.{name}".removeprefix("."), kind, new_kind)
                if value is not was:
                    was.copy_(value)


def _kinds(table: Table) -> dict[str, tuple[Any, _Kind]]:
    kinds = ((n, t, None if t is None else (tuple(t.shape), t.dtype, t.device)) for n, t in table.items())
    return {name: (tensor, kind) for name, tensor, kind in kinds}


def _replaced(name: str, was: _Kind, now: _Kind) -> CaptureFailed:
    return CaptureFailed(
        f"the forward pass puts {_text(now)} where {name!r} was {_text(was)}: a compiled step writes into the buffers"
        " that it knows.\n"
        "  Keep a buffer's shape and dtype. If the model only sets itself up, let it do so before compile_step, by one"
        " forward pass of the longest batch."
    )


def _text(kind: _Kind) -> str:
    return "nothing" if kind is None else f"{str(kind[1]).removeprefix('torch.')}{list(kind[0])}"


def _refresh_flat_weights(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names  # pyright: ignore[reportUnknownMemberType]  # a bare list
        module._flat_weights = [getattr(module, name) for name in names]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Meaning of the forward and backward graph's outputs: loss, auxiliary tensors, gradients."""

    has_aux: bool
    aux_spec: pytree.TreeSpec | None
    aux: tuple[Constant | None, ...]
    gradient_names: tuple[str, ...]
    without_gradient: tuple[str, ...]
    is_weighted: bool
    """True if loss_fn returns a WeightedLoss. The second output is then the count of elements."""
    densified: tuple[str, ...] = ()
    """Parameters whose gradients are sparse in eager PyTorch."""
    prelude: Prelude | None = None

    def results_of(self, body: GraphModule) -> list[Any]:
        """List the graph's results, with the auxiliary constants in their places."""
        returned: Any = body.graph.output_node().args[0]
        values = iter(returned)
        before = [next(values) for _ in range(1 + self.is_weighted)]
        return [*before, *(next(values) if leaf is None else leaf.value for leaf in self.aux), *values]


def trace_forward_backward(training: Training, inputs: StepInputs) -> tuple[GraphModule, Outputs]:
    """Trace one loss and its gradients without changing the user's objects."""
    found: list[Outputs] = []
    caches_casts = torch.is_autocast_cache_enabled()
    names = [owner.name for owner in training.owned if owner.parameter.requires_grad]

    def follow() -> None:
        if (questions := inputs.mode.questions) is not None:
            questions.follow(compat.current_tracer())

    def forward_backward(
        parameters: list[Tensor], buffers: list[Tensor], batch: list[Tensor], scale: list[Tensor], numbers: list[Any]
    ) -> list[Tensor]:
        follow()
        stand_ins = StandIns(inputs.named_pairs(parameters, buffers))
        for parameter in parameters:
            parameter.grad = None  # a fake copies the parameter's `.grad`
        with (
            swapped(training.model, stand_ins.by_id),
            stand_ins.taken_for_real(),
            faithful(stand_ins, inputs.mode, caches_casts=caches_casts) as seen,
            keeping_collectives(training.model),
            keeping_random_states(),
            inputs.in_place(numbers),
        ):
            result = training.loss_fn(training.model, inputs.whole_batch(batch))
            loss, aux, has_aux = split(result)
            weighted = loss if isinstance(loss, WeightedLoss) else None
            loss = _checked(weighted.sum if weighted else loss)
            _check_is_all_trained(compat.leaves_of(loss), stand_ins)
            counts = [weighted.counted] if weighted else []
            value = (weighted.mean if weighted else loss.detach()).clone()  # the last operator of the forward pass
            by_name = {name: p for (name, _, _), p in zip(inputs.parameters, parameters, strict=True)}
            _check_no_backward(by_name)
            # Backward runs outside of autocast, as in eager.
            with compat.without_autocast():
                seed = [factor.to(loss.dtype) for factor in scale] or None
                wanted = [by_name[name] for name in names]
                whole = seen.has_hooks or _calls_out(loss)
                gradients = list(map(_accumulated, wanted, _gradients(loss, seed, wanted, whole=whole)))
            if whole:
                _check_is_all_trained(compat.trained_outside(), stand_ins)
            else:
                _check_no_backward(by_name)
        leaves, aux_spec = flatten(aux)
        named: dict[str, Tensor | None] = dict(zip(names, gradients, strict=True))
        _check_gradients(named)
        constants = tuple(map(_constant, leaves))
        found.append(
            Outputs(
                has_aux=has_aux,
                aux_spec=aux_spec if has_aux else None,
                aux=constants,
                gradient_names=tuple(name for name, g in named.items() if g is not None),
                without_gradient=tuple(name for name, g in named.items() if g is None),
                is_weighted=weighted is not None,
                densified=tuple(name for name in seen.densified if named.get(name) is not None),
            )
        )
        returned = [leaf for leaf, constant in zip(leaves, constants, strict=True) if constant is None]
        returned = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in returned]
        return [value, *counts, *returned, *(g for g in gradients if g is not None)]

    with (
        untouched(watched := training.watch.watched()),
        inputs.mode,
        inputs.asked() as questions,
        explaining(inputs.mode),
        warnings.catch_warnings(),
        # Without oneDNN, an LSTM is traced as plain operators; oneDNN's LSTM saves tensors for backward only under
        # autograd. Other operators choose oneDNN at run time.
        compat.onednn(False),
    ):
        warnings.filterwarnings("ignore", message=".*_tensor_constant.*")
        with torch.enable_grad():
            traced = compat.trace(forward_backward, inputs.fakes)
        # Autocast and autograd are traced by now; parameters may be written.
        with compat.without_autocast(), torch.no_grad():
            body = functional(traced, [value for part in inputs.fakes for value in part], inputs.mode, follow)
        outputs = replace(found[0], prelude=questions.prelude())
    _restore_random_order(body)
    drop_idle_states(body)
    check_generators(body, watched.generators.values())
    with explaining(inputs.mode):
        return reshape_uncertain_views(body), outputs


def _check_no_backward(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if compat.gradient_of(parameter) is not None:
            raise puts_gradient(name)


# Results of the loss function


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, compat.SYMBOLS):
        raise errors.Unsupported(
            "loss_fn returned a number that it read from a tensor, which has no gradient; it must return the scalar"
            " loss itself, or a pair (loss, aux).\n  Leave out .item(): return loss."
        )
    if not isinstance(loss, Tensor):
        raise errors.Unsupported(
            f"loss_fn returned a {type(loss).__name__}; it must return the scalar loss, or a pair (loss, aux).\n"
            "  For a model that returns an output object, return its loss: lambda model, batch: model(**batch).loss"
        )
    if loss.dim() != 0:
        raise errors.Unsupported(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}; it must be a scalar.\n"
            "  Reduce it in loss_fn, for example with .mean()."
        )
    if not loss.requires_grad:
        raise errors.Unsupported("the loss does not depend on any trainable parameter: nothing to train")
    return loss


FOR_A_CHECKPOINT = (
    "\n  If it is given to torch.utils.checkpoint only so that layers get gradients, pass use_reentrant=False there;"
    " frozen or detached, it would leave them untrained."
)


def _check_is_all_trained(leaves: Iterable[Tensor], stand_ins: StandIns) -> None:
    for tensor in leaves:
        if not compat.is_fake(tensor) and id(tensor) not in stand_ins.by_id:
            raise CaptureFailed(
                f"the loss depends on a tensor of shape {list(tensor.shape)} that requires a gradient and is not the"
                " model's, so that a compiled step would not train it.\n"
                "  If this step trains it too (a criterion or an adapter with parameters), give compile_step one module"
                " of both, nn.ModuleList([model, criterion]): loss_fn is called with that. If it does not (a GAN's"
                " discriminator in the generator's step), freeze it while the step is compiled and called:"
                " discriminator.requires_grad_(False). If no gradient should flow through it, .detach() its output."
                + ("" if isinstance(tensor, nn.Parameter) else FOR_A_CHECKPOINT)
            )


def _gradients(loss: Tensor, seed: Sequence[Tensor] | None, wanted: Sequence[Tensor], *, whole: bool) -> list[Any]:
    """Return the gradients of `wanted`; None for a tensor that the loss does not use.

    `whole` includes gradients from a nested `backward()` (reentrant checkpointing), which `autograd.grad` misses.
    """
    if not whole:
        return list(torch.autograd.grad([loss], wanted, seed, allow_unused=True))
    arrived: list[list[Tensor]] = [[] for _ in wanted]
    for parameter, each in zip(wanted, arrived, strict=True):
        parameter.register_hook(each.append)  # pyright: ignore[reportUnknownMemberType]  # untyped
    torch.autograd.backward([loss], seed)
    return [_as_made(compat.gradient_of(parameter), each) for parameter, each in zip(wanted, arrived, strict=True)]


def _calls_out(loss: Tensor) -> bool:
    """Return whether a backward pass calls an autograd.Function or a C++ autograd function."""
    kinds = set(map(type, compat.nodes_of(loss)))
    return any(kind.__module__ != "builtins" or kind.__name__ == "CppFunction" for kind in kinds)


def _as_made(gradient: Tensor | None, arrived: Sequence[Tensor]) -> Tensor | None:
    """Return the only gradient that a hook received (`arrived`) if `gradient` copies it, else `gradient`."""
    if gradient is None or len(arrived) != 1:
        return gradient
    is_copy = compat.node_of(gradient).all_input_nodes == [compat.node_of(arrived[0])]
    return arrived[0] if is_copy else gradient


def _accumulated(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Give an expanded gradient its own memory, as backward() does for `.grad`."""
    if gradient is None or gradient.layout is not torch.strided or 0 not in gradient.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _check_gradients(named: Mapping[str, Tensor | None]) -> None:
    for name, gradient in named.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise errors.Unsupported(
                f"the gradient of {name!r} is sparse ({gradient.layout}), which cannot be put into a bucket.\n"
                "  Build the layer with sparse=False."
            )


def _constant(leaf: Any) -> Constant | None:
    """Make a constant of an auxiliary leaf; None for a tensor or a symbolic number, which the graph returns.

    Raises Unsupported for other values.
    """
    if isinstance(leaf, Tensor) or compat.is_open(leaf):
        return None
    leaf = compat.as_number(leaf)
    if not is_plain(leaf):
        raise errors.Unsupported(
            f"loss_fn returns a {name_of_class(leaf)} with the loss, which a compiled step would not make again.\n"
            "  Return tensors, numbers, strings and None in tuples, lists and dicts."
        )
    return Constant(leaf)


# The graph

_FRESH = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

_RANDOM_IN_PLACE = {
    torch.ops.aten.bernoulli.p: torch.ops.aten.bernoulli_.float,
    torch.ops.aten.uniform.default: torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_functional.default: torch.ops.aten.normal_.default,
    torch.ops.aten.exponential.default: torch.ops.aten.exponential_.default,
}


def _restore_random_order(body: GraphModule) -> None:
    """Turn functional random fills of fresh tensors back into in-place fills.

    An in-place fill draws in memory order, the functional operator in the order of indices. The orders differ for
    transposed tensors.
    """
    for node in body.graph.nodes:
        if node.target in _RANDOM_IN_PLACE and node.args[0].target in _FRESH and len(node.args[0].users) == 1:
            node.target = _RANDOM_IN_PLACE[node.target]


def check_forward_backward(body: GraphModule, model: nn.Module) -> None:
    """Raise CaptureFailed for new draws in backward, and for reads of kept fakes or kept model parameters."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    outputs: Any = body.graph.output_node().args[0]
    check_draws_again(body, outputs[0])
    traced = [value for node in body.graph.nodes if compat.is_fake(value := node.meta.get("val"))][:1]
    for node in body.graph.nodes:
        if node.op == "get_attr":
            value = getattr(body, str(node.target))
            if compat.is_fake(value) and all(value.fake_mode is not v.fake_mode for v in traced):
                raise errors.CaptureFailed(
                    f"the step reads a tensor of shape {list(value.shape)} that it kept from an earlier trace, which is"
                    " not followed.\n  Keep no tensors in caches inside of loss_fn, or fill them before"
                    " compile_step."
                )
            if (name := parameters.get(id(value))) and value.requires_grad:
                raise errors.CaptureFailed(
                    f"the step reads the parameter {name!r} from a kept tensor and not from the model, which is not"
                    " followed.\n  Reach every parameter through the attributes of the model that loss_fn is given."
                )
