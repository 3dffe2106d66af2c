"""Capture the whole training step: forward, backward and the user's own optimizer, as one flat FX graph.

    loss_fn(model, batch) ─make_fx─► forward and backward, functionalized ─┐
    optimizer.step()      ─make_fx─► one small in-place graph a parameter  ├─► one graph; inputs and gradients labelled
    clip_grad_norm_       ─────────► norm, coefficient, scaled gradients  ─┘

The optimizer stays in place, right behind its gradient: no copies of parameters. Numbers that schedulers change (the
learning rate, momenta, betas, weight decay) are inputs of the graph, so that they stay live without another capture.
"""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat, errors
from fxcomp.capture.faithful import faithful
from fxcomp.capture.fake_mode import StepFakes
from fxcomp.capture.on_fakes import swapped, untouched
from fxcomp.capture.optimizer import check_optimizer, fresh_optimizer, live_numbers, state_keys, with_live
from fxcomp.capture.shared_memory import check_written, distinct, first_places
from fxcomp.capture.training import LossFn, Owned
from fxcomp.capture.untraceable import explaining
from fxcomp.capture.user_collectives import keeping_collectives
from fxcomp.capture.values import is_plain, what_is
from fxcomp.graph.captured import Captured, Constant
from fxcomp.graph.edit import call, clone, must_stay
from fxcomp.graph.functional import functional
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, set_info
from fxcomp.graph.names import free_name
from fxcomp.graph.uncertain_views import reshape_uncertain_views
from fxcomp.graph.work import is_sequence


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    owned: Sequence[Owned],
    *,
    max_grad_norm: float | None = None,
    dynamic_dims: Mapping[int, frozenset[int]] | None = None,
) -> Captured:
    """Trace one training step on fake tensors; nothing of the user's is changed.

    `dynamic_dims` names the dimensions of batch tensors (by leaf index) whose size may vary. Outputs of the graph: the
    loss, then the auxiliary results; buffers and parameters change in place.
    """
    check_optimizer(optimizer)  # its options may have changed since the first capture
    fakes = _Fakes(model, owned, batch, dynamic_dims or {})
    body, layout = _trace_forward_backward(model, loss_fn, owned, fakes)
    if dynamic_dims and _names_a_size(layout.aux, fakes):  # right for these sizes alone
        only = capture(model, loss_fn, optimizer, batch, owned, max_grad_norm=max_grad_norm)
        return replace(only, guard=_fits_nothing_else)
    _check_body(body, model)
    leaves = [(f"batch{path}", leaf) for path, leaf in distinct(batch)]
    check_written(body, [*((repr(name), tensor) for name, tensor, _ in (*fakes.parameters, *fakes.buffers)), *leaves])
    return _assemble(body, layout, optimizer, owned, fakes, max_grad_norm)


