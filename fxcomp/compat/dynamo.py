"""Compile with Dynamo, AOTAutograd and Inductor, and read what they say of graphs."""

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
"""Takes a state, an operator and its arguments; the backward passes of activation checkpointing draw by it."""


def outside_dynamo(function: F, why: str) -> F:
    """Give a function at which torch.compile ends its graph, and into which it does not look.

    `why` is told where a graph must not end.
    """
    disabled: Any = torch.compiler.disable(function, reason=why)
    return disabled


def uncompiled(function: Any) -> Any:
    """Give the model or the function inside what torch.compile has made; others pass."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # imported by the first call of torch.compile
    if dynamo is None:
        return function
    while isinstance(function, dynamo.OptimizedModule):
        function = function._orig_mod
    return function if isinstance(function, torch.nn.Module) else dynamo.innermost_fn(function)


def compiled_functions_inline() -> AbstractContextManager[Any]:
    """Let make_fx trace into what torch.compile has made, which raises else."""
    config: Any = sys.modules.get("torch._dynamo.config")
    return nullcontext() if config is None else config.patch(error_on_nested_fx_trace=False)


def compiled_functions_eager() -> AbstractContextManager[Any]:
    """Run what torch.compile has made as it was before."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def backward(loss: torch.Tensor, seed: torch.Tensor) -> None:
    """Run backward() with function modes around the Python that it calls; torch's own takes the mode off."""
    _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def nodes_of(loss: torch.Tensor) -> list[Any]:
    """List the nodes of a loss's backward graph, in an order that follows from the graph."""
    return list(_nodes_below([loss.grad_fn]))


def _nodes_below(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield these nodes of a backward graph and all that they lead to, the nearest first, each once."""
    left, seen = deque(nodes), set[Any]()
    while left:
        node = left.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left.extend(each for each, _ in node.next_functions)


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors into whose `.grad` a backward pass would add."""
    return [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]


def compile_training(
    gm: GraphModule,
    inputs: Sequence[Any],
    forward: Callable[[GraphModule], GraphModule],
    backward: Callable[[GraphModule], Callable[[list[Any]], Sequence[Any]]],
) -> Callable[..., Any]:
    """Compile what Dynamo hands to a backend: `forward` rewrites the forward graph, `backward` compiles the other.

    Both are compiled now, so that every rank compiles at the same call. What `backward` returns takes one list, and may
    empty it.
    """

    def compile_backward(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _keep_what_is_saved()
        run: Any = backward(graph)
        run._boxed_call = True
        return run

    from torch._dynamo.backends.common import aot_autograd

    def compile_forward(graph: GraphModule, _: Any) -> Callable[..., Any]:
        return run_eagerly(forward(graph))

    # Without keeping input mutations AOTAutograd raises AssertionError for `.data =` on a graph input.
    compiler: Any = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_forward,
        keep_inference_input_mutations=True,
    )
    # A generator's state as a tensor, on every device: generator objects are inputs of another kind.
    with functorch_config.patch(force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False):
        return compiler(gm, inputs)


Backward = Callable[[list[Any]], Sequence[Any]]
"""Takes a list, which it may empty."""


def compile_training_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], backward: Callable[[GraphModule, Backward], Backward]
) -> Callable[..., Any]:
    """Compile what Dynamo hands to a backend as `backend="inductor"` does, but the backward graph by `backward`.

    The forward pass is Inductor's, and so is what is saved for the backward pass and what that computes again.
    `backward` is given the graph, with fakes that lie as real values will, and the function that Inductor makes of it
    as a whole: when it is called first, or now where sizes are symbols, because the next call may assume no more.

    With symbolic sizes random operators stay torch's own. Else Inductor may replace them by `draws_by_seed`.
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

    # A cache of both passes would not ask for the backward pass again.
    with functorch_config.patch(
        force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False, enable_autograd_cache=False
    ):
        compile_both: Any = compile_fx.compile_fx  # typed for what Inductor itself makes
        return compile_both(gm, list(inputs), inner_compile=compile_graph, config_patches=patches)


class _MadeLater:
    """A function that is made when it is called first."""

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
    """Let a graph's fakes follow from others: what Inductor's forward pass saves may lie otherwise than traced."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    mode = next(value.fake_mode for value in given if isinstance(value, Fake))
    with mock.patch.object(mode, "allow_non_fake_inputs", True):
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*given)


