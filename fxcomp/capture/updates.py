"""Make the graph pieces after the gradients: clipping, and each parameter's update by the user's own optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat, errors
from fxcomp.capture.optimizer import Owned, fresh_optimizer, live_numbers, state_keys, step_alone, with_live
from fxcomp.capture.step_inputs import StepInputs
from fxcomp.graph.edit import call, clone
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.work import is_sequence


class UpdateTraces:
    """The traced updates of one optimizer; parameters that are alike share one."""

    def __init__(self, optimizer: torch.optim.Optimizer, inputs: StepInputs):
        self._optimizer, self._inputs = optimizer, inputs
        self._traced: dict[Any, GraphModule] = {}
        self._first_of: dict[Any, tuple[Tensor, GraphModule]] = {}
        """By group and state: a parameter and its update, to be resized for others."""

    def of(self, owner: Owned) -> GraphModule:
        """The update of a parameter."""
        parameter, keys = owner.parameter, state_keys(self._optimizer, owner.parameter)
        likeness = (owner.group, parameter.shape, parameter.stride(), keys)
        if likeness not in self._traced:
            first = self._first_of.get((owner.group, keys))
            known = resized_update(*first, self._inputs.of_update(parameter)) if first else None
            self._traced[likeness] = known or trace_update(self._optimizer, owner, keys, self._inputs)
            self._first_of.setdefault((owner.group, keys), (parameter, self._traced[likeness]))
        return self._traced[likeness]


def trace_update(
    optimizer: torch.optim.Optimizer, owner: Owned, keys: Sequence[str], inputs: StepInputs
) -> GraphModule:
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
        options = with_live(group, dict(zip(numbers, live, strict=True))) | plain
        parameter.grad = gradient
        with torch.no_grad():
            step_alone(shadow, parameter, options, {**state, **dict(zip(keys, tensors, strict=True))})
        return ()

    parameter = inputs.of_update(owner.parameter)
    tensors = [inputs.of_update(state[key]) for key in keys]
    with inputs.update_mode, compat.without_locations():
        symbols = [
            compat.live_number(inputs.update_shapes, value, f"{owner.group}.{key}") for key, value in numbers.items()
        ]
        traced = compat.trace(update, (parameter, torch.empty_like(parameter), tensors, symbols))
    _check_live(traced, list(numbers), owner)
    return traced


def _check_live(traced: GraphModule, numbers: Sequence[str], owner: Owned) -> None:
    """Refuse an update that ignores one of the live numbers, its last inputs: its value would never change."""
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for key, node in zip(reversed(numbers), reversed(placeholders), strict=False):
        if not node.users:
            raise errors.UnsupportedOptimizer(
                f"the update of {owner.name!r} was traced with {key} of parameter group {owner.group} as a constant, so"
                " that a schedule would be ignored.\n  Build the optimizer with its default implementation: without"
                " fused, foreach and capturable."
            )


def resized_update(before: Tensor, piece: GraphModule, after: Tensor) -> GraphModule | None:
    """Reuse one parameter's traced update for another shape; these optimizers are elementwise.

    Returns None where that is not plain to see: a shape among the arguments, a value of another shape, gaps in memory.
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


def clip(
    graph: Graph, gradients: Sequence[Node], parameters: Sequence[Tensor], max_norm: float, inputs: StepInputs
) -> list[Node]:
    """Clip by the global norm: the operators that tracing torch.nn.utils.clip_grad_norm_ gives.

    Tracing it for hundreds of gradients took a fifth of the whole capture.
    """
    aten, label = torch.ops.aten, NodeInfo(Role.CLIP)
    device = parameters[0].device
    with inputs.update_mode:
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