class _Fakes:
    """Fake stand-ins for everything that enters the step."""

    def __init__(self, model: nn.Module, owned: Sequence[Owned], batch: Any, dynamic: Mapping[int, frozenset[int]]):
        self.mode = StepFakes()
        # The optimizer's live numbers are symbols too; apart, they are no conditions on the batch's shapes.
        self.update_mode, self.update_shapes = compat.fake_mode()
        self.parameters = [(name, p, self.of(p)) for name, p in model.named_parameters()]
        self.buffers = [(name, b, self.of(b)) for name, b in model.named_buffers()]
        leaves, self.batch_spec = pytree.tree_flatten(batch)
        self.first_places = first_places(leaves)
        self.batch = [
            compat.fake_with_dynamic_dims(self.mode, leaf, dynamic.get(i, frozenset()), f"batch_{i}")
            for i, leaf in enumerate(leaves)
        ]
        self.symbols = compat.symbols(self.batch)
        self.trainable = [owner.name for owner in owned]

    def stand_ins(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """What is traced, by the id of the tensor that it stands for."""
        entries = zip((*self.parameters, *self.buffers), (*parameters, *buffers), strict=True)
        return {id(real): traced for (_, real, _), traced in entries}

    def of(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor, static_shapes=True)

    def of_update(self, tensor: Tensor) -> Tensor:
        return self.update_mode.from_tensor(tensor.detach(), static_shapes=True)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the outputs of the forward and backward graph are."""

    has_aux: bool
    aux_spec: pytree.TreeSpec | None
    aux: tuple[Constant | None, ...]
    gradient_names: tuple[str, ...]
    without_gradient: tuple[str, ...]


def _trace_forward_backward(
    model: nn.Module, loss_fn: LossFn, owned: Sequence[Owned], fakes: _Fakes
) -> tuple[GraphModule, _Layout]:
    layout: list[_Layout] = []
    caches_casts = torch.is_autocast_cache_enabled()

    def forward_backward(parameters: list[Tensor], buffers: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        inside = _named(fakes.parameters, parameters) | _named(fakes.buffers, buffers)
        rules = faithful(inside, caches_casts=caches_casts), keeping_collectives(model)
        stand_ins = fakes.stand_ins(parameters, buffers)
        leaves = [batch[place] for place in fakes.first_places]
        with swapped(model, stand_ins), rules[0], rules[1]:
            loss, aux, has_aux = _split_loss(loss_fn(model, pytree.tree_unflatten(leaves, fakes.batch_spec)))
            value = loss.detach().clone()  # the last operator of the forward pass
            by_name = {name: p for (name, _, _), p in zip(fakes.parameters, parameters, strict=True)}
            # A backward pass is run outside autocast, whatever the forward pass was run in.
            with compat.without_autocast():
                gradients: Any = torch.autograd.grad(loss, [by_name[o.name] for o in owned], allow_unused=True)
        aux_leaves, aux_spec = pytree.tree_flatten(aux)
        named = [(o.name, g) for o, g in zip(owned, gradients, strict=True)]
        _check_gradients(named)
        layout.append(
            _Layout(
                has_aux=has_aux,
                aux_spec=aux_spec if has_aux else None,
                aux=tuple(map(_constant, aux_leaves)),
                gradient_names=tuple(name for name, g in named if g is not None),
                without_gradient=tuple(name for name, g in named if g is None),
            )
        )
        returned = [
            leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in aux_leaves if _constant(leaf) is None
        ]
        return [value, *returned, *(g for g in gradients if g is not None)]

    inputs = ([f for _, _, f in fakes.parameters], [f for _, _, f in fakes.buffers], fakes.batch)
    # oneDNN's LSTM keeps what its backward needs only while autograd runs; without oneDNN it is traced as plain
    # operators. Other operators choose oneDNN when they run.
    outside = untouched(model, loss_fn), warnings.catch_warnings()
    with outside[0], fakes.mode, explaining(fakes.mode), outside[1], compat.without_onednn():
        warnings.filterwarnings("ignore", message=".*_tensor_constant.*")
        with torch.enable_grad():
            traced = compat.trace(forward_backward, inputs)
        flat = [value for part in inputs for value in part]
        # What autocast does is in the trace by now, and so is what autograd does: a parameter may be written.
        with compat.without_autocast(), torch.no_grad():
            body = functional(traced, flat)
    _restore_random_order(body)
    return reshape_uncertain_views(body), layout[0]


def _named(entries: Sequence[tuple[str, Tensor, Tensor]], traced: Sequence[Tensor]) -> dict[int, str]:
    return {id(tensor): name for (name, _, _), tensor in zip(entries, traced, strict=True)}


_FRESH = (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

_RANDOM_IN_PLACE = {
    torch.ops.aten.bernoulli.p: torch.ops.aten.bernoulli_.float,
    torch.ops.aten.uniform.default: torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_functional.default: torch.ops.aten.normal_.default,
    torch.ops.aten.exponential.default: torch.ops.aten.exponential_.default,
}


def _restore_random_order(body: GraphModule) -> None:
    """Fill fresh tensors with random numbers in place again, as eager does.

    The functional operator makes a contiguous result; in place, numbers go in the order of memory. For a transposed
    tensor the same draws then land elsewhere, and a dropout mask would not be eager's.
    """
    for node in body.graph.nodes:
        if node.target in _RANDOM_IN_PLACE and node.args[0].target in _FRESH and len(node.args[0].users) == 1:
            node.target = _RANDOM_IN_PLACE[node.target]


def _constant(leaf: Any) -> Constant | None:
    """A leaf of the auxiliary result that is always the same for this capture; None if the graph returns it.

    What follows from sizes that may vary is returned. Raises for what can be neither.
    """
    if isinstance(leaf, Tensor) or compat.is_open(leaf):
        return None
    leaf = compat.as_number(leaf)
    if not is_plain(leaf):
        raise errors.UnsupportedResult(
            f"loss_fn returns a {what_is(leaf)} beside the loss, which a compiled step would not make again.\n"
            "  Return tensors, numbers, strings and None in tuples, lists and dicts."
        )
    return Constant(leaf)


def _names_a_size(aux: Sequence[Constant | None], fakes: _Fakes) -> bool:
    """Whether a text of the auxiliary result was made of a size that may vary: it holds the symbol's name."""
    texts = [constant.value for constant in aux if constant is not None and isinstance(constant.value, str)]
    return any(symbol in text for text in texts for symbol in fakes.symbols)


def _fits_nothing_else(_: Sequence[Tensor]) -> bool:
    return False


def _split_loss(result: Any) -> tuple[Tensor, Any, bool]:
    parts: Any = result
    has_aux = isinstance(result, tuple) and len(parts) == 2
    loss, aux = parts if has_aux else (parts, ())
    if not isinstance(loss, Tensor):
        raise errors.LossNotScalar(
            f"loss_fn returned a {type(loss).__name__}; it must return the scalar loss, or a pair (loss, aux).\n"
            "  For a model that returns an output object, return its loss: lambda model, batch: model(**batch).loss"
        )
    if loss.dim() != 0:
        raise errors.LossNotScalar(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}; it must be a scalar.\n"
            "  Reduce it in loss_fn, for example with .mean()."
        )
    if not loss.requires_grad:
        raise errors.LossNotScalar("the loss does not depend on any trainable parameter: nothing to train")
    return loss, aux, has_aux


