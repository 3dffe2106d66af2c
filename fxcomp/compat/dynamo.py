"""Compile with Dynamo, AOTAutograd and Inductor, and read metadata of graphs."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch.autograd.graph import _engine_run_backward
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.parallel import DistributedDataParallel

from fxcomp.compat.modes import Fake
from fxcomp.compat.symbols import SYMBOLS, has_symbols

F = TypeVar("F", bound=Callable[..., Any])

RUN_WITH_RNG_STATE: Any = torch.ops.higher_order.run_with_rng_state
"""Operator that calls another with a given generator state, in backward passes of activation checkpointing."""


def outside_dynamo(function: F, why: str) -> F:
    """Disable torch.compile for a function. Errors print `why`."""
    disabled: Any = torch.compiler.disable(function, reason=why)
    return disabled


def uncompiled(function: Any) -> Any:
    """Return the model or function inside torch.compile's wrapper, and other objects unchanged."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # imported by the first call of torch.compile
    if dynamo is None:
        return function
    while isinstance(function, dynamo.OptimizedModule):
        function = function._orig_mod
    return function if isinstance(function, torch.nn.Module) else dynamo.innermost_fn(function)


def compiled_functions_inline() -> AbstractContextManager[Any]:
    """Let make_fx trace into compiled functions. By default make_fx raises."""
    config: Any = sys.modules.get("torch._dynamo.config")
    return nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def compiled_functions_eager() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def backward(loss: torch.Tensor, seed: torch.Tensor) -> None:
    """Run backward() inside the active function modes; torch's own backward() disables them."""
    _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def nodes_of(loss: torch.Tensor) -> list[Any]:
    return list(_nodes_below([loss.grad_fn], nearest_first=False))


def _nodes_below(nodes: Iterable[Any], *, nearest_first: bool = True) -> Iterator[Any]:
    left, seen = deque(nodes), set[Any]()
    while left:
        node = left.popleft() if nearest_first else left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left.extend(each for each, _ in node.next_functions)


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors whose `.grad` backward accumulates into."""
    return [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]


def compile_training(
    gm: GraphModule,
    inputs: Sequence[Any],
    forward: Callable[[GraphModule], GraphModule],
    backward: Callable[[GraphModule], Callable[[list[Any]], Sequence[Any]]],
) -> Callable[..., Any]:
    """Compile a graph from Dynamo: `forward` rewrites the forward graph, `backward` compiles the backward graph.

    Both functions run during this call, not at the first backward pass, so that every rank compiles at the same call.
    """

    def compile_backward(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _keep_what_is_saved()
        run: Any = backward(graph)
        run._boxed_call = True
        return run

    from torch._dynamo.backends.common import aot_autograd

    def compile_forward(graph: GraphModule, _: Any) -> Callable[..., Any]:
        return run_eagerly(forward(graph))

    # Without keep_inference_input_mutations AOTAutograd raises for `.data =` on a graph input.
    compiler: Any = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_forward,
        keep_inference_input_mutations=True,
    )
    # Pass generator states as tensors, not generator objects.
    with functorch_config.patch(force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False):
        return compiler(gm, inputs)


Backward = Callable[[list[Any]], Sequence[Any]]
"""Function that takes a list of arguments and may empty the list."""


def compile_training_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], backward: Callable[[GraphModule, Backward], Backward]
) -> Callable[..., Any]:
    """Compile a graph from Dynamo as `backend="inductor"` does, but compile the backward graph with `backward`.

    `backward` receives the backward graph, whose fakes have the strides of the real values, and Inductor's function for
    the whole graph. Inductor compiles this function at the first call. With symbolic sizes, Inductor compiles at once,
    because assumptions about sizes must not be added later.

    Without symbolic sizes, Inductor may replace random operators (see `draws_by_seed`).
    """
    from torch._inductor import compile_fx, config

    is_dynamic = any(isinstance(v, SYMBOLS) or (isinstance(v, torch.Tensor) and has_symbols(v)) for v in inputs)
    patches = {"fallback_random": config.fallback_random or is_dynamic, "triton.cudagraphs": False}

    def compile_graph(graph: GraphModule, given: Sequence[Any], *args: Any, **how: Any) -> Callable[..., Any]:
        if not how.get("is_backward"):
            return compile_fx.compile_fx_inner(graph, given, *args, **how)
        _keep_what_is_saved()
        _take_inputs(graph, given)
        context = TracingContext.try_get()

        def compile_whole() -> Backward:
            with tracing(context), config.patch(patches):
                whole: Any = compile_fx.compile_fx_inner(graph, given, *args, **how)
            return whole

        own = _MadeLater(compile_whole)
        compiled = backward(graph, own)
        if is_dynamic:
            own.make()

        def run(values: list[Any]) -> Sequence[Any]:
            return compiled(values)

        vars(run)["_boxed_call"] = True
        return run

    # With a cache hit AOTAutograd would not call `inner_compile` for the backward pass.
    with functorch_config.patch(
        force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False, enable_autograd_cache=False
    ):
        compile_both: Any = compile_fx.compile_fx  # typed for Inductor's own `inner_compile`
        return compile_both(gm, list(inputs), inner_compile=compile_graph, config_patches=patches)


class _MadeLater:
    def __init__(self, make: Callable[[], Backward]) -> None:
        self._make: Callable[[], Backward] | None = make
        self._run: Backward | None = None

    def make(self) -> Backward:
        if self._make is not None:
            self._run, self._make = self._make(), None
        assert self._run is not None, "making it raised"
        return self._run

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        return self.make()(values)


def _take_inputs(graph: GraphModule, given: Sequence[Any]) -> None:
    """Recompute a graph's fakes from `given`: saved tensors may have other strides than in the trace."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    mode = next(value.fake_mode for value in given if isinstance(value, Fake))
    with mock.patch.object(mode, "allow_non_fake_inputs", True):
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*given)