def _keep_what_is_saved() -> None:
    """Allow backward(retain_graph=True): what is saved for the backward pass being compiled is never written into."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def backward_node(results: Sequence[Any]) -> Any:
    """Find the node of the compiled function that returned these, None if nothing can run backward through it.

    It is the nearest one: outputs may be views of what it returned.
    """
    nodes = _nodes_below(value.grad_fn for value in results if isinstance(value, torch.Tensor))
    return next((node for node in nodes if node.name() == "CompiledFunctionBackward"), None)


def before_backward(node: Any, call: Callable[[], None]) -> None:
    """Call something each time before the backward pass of a node runs."""

    def before(_: Sequence[Any]) -> None:
        call()

    node.register_prehook(before)


def backward_call() -> int | None:
    """Number the call of backward() that is under way; None outside of any."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def will_run_backward(node: Any) -> bool:
    """Ask if the call of backward() that is under way runs a node, or has run it."""
    return torch._C._will_engine_execute_node(node)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Ask if the call of backward() that is under way adds to a parameter's `.grad`."""
    try:
        return will_run_backward(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # gradients are returned, by torch.autograd.grad
        return False


def register_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook on a parameter that may be frozen, or not initialized yet."""
    with torch.DisableTorchFunctionSubclass():
        trains = parameter.requires_grad
        parameter.requires_grad_(True).register_hook(hook)
        parameter.requires_grad_(trains)


def _config() -> Any:
    from torch._dynamo import config

    return config


def suppresses_errors() -> bool:
    """Ask if Dynamo runs eager code in place of what a backend refuses."""
    return bool(_config().suppress_errors)


def is_restart(error: Exception) -> bool:
    """Ask if an exception of a backend is no error: it makes Dynamo trace the same code again."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def why_not_compiled() -> str | None:
    """Name the setting of this process that keeps torch.compile from compiling, if there is one."""
    from torch._dynamo import eval_frame

    if _config().disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch._dynamo.config.disable is set, as TORCH_COMPILE_DISABLE=1 does"
    stance = eval_frame._stance.stance
    return None if stance == "default" else f"torch.compiler.set_stance({stance!r}) is in force"


def draws_by_seed(node: Node) -> bool:
    """Ask if a node stands for random numbers that only Inductor's code makes, of a seed that the graph has."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name.startswith("prims::inductor_rand")


def run_eagerly(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Make a function that runs a graph's operators one by one; it takes one list and empties it."""
    from torch._dynamo.backends.debugging import boxed_nop

    run: Any = boxed_nop(graph, [])
    return run


def gradient_places(backward: GraphModule) -> dict[int, int | None]:
    """Find the gradients among a backward graph's outputs, each with its input; None is an input that others alias."""
    descriptions: Sequence[Any] = backward.graph.output_node().meta["desc"]
    return {
        place: getattr(what.grad_of, "idx", None) for place, what in enumerate(descriptions) if hasattr(what, "grad_of")
    }


def source_name(node: Node) -> str:
    """Name the place where Dynamo found a graph input: `L['self']._modules['fc']._parameters['weight']`."""
    found = node.meta.get("grapharg")
    if found is None or found.source is None:
        return node.name
    name: Any = found.source.name
    return str(name() if callable(name) else name)  # a method until torch 2.11


def graph_break(gm: GraphModule) -> str | None:
    """Tell in a line where and why Dynamo ended a graph early; None if the frame simply returned."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = (str(reason.reason).strip().splitlines() or [""])[0]
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {text}"


def inside_ddp() -> bool:
    """Ask if DistributedDataParallel's forward is running, which reduces gradients itself."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def standalone_compile(module: GraphModule, fakes: Sequence[Any], *, keeps_order: bool) -> Callable[..., Any]:
    """Compile a graph of fake inputs with Inductor; returns a function of real ones with a tuple of results.

    `keeps_order` is for graphs that draw random numbers more than once: operators run in the order of the graph.

    With symbolic sizes nothing is taken from Inductor's cache of graphs. Its entries keep only what was assumed of
    sizes that are inputs by themselves: one for `Sym(s0*s1)` alone raises NameError in the next process, and one for a
    tensor of s0 rows would be taken where its assumptions do not hold. Kernels come from their own cache.
    """
    from torch._inductor import standalone_compile as compile_graph

    # Inductor's own generator would draw other numbers than eager, where the graph does not name it.
    patches: dict[str, Any] = {"fallback_random": not any(map(draws_by_seed, module.graph.nodes))}
    if keeps_order:
        patches |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    if not is_cached(fakes):
        patches |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    given: dict[str, Any] = {"options": {"config_patches": patches}}
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, Fake)), None)
    # A step's regions hold their own backward pass: that of parameters, which require gradients, is not differentiated.
    # standalone_compile warns that it cannot save what nobody asked it to save.
    log = logging.getLogger("torch._inductor.standalone_compile")
    with torch.no_grad(), mock.patch.object(log, "disabled", True):
        if mode is None:
            return compile_graph(module, list(fakes), dynamic_shapes="from_example_inputs", **given)
        # In a mode of its own Inductor would take two sizes for one where they were equal while tracing.
        with tracing(TracingContext(mode)):
            return compile_graph(module, list(fakes), dynamic_shapes="from_tracing_context", **given)


def is_cached(fakes: Sequence[Any]) -> bool:
    """Return whether a graph of such inputs may be taken from Inductor's cache on disk."""
    return not any(has_symbols(fake) if isinstance(fake, torch.Tensor) else isinstance(fake, SYMBOLS) for fake in fakes)
