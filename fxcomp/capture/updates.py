"""Build the graph's part after the gradients: clipping, and each parameter's update by the user's own optimizer.

A traced update is compared with the optimizer's own, because live numbers (hyper-parameters as inputs) must not become
constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxcomp import compat, errors
from fxcomp.capture.fake_mode import StepInputs
from fxcomp.capture.optimizer import Owned, is_torchs, live_numbers, refused, state_tensors, with_live
from fxcomp.capture.probe import Draws, Habits, copied, named, probe_options, stepped
from fxcomp.capture.random_state import refusing_generators
from fxcomp.capture.shadow import plain_options, shadow_of, step_alone, unseen
from fxcomp.capture.training import Training
from fxcomp.graph.edit import call, clone
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.work import is_sequence

KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizer classes that need no check if the traced update uses every live number."""

_CHANGE = 0.75
"""Factor by which the check changes live numbers, such as the learning rate."""

_LATER = 7
"""Increase of counters for the check, in steps."""

_RELATIVE = 1e-5
"""Tolerance relative to the largest element: traced arithmetic may round differently."""


def check_decisions(owner: Owned, decisions: Sequence[tuple[str, bool]]) -> None:
    """Raise Unsupported if a user's optimizer branches on a live number. Tests of a number's sign are allowed."""
    for text, is_sign in decisions:
        if not is_sign and not is_torchs(owner.optimizer):
            raise refused(
                owner.optimizer,
                f"decides by a number that changes ({text}) while it updates {owner.name!r}, and a graph has one way",
                "Use torch.where with a tensor in the state",
            )


def check_update(traced: GraphModule, owner: Owned, habits: Habits, numbers: Mapping[str, float]) -> None:
    """Raise Unsupported if a traced update differs from the optimizer's own after live numbers change."""
    unused = _without_users(traced, len(numbers) + len(habits.counters))
    if (type(owner.optimizer) in KNOWN and not unused) or owner.parameter.is_meta:
        return
    with unseen():
        trial = _Trial(traced, owner, habits, numbers)
        if trial.agrees({key: value * _CHANGE for key, value in numbers.items()}, _LATER):
            return
        if habits.counters and not trial.agrees(numbers, _LATER):
            raise refused(
                owner.optimizer,
                f"was traced with {', '.join(map(repr, habits.counters))} of the state of {owner.name!r} as a constant",
                "Keep it in a tensor, or use it without float() and math functions: x ** 0.5 is followed",
            )
        for key, value in numbers.items():
            if not trial.agrees({**numbers, key: value * _CHANGE}, 0):
                raise errors.Unsupported(
                    f"the update of {owner.name!r} was traced with {key} of parameter group {owner.group} as a"
                    " constant, so that a schedule would be ignored.\n  Let the optimizer's step use it as it is,"
                    " without float() or math functions."
                )
        raise refused(owner.optimizer, f"does something to {owner.name!r} that its trace does not")


def _without_users(traced: GraphModule, last: int) -> list[str]:
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return [node.name for node in placeholders[len(placeholders) - last :] if not node.users]


class _Trial:
    def __init__(self, traced: GraphModule, owner: Owned, habits: Habits, numbers: Mapping[str, float]):
        self._traced, self._owner, self._habits, self._numbers = traced, owner, habits, numbers
        self._shadow = shadow_of(owner.optimizer)
        draw = Draws(owner.parameter)
        self._gradient = draw()
        self._value = draw(0.1)
        self._state: dict[str, Any] = copied(owner.state)
        for _ in range(2):  # zero states would hide differences
            self._value, self._state = stepped(self._shadow, probe_options(owner), self._value, draw(), self._state)

    def agrees(self, numbers: Mapping[str, float], later: int) -> bool:
        """Return whether the traced update equals the optimizer's, for `numbers` and counters `later` steps ahead."""
        counters = self._habits.counters
        state = copied(self._state)
        state |= {key: state[key] + later * growth for key, growth in counters.items()}
        given = copied(state)
        value = self._value.clone()
        counts = [float(given[key]) for key in counters]
        live = [numbers[key] for key in self._numbers]
        Interpreter(self._traced).run(
            value, self._gradient.clone(), *state_tensors(given).values(), *live, *counts, enable_io_processing=False
        )
        options = plain_options(with_live(self._owner.options, numbers))
        expected, own = stepped(self._shadow, options, self._value, self._gradient, state)
        tensors = state_tensors(own)
        return _are_close(value, expected) and all(_are_close(given[key], tensors[key]) for key in tensors)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(other.abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=_RELATIVE, atol=_RELATIVE * largest, equal_nan=True))


class UpdateTraces:
    """Traced updates of a step, shared by similar parameters."""

    def __init__(self, training: Training, inputs: StepInputs):
        self._training, self._inputs = training, inputs
        self._traced: dict[Any, GraphModule] = {}
        self._first_of: dict[Any, tuple[Tensor, GraphModule]] = {}
        """First parameter for each group, state keys and dtype, and its update, which is resized for other shapes."""

    def of(self, owner: Owned) -> GraphModule:
        parameter, keys = owner.parameter, tuple(state_tensors(owner.state))
        kind = owner.group, keys, parameter.dtype
        likeness = (*kind, parameter.shape, parameter.stride())
        if likeness not in self._traced:
            first = self._first_of.get(kind) if type(owner.optimizer) in ELEMENTWISE else None
            known = resized_update(*first, self._inputs.of_update(parameter)) if first else None
            self._traced[likeness] = known or trace_update(owner, self._training.habits[owner.group], self._inputs)
            self._first_of.setdefault(kind, (parameter, self._traced[likeness]))
        return self._traced[likeness]


ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "Adamax", "Rprop")
)
"""Classes whose updates do not depend on the parameter's shape."""


