"""Capture the whole training step: forward, backward and the user's own optimizer, as one flat FX graph.

    loss_fn(model, batch) ─make_fx─► forward and backward, functionalized ─┐
    optimizer.step()      ─make_fx─► a small in-place graph per parameter  ├─► one graph; inputs and gradients labelled
    clip_grad_norm_       ─────────► norm, coefficient, scaled gradients  ─┘

Each in-place update follows its gradient, so parameters are not copied.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.capture.batch_type import check_model, check_written
from fxcomp.capture.fake_mode import FIXED_SIZES, StepInputs, Varying
from fxcomp.capture.forward_backward import Outputs, check_forward_backward, trace_forward_backward
from fxcomp.capture.fused import fused_update_of
from fxcomp.capture.optimizer import check_optimizer, live_numbers, state_tensors
from fxcomp.capture.training import Training
from fxcomp.capture.updates import UpdateTraces, clip, clip_by_value
from fxcomp.capture.watch import Place
from fxcomp.errors import CaptureFailed
from fxcomp.gc_paused import gc_paused
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import call, must_stay
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, free_name, set_info, update_info
from fxcomp.graph.ops import RNG_STATE, SEED_RNG, SET_RNG_STATE

_AUTOGRAD_ONLY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def assemble(body: GraphModule, outputs: Outputs, training: Training, inputs: StepInputs) -> Captured:
    """Join forward, backward, clipping and updates."""
    builder = GraphBuilder(body)
    owners = training.owners
    unused = tuple(n for n in owners if n not in outputs.gradient_names) if training.finds_unused else ()
    names = tuple(n for n in owners if n in outputs.gradient_names or n in unused)  # the same order on all ranks

    parameters = {
        name: builder.input(name, fake, Source(InputKind.PARAMETER, name)) for name, _, fake in inputs.parameters
    }
    buffers = [builder.input(name, fake, Source(InputKind.BUFFER, name)) for name, _, fake in inputs.buffers]
    for name in names:
        update_info(parameters[name], fused=fused_update_of(owners[name]))
    states: dict[str, list[Node]] = {}
    counts: dict[str, list[Node]] = {}
    for name in names:
        state = owners[name].state
        kept = {key: inputs.of(value) for key, value in state_tensors(state).items()}
        states[name] = [
            builder.input(f"{name}_{key}", value, Source(InputKind.STATE, name, key)) for key, value in kept.items()
        ]
        counts[name] = [
            builder.input(f"{name}_{key}", float(state[key]), Source(InputKind.STATE, name, key))
            for key in training.habits[owners[name].group].counters
        ]
    numbers: list[list[Node]] = []
    for index, group in enumerate(training.groups):
        suffix = f"_{index}" if len(training.groups) > 1 else ""
        numbers.append([
            builder.input(f"{key}{suffix}", number, Source(InputKind.HYPER, key=key, index=index))
            for key, number in live_numbers(group).items()
        ])  # fmt: skip
    batch = [builder.input(f"batch_{i}", fake, Source(InputKind.BATCH, index=i)) for i, fake in enumerate(inputs.batch)]

    scale = [builder.input("scale", fake, Source(InputKind.SCALE)) for fake in inputs.scale]

    live = [
        builder.input(name, number, Source(InputKind.BATCH, key=name, index=len(batch) + i))
        for i, (name, number) in enumerate(zip(inputs.live, inputs.numbers, strict=True))
    ]

    results = builder.splice(body, [*parameters.values(), *buffers, *batch, *scale, *live], Role.COMPUTE)
    if outputs.is_weighted:
        builder.add_count(results.pop(1))
    returned = 1 + outputs.aux.count(None)  # the loss and the auxiliary results
    times = Counter(results)
    made = {
        name: builder.mark_gradient(node, name, is_shared=times[node] > 1)
        for node, name in zip(results[returned:], outputs.gradient_names, strict=True)
    }
    made |= {name: builder.no_gradient(parameters[name], results[0], name) for name in unused}
    gradients = [made[name] for name in names]
    if training.max_grad_norm is not None and gradients:
        reduced = [owners[name].parameter for name in names]
        gradients = clip(builder.graph, gradients, reduced, training.max_grad_norm, inputs)

    updates = UpdateTraces(training, inputs)
    for name, gradient in zip(names, gradients, strict=True):
        if training.max_grad_value is not None:
            gradient = clip_by_value(builder.graph, gradient, owners[name], training.max_grad_value, inputs)
        arguments = [parameters[name], gradient, *states[name], *numbers[owners[name].group], *counts[name]]
        builder.splice(updates.of(owners[name]), arguments, Role.UPDATE, parameter=name)

    builder.output(results[:returned])
    return Captured(
        graph=builder.finish(),
        aux_spec=outputs.aux_spec,
        aux=outputs.aux,
        has_aux=outputs.has_aux,
        gradient_names=names,
        without_gradient=() if training.finds_unused else outputs.without_gradient,
        guard=compat.shape_guard(inputs.mode.shapes, inputs.batch),
        is_weighted=outputs.is_weighted,
        densified=outputs.densified,
        unused=unused,
        prelude=outputs.prelude,
        live=tuple(inputs.live),
    )


def _role(node: Node, others: Role) -> Role:
    if node.target in (RNG_STATE, SET_RNG_STATE, SEED_RNG):
        return Role.RANDOM_STATE
    return Role.EXCHANGE if compat.communicates(node.target) else others


class GraphBuilder:
    """Builder that appends inputs and traced graphs to one graph."""

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
        """Append the nodes of a traced graph. Return the copies of its results."""
        supplied = iter(inputs)
        copies: dict[Node, Node] = {}
        for node in piece.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(supplied)
            elif node.op == "output":
                return [copies[value] for value in pytree.tree_leaves(node.args[0])]
            elif node.target in _AUTOGRAD_ONLY:
                copies[node] = copies[node.args[0]]
            elif not compat.is_profiler(node.target):
                copy = compat.append_copy(self.graph, node, copies, free_name(node.name))
                if node.op == "get_attr":
                    copy.target = self._adopt(getattr(piece, str(node.target)))
                copies[node] = set_info(copy, NodeInfo(_role(node, role), parameter=parameter))
        raise AssertionError("a traced piece has no output")

    def _adopt(self, constant: Tensor) -> str:
        name = next(free for i in count() if not hasattr(self.root, free := f"constant_{i}"))
        setattr(self.root, name, constant)
        return name

    def mark_gradient(self, node: Node, parameter: str, *, is_shared: bool) -> Node:
        """Label a gradient's node, or an alias if the node is an input or has other users.

        `is_shared`: several parameters have this node as their gradient, as when the loss uses only their sum.
        """
        known: NodeInfo = node.meta["fxcomp"]
        if known.role is not Role.COMPUTE or node.users or is_shared:
            with self.graph.inserting_after(node if node.op != "placeholder" else self._last_input()):
                alias = self.graph.call_function(torch.ops.aten.alias.default, (node,))
            alias.meta["val"] = node.meta["val"]
            node = alias
        return set_info(node, NodeInfo(Role.GRADIENT, parameter=parameter))

    def add_count(self, count: Node) -> None:
        """Add a batch's count to the count of earlier micro-batches."""
        with self.graph.inserting_after(self._last_input()):
            so_far = self.input("count", count.meta["val"], Source(InputKind.COUNT))
        with self.graph.inserting_after(count if count.op != "placeholder" else so_far):
            what = torch.ops.aten.add_.Tensor, (so_far, count), NodeInfo(Role.COMPUTE)
            call(self.graph, *what, name="counted", value=count.meta["val"])

    def no_gradient(self, of: Node, loss: Node, parameter: str) -> Node:
        """Insert zeros after the loss, as the gradient of an unused parameter."""
        with self.graph.inserting_after(loss if loss.op != "placeholder" else self._last_input()):
            what = torch.ops.aten.zeros_like.default, (of,), NodeInfo(Role.GRADIENT, parameter)
            return call(self.graph, *what, value=torch.empty_like(of.meta["val"]))

    def _last_input(self) -> Node:
        return [node for node in self.graph.nodes if node.op == "placeholder"][-1]

    def output(self, values: Sequence[Node]) -> None:
        """End the graph: the loss, then the auxiliary results."""
        set_info(self.graph.output((values[0], tuple(values[1:]))), NodeInfo(Role.OUTPUT))

    def finish(self) -> GraphModule:
        self.graph.eliminate_dead_code(must_stay)
        module = compat.graph_module(self.root, self.graph, "TrainingStep")
        module.graph.lint()
        return module