def _check_gradients(named: Sequence[tuple[str, Tensor | None]]) -> None:
    for name, gradient in named:
        if gradient is not None and gradient.layout is not torch.strided:
            raise errors.UnsupportedParameter(
                f"the gradient of {name!r} is sparse ({gradient.layout}), which cannot be put into a bucket.\n"
                "  Build the layer with sparse=False."
            )


def _check_body(body: GraphModule, model: nn.Module) -> None:
    """Refuse what traces, but would train wrongly."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    outputs: Any = body.graph.output_node().args[0]
    loss = outputs[0]  # its last operator ends the forward pass
    seen_loss = False
    for node in body.graph.nodes:
        if node.op == "get_attr":
            value = getattr(body, str(node.target))
            if getattr(value, "requires_grad", False):
                name = parameters.get(id(value), str(node.target))
                raise errors.CaptureFailed(
                    f"the step reads the parameter {name!r} from outside the model, so that it would stay at its"
                    " present value.\n  Reach every parameter through the model's own attributes."
                )
        if seen_loss and compat.draws(node):
            raise errors.RandomRecomputation(
                f"the backward pass draws random numbers ({node.target}): activation checkpointing around dropout.\n"
                "  Its recomputation would draw other numbers than the forward pass drew, and gradients would be"
                " wrong without a sign.\n  Switch checkpointing off for blocks with dropout, or set their dropout to 0."
            )
        seen_loss = seen_loss or node is loss


def _trace_update(optimizer: torch.optim.Optimizer, owner: Owned, keys: Sequence[str], fakes: _Fakes) -> GraphModule:
    """Trace one parameter's update, in place. Inputs: parameter, gradient, state tensors, live numbers.

    Never the fused operator, which takes numbers as constants. Its state fits the plain operators: a counter of steps
    on the device needs those that do not ask the device for its value.
    """
    group = optimizer.param_groups[owner.group]
    numbers = live_numbers(group)
    state = optimizer.state[owner.parameter]

    counts_on_device = any(state[key].dim() == 0 and state[key].device.type != "cpu" for key in keys)
    plain: dict[str, Any] = {"foreach": False, "fused": False}
    plain |= {"capturable": True} if "capturable" in group and counts_on_device else {}

    shadow = fresh_optimizer(optimizer, group, nn.Parameter(torch.zeros(1)))

    def update(parameter: Tensor, gradient: Tensor, tensors: list[Tensor], live: list[Any]) -> tuple[()]:
        options = with_live(group, dict(zip(numbers, live, strict=True)))
        shadow.param_groups[0].update(options | plain, params=[parameter])
        shadow.state.clear()
        shadow.state[parameter] = {**state, **dict(zip(keys, tensors, strict=True))}
        parameter.grad = gradient
        with torch.no_grad():
            shadow.step()
        return ()

    parameter = fakes.of_update(owner.parameter)
    tensors = [fakes.of_update(state[key]) for key in keys]
    with fakes.update_mode, compat.without_locations():
        symbols = [
            compat.live_number(fakes.update_shapes, value, f"{owner.group}.{key}") for key, value in numbers.items()
        ]
        traced = compat.trace(update, (parameter, torch.empty_like(parameter), tensors, symbols))
    _check_live(traced, list(numbers), owner)
    return traced


def _check_live(traced: GraphModule, numbers: Sequence[str], owner: Owned) -> None:
    """Refuse an update that ignores one of the live numbers, its last inputs: it would keep today's value for ever."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for key, node in zip(reversed(numbers), reversed(inputs), strict=False):
        if not node.users:
            raise errors.UnsupportedOptimizer(
                f"the update of {owner.name!r} was traced with {key} of parameter group {owner.group} as a constant, so"
                " that a schedule would be ignored.\n  Build the optimizer with its default implementation: without"
                " fused, foreach and capturable."
            )