def trace_update(owner: Owned, habits: Habits, inputs: StepInputs) -> GraphModule:
    """Trace one parameter's in-place update. Inputs: parameter, gradient, state tensors, live numbers, counters.

    Fused operators are off: they would make numbers constants. A step counter on the device needs the capturable
    variant, which does not read the counter on the host.
    """
    numbers, state = live_numbers(owner.options), owner.state
    counts = {key: state[key] for key in habits.counters}
    given = state_tensors(state)

    counts_on_device = any(value.dim() == 0 and value.device.type != "cpu" for value in given.values())
    if compat.imagined_device():
        counts_on_device = bool(owner.options.get("fused") or owner.options.get("capturable"))
    plain = {"capturable": True} if "capturable" in owner.options and counts_on_device else {}

    shadow = shadow_of(owner.optimizer)

    def update(parameter: Tensor, gradient: Tensor, tensors: list[Tensor], live: list[Any]) -> tuple[()]:
        options = plain_options(with_live(owner.options, dict(zip(numbers, live, strict=False)))) | plain
        counted = dict(zip(counts, live[len(numbers) :], strict=True))
        before = dict(zip(given, tensors, strict=True))
        parameter.grad = gradient
        with torch.no_grad():
            after = step_alone(shadow, parameter, options, {**state, **before, **counted})
            for key, value in before.items():
                if after[key] is not value:  # the class has replaced the tensor
                    value.copy_(after[key])
        return ()

    parameter = inputs.of_update(owner.parameter)
    tensors = [inputs.of_update(value) for value in given.values()]
    shapes = inputs.update_shapes
    decided = compat.decisions(shapes)
    with inputs.update_mode, compat.without_locations(), refusing_generators(), named(owner.optimizer):
        live = {f"{owner.group}.{key}": value for key, value in numbers.items()}
        live |= {f"{owner.group}.state.{key}": value for key, value in counts.items()}
        symbols = [compat.live_number(shapes, float(value), name) for name, value in live.items()]
        traced = compat.trace(update, (parameter, torch.empty_like(parameter), tensors, symbols))
    check_update(traced, owner, habits, numbers)
    check_decisions(owner, compat.decisions(shapes)[len(decided) :])
    return traced


def resized_update(before: Tensor, piece: GraphModule, after: Tensor) -> GraphModule | None:
    """Copy an elementwise update of `before` for a tensor like `after`.

    Return None if an operator takes a list, or if a tensor is not contiguous, has no dimensions or another shape.
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
    """Clip by the global norm, with the operators of torch.nn.utils.clip_grad_norm_.

    The nodes are written directly, because tracing that function is slow.
    Norms are fp32, or fp64 for fp64 gradients, because sums of squares overflow in fp16.
    """
    aten, label = torch.ops.aten, NodeInfo(Role.CLIP)
    device = parameters[0].device
    dtype = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
    with inputs.update_mode:
        one = torch.empty((), dtype=dtype, device=device)
        all_norms = torch.empty(len(gradients), dtype=dtype, device=device)
        likenesses = dict.fromkeys((p.shape, p.stride(), p.dtype) for p in parameters)
        values = {
            (shape, stride, kind): torch.empty_like(torch.empty_strided(shape, stride, dtype=kind, device=device))
            for shape, stride, kind in likenesses
        }

    def norm_of(node: Node) -> Node:
        keywords = {} if node.meta["val"].dtype is dtype else {"dtype": dtype}
        norm = aten.linalg_vector_norm.default
        return call(graph, norm, (node, 2.0), label, name="linalg_vector_norm", kwargs=keywords, value=one)

    norms = [norm_of(gradient) for gradient in gradients]
    total = norm_of(call(graph, aten.stack.default, (norms,), label, name="stack", value=all_norms))
    above_zero = call(graph, aten.add.Tensor, (total, 1e-6), label, name="add", value=one)
    inverse = call(graph, aten.reciprocal.default, (above_zero,), label, name="reciprocal", value=one)
    factor = call(graph, aten.mul.Tensor, (inverse, max_norm), label, name="mul", value=one)
    factor = call(graph, aten.clamp.default, (factor, None, 1.0), label, name="clamp", value=one)
    return [
        call(graph, aten.mul.Tensor, (gradient, factor), label, name="mul", value=values[p.shape, p.stride(), p.dtype])
        for gradient, p in zip(gradients, parameters, strict=True)
    ]


def clip_by_value(graph: Graph, gradient: Node, owner: Owned, limit: float, inputs: StepInputs) -> Node:
    """Clip each element as torch.nn.utils.clip_grad_value_ does, as part of the update."""
    label, value = NodeInfo(Role.UPDATE, parameter=owner.name), inputs.of_update(owner.parameter)
    return call(graph, torch.ops.aten.clamp.default, (gradient, -limit, limit), label, name="clamp", value=value)