def same_with_numbers(
    symbolic: GraphModule, results: Sequence[Any], plain: GraphModule, expected: Sequence[Any]
) -> bool:
    """Return whether a graph traced with symbols, and its results, equal a trace with numbers.

        isinstance(rows.shape[0], int)     False for a symbol: the other branch is traced
        cache.get(str(rows.shape[0]))      "s0" is no key

    If the graphs differ in more than the form of sizes, the step is captured without symbols.
    """
    nodes, others = ([node for node in gm.graph.nodes if not _is_size(node)] for gm in (symbolic, plain))
    if len(nodes) != len(others) or len(results) != len(expected):
        return False
    places = {node: place for each in (nodes, others) for place, node in enumerate(each)}

    def written(value: Any) -> Any:
        """Return an argument with numbers for symbols and indices for nodes."""
        if isinstance(value, Node):
            return ("node", places[value]) if value in places else compat.hint(value.meta["val"])
        return compat.hint(value) if isinstance(value, compat.SYMBOLS) else value

    def same(node: Node, other: Node) -> bool:
        if node.op != other.op:
            return False
        if node.op in ("placeholder", "output"):
            return True
        if node.op == "get_attr":
            return _same_constant(getattr(symbolic, str(node.target)), getattr(plain, str(other.target)))
        arguments = [
            pytree.tree_leaves((each.args, each.kwargs), is_leaf=lambda value: value is None) for each in (node, other)
        ]
        if node.target != other.target or len(arguments[0]) != len(arguments[1]):
            return False
        return all(_same_number(written(a), written(b)) for a, b in zip(*arguments, strict=True))

    pairs = [(written(a), written(b)) for a, b in zip(results, expected, strict=True)]
    return all(map(same, nodes, others)) and all(_same_number(a, b) for a, b in pairs)