def _resized(before: Tensor, piece: GraphModule, after: Tensor) -> GraphModule | None:
    """An update that was traced for one parameter as it is for another: these optimizers work value by value.

    None where that is not plain to see: a shape among the arguments, a value of another shape, gaps in memory.
    """
    if before.dim() == 0 or after.dim() == 0 or not before.is_contiguous() or not after.is_contiguous():
        return None
    resized = clone(piece)
    for node in resized.graph.nodes:
        value = node.meta.get("val")
        if any(is_sequence(argument) for argument in node.args) and node.op != "output":
            return None
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != before.shape or not value.is_contiguous():
                return None
            node.meta["val"] = after if value.dtype is after.dtype else torch.empty_like(after, dtype=value.dtype)
    return resized


def _clip(
    graph: Graph, gradients: Sequence[Node], parameters: Sequence[Tensor], max_norm: float, fakes: _Fakes
) -> list[Node]:
    """Clip by the global norm: the operators that tracing torch.nn.utils.clip_grad_norm_ gives, without tracing it.

    They are the same for every gradient, and tracing hundreds of them took a fifth of what the whole step took.
    """
    aten, label = torch.ops.aten, NodeInfo(Role.CLIP)
    device = parameters[0].device
    with fakes.update_mode:
        one = torch.empty((), device=device)
        all_norms = torch.empty(len(gradients), device=device)
        likenesses = dict.fromkeys((p.shape, p.stride()) for p in parameters)
        values = {key: torch.empty_like(torch.empty_strided(*key, device=device)) for key in likenesses}

    def norm_of(node: Node) -> Node:
        return call(graph, aten.linalg_vector_norm.default, (node, 2.0), label, name="linalg_vector_norm", value=one)

    norms = [norm_of(gradient) for gradient in gradients]
    total = norm_of(call(graph, aten.stack.default, (norms,), label, name="stack", value=all_norms))
    above_zero = call(graph, aten.add.Tensor, (total, 1e-6), label, name="add", value=one)
    inverse = call(graph, aten.reciprocal.default, (above_zero,), label, name="reciprocal", value=one)
    factor = call(graph, aten.mul.Tensor, (inverse, max_norm), label, name="mul", value=one)
    factor = call(graph, aten.clamp.default, (factor, None, 1.0), label, name="clamp", value=one)
    return [
        call(graph, aten.mul.Tensor, (gradient, factor), label, name="mul", value=values[p.shape, p.stride()])
        for gradient, p in zip(gradients, parameters, strict=True)
    ]