def _keep_what_is_saved() -> None:
    """Allow backward(retain_graph=True): compiled code must not reuse the memory of saved tensors."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def backward_node(results: Sequence[Any]) -> Any:
    """Search the autograd graph from `results` and return the nearest node of a compiled function, or None."""
    nodes = _nodes_below(value.grad_fn for value in results if isinstance(value, torch.Tensor))
    return next((node for node in nodes if node.name() == "CompiledFunctionBackward"), None)


def before_backward(node: Any, call: Callable[[], None]) -> None:
    def before(_: Sequence[Any]) -> None:
        call()

    node.register_prehook(before)


def backward_call() -> int | None:
    """Return the id of the running backward() call, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def will_run_backward(node: Any) -> bool:
    """Return whether the running backward() call runs a node or has run it."""
    return torch._C._will_engine_execute_node(node)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Return whether the running backward() call accumulates into `parameter.grad`."""
    try:
        return will_run_backward(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns gradients
        return False


def register_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook on a parameter, which may be frozen or uninitialized."""
    with torch.DisableTorchFunctionSubclass():
        trains = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(hook)
        parameter.requires_grad_(trains)


def _config() -> Any:
    from torch._dynamo import config

    return config


def suppresses_errors() -> bool:
    """Return whether Dynamo falls back to eager code on errors."""
    return bool(_config().suppress_errors)


def is_restart(error: Exception) -> bool:
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def why_not_compiled() -> str | None:
    """Return the setting that disables torch.compile in this process, if any."""
    from torch._dynamo import eval_frame

    if _config().disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch._dynamo.config.disable is set, as TORCH_COMPILE_DISABLE=1 does"
    stance = eval_frame._stance.stance
    return None if stance == "default" else f"torch.compiler.set_stance({stance!r}) is in force"


def draws_by_seed(node: Node) -> bool:
    """Return whether a node draws random numbers with Inductor's own operators, which take a seed."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name.startswith("prims::inductor_rand")


def run_eagerly(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that runs a graph's operators one by one and empties its list of arguments."""
    from torch._dynamo.backends.debugging import boxed_nop

    run: Any = boxed_nop(graph, [])
    return run


def gradient_places(backward: GraphModule) -> dict[int, int | None]:
    """Map each gradient's output index in a backward graph to the forward input's index; None if inputs are aliased."""
    descriptions: Sequence[Any] = backward.graph.output_node().meta["desc"]
    return {
        place: getattr(what.grad_of, "idx", None) for place, what in enumerate(descriptions) if hasattr(what, "grad_of")
    }


def source_name(node: Node) -> str:
    """Return a graph input's source: `L['self']._modules['fc']._parameters['weight']`."""
    found = node.meta.get("grapharg")
    if found is None or found.source is None:
        return node.name
    name: Any = found.source.name
    return str(name() if callable(name) else name)  # a method until torch 2.11


def graph_break(gm: GraphModule) -> str | None:
    """Return line and reason of the graph break that ends a graph; None if the graph ends with a return."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = (str(reason.reason).strip().splitlines() or [""])[0]
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {text}"


def inside_ddp() -> bool:
    return DistributedDataParallel._get_active_ddp_module() is not None


def standalone_compile(module: GraphModule, fakes: Sequence[Any], *, keeps_order: bool) -> Callable[..., Any]:
    """Compile a graph with Inductor for fake inputs. The compiled function returns a tuple.

    `keeps_order` turns reordering off, for graphs that draw random numbers more than once.

    With symbolic sizes the FX graph cache is off, because entries only guard sizes that are inputs themselves. An entry
    for `Sym(s0*s1)` alone raises NameError in the next process. An entry for a tensor of s0 rows ignores assumptions
    about s0. The kernel cache stays on.
    """
    from torch._inductor import standalone_compile as compile_graph

    # Inductor's own generator draws other numbers than eager mode.
    patches: dict[str, Any] = {"fallback_random": not any(map(draws_by_seed, module.graph.nodes))}
    if keeps_order:
        patches |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    if not is_cached(fakes):
        patches |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    given: dict[str, Any] = {"options": {"config_patches": patches}}
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, Fake)), None)
    # Step graphs contain their own backward pass. The log would warn that the result cannot be saved.
    log = logging.getLogger("torch._inductor.standalone_compile")
    with torch.no_grad(), mock.patch.object(log, "disabled", True):
        if mode is None:
            return compile_graph(module, list(fakes), dynamic_shapes="from_example_inputs", **given)
        # Another fake mode would merge sizes that were equal while tracing.
        with tracing(TracingContext(mode)):
            return compile_graph(module, list(fakes), dynamic_shapes="from_tracing_context", **given)


def is_cached(fakes: Sequence[Any]) -> bool:
    """Return whether the FX graph cache may be used: no input has symbolic sizes."""
    return not any(has_symbols(fake) if isinstance(fake, torch.Tensor) else isinstance(fake, SYMBOLS) for fake in fakes)
