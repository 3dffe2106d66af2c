"""Trace on fake tensors: modes, make_fx, and torch settings that a trace must not see."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._C import _DisablePythonDispatcher, _set_mkldnn_enabled
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.backends import mkldnn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.proxy import _create_arg_bypass
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fxcomp.compat.constants import Constants
from fxcomp.compat.dynamo import compiled_functions_inline
from fxcomp.compat.modes import DispatchMode as DispatchMode
from fxcomp.compat.modes import Fake, FakeMode, dispatch_mode_stack, outside_function_modes
from fxcomp.compat.operators import symbolic_products
from fxcomp.compat.symbols import constant_source

_GENERATOR = torch.Generator  # as_if_on replaces the class

SIZE_DEPENDS = DynamicOutputShapeException
"""Tracing error of operators whose output size depends on values and has no symbol."""

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, SIZE_DEPENDS)
"""Tracing errors when Python reads a tensor's value."""


def fake_mode() -> tuple[FakeMode, ShapeEnv]:
    """Make a shape environment and a fake mode that accepts real tensors, such as constants of the model."""
    shapes = ShapeEnv()
    return FakeMode(shape_env=shapes, allow_non_fake_inputs=True), shapes


def fake_with_dynamic_dims(mode: FakeMode, value: Any, dims: frozenset[int], name: str) -> Any:
    """Return a fake tensor with symbolic sizes in `dims`, and other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    if not dims:
        return mode.from_tensor(value, static_shapes=True)
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * value.dim())
    return mode.from_tensor(value, symbolic_context=context, source=constant_source(name))


def fake_on(value: Tensor, device: torch.device) -> Tensor:
    """Copy a fake to a device that may be absent."""
    if not isinstance(value, Fake):
        return value
    with _disable_current_modes():
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return Fake(value.fake_mode, there, device)


def forget_fakes(mode: FakeMode, values: Sequence[Any]) -> None:
    """Let `mode` make new fakes of these tensors at the next conversion."""
    known = mode.fake_tensor_converter.meta_converter.describer.lookup_tensor
    for value in values:
        if isinstance(value, Tensor):
            known.pop(value, None)


def plain_values() -> AbstractContextManager[Any]:
    return _disable_current_modes()


@contextmanager
def real_tensors() -> Generator[None]:
    """Compute and communicate without a compiler's fake modes.

    The Python dispatcher is disabled too, because it holds the GIL when it starts a collective. Then a deadlock occurs
    if gloo's thread holds the queue lock and waits for the GIL to free tensors of a finished collective.
    """
    with _disable_current_modes(), _DisablePythonDispatcher():
        yield


def is_traced_here() -> bool:
    return any(isinstance(mode, FakeMode) for mode in dispatch_mode_stack())


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Trace a function of fake inputs into ATen operators; Python code is generated on demand."""

    def outside_exchanged(*args: Any) -> Any:
        with Constants(args):
            return function(*args)

    with (
        _use_lazy_graph_module(True),
        symbolic_products(pytree.tree_leaves(inputs)),
        _generators_as_attributes(),
        compiled_functions_inline(),
    ):
        return make_fx(outside_exchanged, tracing_mode="real")(*inputs)


def _generators_as_attributes() -> AbstractContextManager[Any]:
    """Allow generators as arguments of operators in a graph. torch allows generators only since 2.13."""

    def as_attribute(tracer: Any, generator: torch.Generator) -> Node:
        name = tracer.get_fresh_qualname("_generator")
        setattr(tracer.root, name, generator)
        return tracer.create_node("get_attr", name, (), {})

    return mock.patch.dict(cast("Any", _create_arg_bypass), {_GENERATOR: as_attribute} | _create_arg_bypass)


def trace_functional(
    traced: GraphModule, inputs: Sequence[Any], mode: FakeMode, begun: Callable[[], None]
) -> GraphModule:
    """Trace again, without in-place operators and views of written tensors. The trace first calls `begun`.

    Constants become fake inputs of this trace, because the graph may write tensors outside the model.
    """
    constants, given = _constants(traced), len(inputs)

    def run(*flat: Any) -> Any:
        begun()
        return _WithConstants(traced, dict(zip(constants, flat[given:], strict=True))).run(*flat[:given])

    with outside_function_modes():
        fakes = [mode.from_tensor(value, static_shapes=True) for value in constants.values()]
    found = trace(torch.func.functionalize(run, remove="mutations"), [*inputs, *fakes])
    places = [node for node in found.graph.nodes if node.op == "placeholder"][given:]
    for number, (place, value) in enumerate(zip(places, constants.values(), strict=True)):
        if place.users:
            name = f"_lifted_constant{number}"
            setattr(found, name, value)
            with found.graph.inserting_after(places[-1]):
                constant = found.graph.create_node("get_attr", name)
            constant.meta = dict(place.meta)
            place.replace_all_uses_with(constant)
    for place in places:
        found.graph.erase_node(place)
    found.recompile()
    return found


def _constants(traced: GraphModule) -> dict[str, Tensor]:
    named = {node: getattr(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"}
    return {
        str(node.target): value
        for node, value in named.items()
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.requires_grad
    }


class _WithConstants(Interpreter):
    def __init__(self, traced: GraphModule, instead: Mapping[str, Tensor]):
        super().__init__(traced)
        self._instead = instead

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self._instead.get(target)
        return found if found is not None else super().get_attr(target, args, kwargs)


@contextmanager
def without_autocast() -> Generator[None]:
    """Turn autocast off, without a nested autocast context, which would keep cached casts of weights."""
    before = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    try:
        for device in before:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)


def uses_onednn() -> bool:
    return bool(mkldnn.enabled)


@contextmanager
def onednn(use: bool) -> Generator[None]:
    """Enable or disable oneDNN. The public switch also sets TF32, and warns."""
    before = uses_onednn()
    _set_mkldnn_enabled(use)
    try:
        yield
    finally:
        _set_mkldnn_enabled(before)