# One graph

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operators that mean something to autograd alone."""


def _assemble(
    body: GraphModule,
    layout: _Layout,
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Owned],
    fakes: _Fakes,
    max_grad_norm: float | None,
) -> Captured:
    builder = _Builder(body)
    owners = {owner.name: owner for owner in owned}

    parameters = {
        name: builder.input(name, fake, Source(InputKind.PARAMETER, name)) for name, _, fake in fakes.parameters
    }
    buffers = [builder.input(name, fake, Source(InputKind.BUFFER, name)) for name, _, fake in fakes.buffers]
    states: dict[str, list[Node]] = {}
    for name in layout.gradient_names:
        owner = owners[name]
        states[name] = [
            builder.input(
                f"{name}_{key}", fakes.of(optimizer.state[owner.parameter][key]), Source(InputKind.STATE, name, key)
            )
            for key in state_keys(optimizer, owner.parameter)
        ]
    numbers = {
        index: [
            builder.input(
                f"{key}_{index}" if len(optimizer.param_groups) > 1 else key,
                number,
                Source(InputKind.HYPER, key=key, index=index),
            )
            for key, number in live_numbers(group).items()
        ]
        for index, group in enumerate(optimizer.param_groups)
    }
    batch = [builder.input(f"batch_{i}", fake, Source(InputKind.BATCH, index=i)) for i, fake in enumerate(fakes.batch)]

    tensors = 1 + layout.aux.count(None)  # the loss and the auxiliary results
    outputs = builder.splice(body, [*parameters.values(), *buffers, *batch], Role.COMPUTE)
    loss_and_aux, gradients = outputs[:tensors], outputs[tensors:]
    gradients = [builder.mark_gradient(node, name) for node, name in zip(gradients, layout.gradient_names, strict=True)]

    if max_grad_norm is not None and gradients:
        reduced = [owners[name].parameter for name in layout.gradient_names]
        clipped = _clip(builder.graph, gradients, reduced, max_grad_norm, fakes)
    else:
        clipped = gradients

    traced: dict[Any, GraphModule] = {}
    first_of: dict[Any, tuple[Tensor, GraphModule]] = {}
    for name, gradient in zip(layout.gradient_names, clipped, strict=True):
        owner = owners[name]
        keys = state_keys(optimizer, owner.parameter)
        likeness = (owner.group, owner.parameter.shape, owner.parameter.stride(), keys)
        if likeness not in traced:
            of_group = first_of.get((owner.group, keys))
            known = _resized(*of_group, fakes.of_update(owner.parameter)) if of_group else None
            traced[likeness] = known or _trace_update(optimizer, owner, keys, fakes)
            first_of.setdefault((owner.group, keys), (owner.parameter, traced[likeness]))
        inputs = [parameters[name], gradient, *states[name], *numbers[owner.group]]
        builder.splice(traced[likeness], inputs, Role.UPDATE, parameter=name)

    builder.output(loss_and_aux)
    return Captured(
        graph=builder.finish(),
        aux_spec=layout.aux_spec,
        aux=layout.aux,
        has_aux=layout.has_aux,
        gradient_names=layout.gradient_names,
        without_gradient=layout.without_gradient,
        guard=compat.shape_guard(fakes.mode.shapes, fakes.batch),
    )


class _Builder:
    """Copies traced pieces into one graph."""

    def __init__(self, body: GraphModule):
        self.root = body
        self.graph = Graph()

    def input(self, name: str, value: Any, source: Source) -> Node:
        clean = free_name(re.sub(r"\W", "_", name))
        node = self.graph.placeholder(f"_{clean}" if clean[0].isdigit() else clean)
        node.meta["val"] = value
        return set_info(node, NodeInfo(Role.INPUT, parameter=source.name or None, source=source))

    def splice(
        self, piece: GraphModule, inputs: Sequence[Node], role: Role, *, parameter: str | None = None
    ) -> list[Node]:
        """Copy a piece's nodes behind what is there; returns what its output names."""
        supplied = iter(inputs)
        copies: dict[Node, Node] = {}
        for node in piece.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(supplied)
            elif node.op == "output":
                return [copies[value] for value in pytree.tree_leaves(node.args[0])]
            elif node.target in _ALIASES:
                copies[node] = copies[node.args[0]]
            elif not compat.is_profiler(node.target):
                copy = compat.append_copy(self.graph, node, copies, free_name(node.name))
                if node.op == "get_attr":
                    copy.target = self._adopt(getattr(piece, str(node.target)))
                label = Role.EXCHANGE if compat.communicates(node.target) else role
                copies[node] = set_info(copy, NodeInfo(label, parameter=parameter))
        raise AssertionError("a traced piece has no output")

    def _adopt(self, constant: Tensor) -> str:
        """Keep a constant of the step under a name of its own."""
        name = next(free for i in count() if not hasattr(self.root, free := f"constant_{i}"))
        setattr(self.root, name, constant)
        return name

    def mark_gradient(self, node: Node, parameter: str) -> Node:
        """Label the node that makes a gradient; one that others use too, or an input, gets an alias of its own."""
        known: NodeInfo = node.meta["fxcomp"]
        if known.role is not Role.COMPUTE or node.users:
            with self.graph.inserting_after(node if node.op != "placeholder" else self._last_input()):
                alias = self.graph.call_function(torch.ops.aten.alias.default, (node,))
            alias.meta["val"] = node.meta["val"]
            node = alias
        return set_info(node, NodeInfo(Role.GRADIENT, parameter=parameter))

    def _last_input(self) -> Node:
        return [node for node in self.graph.nodes if node.op == "placeholder"][-1]

    def output(self, values: Sequence[Node]) -> None:
        set_info(self.graph.output((values[0], tuple(values[1:]))), NodeInfo(Role.OUTPUT))

    def finish(self) -> GraphModule:
        self.graph.eliminate_dead_code(must_stay)
        module = compat.graph_module(self.root, self.graph, "TrainingStep")
        module.graph.lint()
        return module