def _is_size(node: Node) -> bool:
    """Return whether a node computes a symbolic size or live float, which a trace with numbers lacks."""
    value = node.meta.get("val")
    is_value = node.op in ("placeholder", "call_function")
    return is_value and isinstance(value, compat.SYMBOLS) and not compat.unbacked_symbols(value)


def _same_constant(mine: Any, other: Any) -> bool:
    if isinstance(mine, GraphModule) and isinstance(other, GraphModule):
        return same_with_numbers(mine, (), other, ())
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return type(mine) is type(other)
    with compat.plain_values():
        return mine is other or (mine.dtype is other.dtype and mine.equal(other))


def _same_number(mine: Any, other: Any) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=1e-12) or (mine != mine and other != other)
    return type(mine) is type(other) and mine == other


_ONE_AT_A_TIME = threading.RLock()
"""Held while capturing: tracing replaces names and methods process-wide."""


@gc_paused()
def capture(training: Training, batch: Any, varying: Varying = FIXED_SIZES) -> Captured:
    """Trace one training step on fake tensors without changing the user's objects.

    Outputs: the loss, then auxiliary results; buffers and parameters change in place. Raises CaptureFailed if sizes
    cannot vary.
    """
    with _ONE_AT_A_TIME:
        live = training.watch.live
        try:
            return _capture(training, batch, varying, live)
        except Exception:  # perhaps raised only because a live float is a symbol
            if not live:
                raise
            captured = _capture(training, batch, varying, {})  # raises if live floats are not the cause
            training.watch.keep_constant(live)
            return captured


def _capture(training: Training, batch: Any, varying: Varying, live: Mapping[str, Place]) -> Captured:
    for optimizer in training.optimizers:
        check_optimizer(optimizer)  # options may have changed
    check_model(training.model)  # buffers may have been replaced
    inputs = StepInputs(training, batch, varying, live)
    body, outputs = trace_forward_backward(training, inputs)
    if varying or live:
        if names := inputs.decided:
            training.watch.keep_constant(names)
            return _capture(training, batch, varying, {n: place for n, place in live.items() if n not in names})
        if varying and not inputs.symbols:
            raise CaptureFailed("the step makes a number of every size that varies; it is captured for each size alone")
        _check_symbols(body, outputs, *trace_forward_backward(training, StepInputs(training, batch, FIXED_SIZES)))
    check_forward_backward(body, training.model)
    check_written(body, inputs.named)
    return assemble(body, outputs, training, inputs)


def _check_symbols(body: GraphModule, outputs: Outputs, plain: GraphModule, told: Outputs) -> None:
    if not same_with_numbers(body, outputs.results_of(body), plain, told.results_of(plain)):
        raise CaptureFailed(
            "the step treats sizes that are symbols in another way than numbers, by their type or as text.\n"
            "  It can be captured for each size alone."
        )
