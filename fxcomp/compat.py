"""The private parts of torch that we need, in one place, and what differs between torch 2.11 and 2.13."""

# What is private has no types, or half of them.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import linecache
import math
import os
import platform
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.node import map_arg
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._sympy.value_ranges import ValueRanges

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


# Tracing


FakeMode = FakeTensorMode
"""The mode under which tensors have shapes and no values."""


@contextmanager
def plain_values() -> Generator[None]:
    """Compute on real values, unseen by whatever traces around us."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


def limit(symbol: torch.SymFloat, low: float, high: float) -> None:
    """Tell a symbol's environment that its value is never outside of these two numbers."""
    symbol.node.shape_env.var_to_range[symbol.node.expr] = ValueRanges(low, high)


def symbols_of(number: Any) -> list[str]:
    """The names of the symbols in a number or a size that only the data will tell."""
    if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        return []
    return sorted(map(str, symbolic_shapes.free_unbacked_symbols(number)))


def fake_mode() -> tuple[FakeTensorMode, ShapeEnv]:
    """A fake mode that lets constants of the model (tensors that are no buffers) into the graph."""
    shapes = ShapeEnv()
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), shapes


def fake_with_dynamic_dims(mode: FakeTensorMode, value: Any, dims: frozenset[int], name: str) -> Any:
    """A fake tensor whose named dimensions are symbols; other values pass."""
    if not isinstance(value, Tensor):
        return value
    if not dims:
        return mode.from_tensor(value, static_shapes=True)
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
    from torch._dynamo.source import ConstantSource

    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * value.dim())
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))


def live_number(shapes: ShapeEnv, value: float, name: str) -> Any:
    """A float symbol with a hint: comparisons decide by the hint, arithmetic becomes nodes."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"live_{name}".replace(".", "_"))
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symfloatnode(symbol, hint=value, source=source)


def is_open(value: Any) -> bool:
    """Whether a number follows from symbols, and not from what tracing has assumed of them."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and _as_constant(value) is None


def as_number(value: Any) -> Any:
    """A number that only looks like a symbol as the number that it is; other values as they are."""
    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return _as_constant(value) if is_symbol else value


def _as_constant(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """What a symbolic number must be, if there is only one possibility."""
    expression = getattr(value.node, "expr", None)
    if expression is None or expression.free_symbols:
        return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](expression)


def symbols(leaves: Iterable[Any]) -> set[str]:
    """The names of the symbols in tensors' sizes."""
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    return {str(symbol) for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


@contextmanager
def without_locations() -> Generator[None]:
    """Let symbols not note where they are made: torch imports its exporter to tell its own files from the user's."""
    before = symbolic_shapes.uninteresting_files
    symbolic_shapes.uninteresting_files = cast("Any", set[str])
    try:
        yield
    finally:
        symbolic_shapes.uninteresting_files = before


@contextmanager
def without_autocast() -> Generator[None]:
    """Run as if the caller had not switched autocast on."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Trace a function of fake inputs into ATen operators; the graph writes its Python only if somebody asks for it."""
    with _use_lazy_graph_module(True):
        return make_fx(function, tracing_mode="real")(*inputs)


@contextmanager
def without_onednn() -> Generator[None]:
    """Trace what PyTorch does where it has no oneDNN. Its public switch sets TF32 as well, and warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def trace_functional(traced: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Trace again without in-place operators and views of written tensors."""

    def run(*flat: Any) -> Any:
        return Interpreter(traced).run(*flat)

    return trace(torch.func.functionalize(run, remove="mutations"), inputs)


def functional_operator(target: Any) -> OpOverload[..., Any] | None:
    """The operator that makes a new value of what this one changes in place: add for add_."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def copied(nodes: Iterable[Node]) -> Graph:
    """A graph of the same nodes, in this order, under the same names."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = append_copy(graph, node, copies)
    return graph


def append_copy(graph: Graph, node: Node, copies: Mapping[Node, Node], called: str | None = None) -> Node:
    """Copy a node to a graph's end, under another name if one is given; its arguments are replaced by their copies.

    `Graph.node_copy` does that too, and looks for raw symbols in the arguments, which takes longer than all the rest;
    these nodes have been in a graph before.
    """
    name = graph._graph_namespace.create_name(called or node.name, None)
    args, kwargs = map_arg(node.args, copies.__getitem__), map_arg(node.kwargs, copies.__getitem__)
    made = Node(graph, name, node.op, node.target, args, kwargs, node.type)
    made.meta = dict(node.meta)
    graph._graph_namespace.associate_name_with_obj(name, made)
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


def graph_module(root: GraphModule, graph: Graph, name: str) -> GraphModule:
    """A module of a graph that writes its Python code only when somebody asks for it: most are only passed on."""
    return _LazyGraphModule(root, graph, class_name=name)


def shape_guard(shapes: ShapeEnv, batch: Sequence[Any]) -> Callable[[Sequence[Any]], bool]:
    """Whether other batch tensors satisfy what tracing assumed about symbolic sizes."""
    tensors: list[Any] = [leaf for leaf in batch if isinstance(leaf, Tensor)]
    if not any(isinstance(size, torch.SymInt) for leaf in tensors for size in leaf.shape):
        return lambda _: True

    def holds(leaves: Sequence[Any]) -> bool:
        real = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return shapes.evaluate_guards_for_args(tensors, real, ignore_static=False)

    return holds


def is_operator(target: Any) -> TypeGuard[OpOverload[..., Any]]:
    return isinstance(target, OpOverload)


def is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def has_symbols(value: Tensor) -> bool:
    """Whether a fake value's sizes or strides are symbols."""
    return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))


def draws(node: Node) -> bool:
    """Whether a node changes the random generator's state: attention without dropout is tagged random and does not."""
    if not is_random(node.target):
        return False
    target = cast("OpOverload[..., Any]", node.target)
    places = places_of_arguments(target)

    def given(name: str) -> Any:
        if name not in places:
            return None
        default = target._schema.arguments[places[name]].default_value
        return node.args[places[name]] if len(node.args) > places[name] else node.kwargs.get(name, default)

    return not (given("dropout_p") == 0 or given("train") is False or given("training") is False)


def is_profiler(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "profiler"


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """How kernels lay out what they make of a tensor, if they do not follow its strides."""
    return suggest_memory_format(tensor)


def is_view(target: OpOverload[..., Any]) -> bool:
    """Whether an operator's results share memory with its arguments, and it writes nothing."""
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def has_effect(node: Node) -> bool:
    """Whether a node must stay although nobody uses its value."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    return isinstance(target, OpOverload) and (target._schema.is_mutable or is_random(target))


# Optimizers


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let learning-rate schedulers know that this optimizer's step was taken: else they warn of a wrong order."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # what schedulers' own wrapper sets


# torch.compile


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
        run: Any = backward(graph)
        run._boxed_call = True
        return run

    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compile_forward(graph: GraphModule, given: Any) -> Callable[..., Any]:
        return boxed_nop(forward(graph), given)

    compiler: Any = aot_autograd(
        fw_compiler=compile_forward, bw_compiler=compile_backward, inference_compiler=compile_forward
    )
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        return compiler(gm, inputs)


def run_eagerly(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a graph's operators one by one. The function takes one list and empties it."""
    from torch._dynamo.backends.debugging import boxed_nop

    run: Any = boxed_nop(graph, [])
    return run


def gradient_places(backward: GraphModule) -> dict[int, int | None]:
    """Which outputs of a backward graph are gradients, and of which input; None is an input that others alias."""
    descriptions: Sequence[Any] = backward.graph.output_node().meta["desc"]
    return {
        place: getattr(what.grad_of, "idx", None)
        for place, what in enumerate(descriptions)
        if isinstance(what, GradAOTOutput)
    }


def source_name(node: Node) -> str:
    """Where Dynamo found a graph input: `L['self']._modules['fc']._parameters['weight']`."""
    found = node.meta.get("grapharg")
    if found is None or found.source is None:
        return node.name
    name: Any = found.source.name
    return str(name() if callable(name) else name)  # a method until torch 2.11


def graph_break(gm: GraphModule) -> str | None:
    """Where and why Dynamo ended a graph early, in a line; None if the frame simply returned."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = (str(reason.reason).strip().splitlines() or [""])[0]
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno}: {text}"


def inside_ddp() -> bool:
    """Whether DistributedDataParallel's forward is running, which reduces gradients itself."""
    return DistributedDataParallel._get_active_ddp_module() is not None


@contextmanager
def real_tensors() -> Generator[None]:
    """Compute and communicate as if no compiler around us worked on fake tensors.

    Its Python dispatcher must be off too: it starts a collective with the interpreter's lock held, and gloo's thread
    may want that lock to drop a finished collective's tensors while it holds the queue that the new one needs.
    """
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():
        yield


is_subclass = is_traceable_wrapper_subclass
"""Whether a tensor wraps others, as a DTensor does."""


# Hooks


def global_module_hooks() -> dict[str, dict[int, Any]]:
    """The hooks that every module runs, by their kind; live tables."""
    from torch.nn.modules import module

    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return {f"the global {kind} hooks": getattr(module, f"_global_{kind}_hooks") for kind in kinds}


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """The kinds of hooks that an optimizer's step would run."""
    import torch.optim.optimizer as module

    tables: dict[str, Any] = {
        "step method of its own": _replaced_step(optimizer),
        "step pre-hook": optimizer._optimizer_step_pre_hooks,
        "step post-hook": optimizer._optimizer_step_post_hooks,
        "global step pre-hook": module._global_optimizer_pre_hooks,
        "global step post-hook": module._global_optimizer_post_hooks,
    }
    return [kind for kind, table in tables.items() if table]


def _replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody put another function in the place of an optimizer's step. Schedulers do, to count."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


# Process groups

# torch 2.13 renamed these two and warns about the old names.
_dist = cast("Any", dist)
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


def group_size(name: str) -> int:
    """How many ranks a functional collective's group has."""
    return dist.distributed_c10d._resolve_process_group(cast("Any", name)).size()


def default_store() -> dist.Store:
    """The store behind the default process group, with keys of our own."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("fxcomp", store)


def set_once(store: dist.Store, key: str, value: str) -> str:
    """Write a key unless another rank has; return what it holds then, or the own value where no store answers."""
    try:
        return store.compare_set(key, "", value).decode()
    except (RuntimeError, NotImplementedError):
        # Called by a rank that is about to raise: its own error must not give way to that of a store whose host has
        # died, or of one that cannot compare.
        return value


def group_timeout() -> timedelta:
    """How long the default process group waits for a rank, as init_process_group was told."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def default_group() -> Any:
    """The default process group; another object each time that it is initialised."""
    return dist.distributed_c10d._get_default_group()


def groups_made() -> int:
    """What torch names the next process group by: the same on all ranks, or they do not find each other."""
    return dist.distributed_c10d._world.group_count


def count_groups_from(number: int) -> None:
    """Go on naming process groups from here: a rank that failed between two of them has fallen behind."""
    dist.distributed_c10d._world.group_count = number


def destroy_groups(handles: list[Any]) -> None:
    """Close process groups' connections. The list must hold the only references, and is emptied."""
    for handle in handles:
        with suppress(ValueError, RuntimeError):  # the user may have destroyed all of them
            if dist.get_backend(handle) == "nccl":
                handle.abort()  # what is under way would be waited for
            dist.destroy_process_group(handle)
    handle = None
    # A group is gone with the last reference, which waits for what is under way; normally nothing is.
    last = threading.Thread(target=handles.clear, name="fxcomp-closing", daemon=True)
    with suppress(RuntimeError):  # while Python ends, no thread starts
        last.start()
        last.join(0.1)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is not there, as far as its backend tells."""
    lost = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    text = str(error)
    return isinstance(error, lost) or "gloo/" in text or "timed out" in text.lower() or "onnection" in text


def machine_name() -> str:
    """What tells this machine from others."""
    return socket.gethostname()


def usable_processors() -> list[int]:
    """The numbers of the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processors(root: Path = Path("/")) -> int:
    """How many processors this process may use: those it may run on, and no more than its control groups' quotas."""
    return int(min(len(usable_processors()), processor_quota(root)))


def processor_quota(root: Path = Path("/")) -> float:
    """How many processors' worth of time the tightest control group around this process may use; infinite without one.

    A quota is rounded down: `docker run --cpus 1.5` gives one processor to count on, half a one still is one.
    """
    return max(1.0, min(map(math.floor, _quotas(root)), default=math.inf))


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each control group around this process may use (Linux, cgroups(7)).

    A group's path is as the host sees it; a container may see its own group as the top. Both are looked at, and all
    that lie between: the tightest counts.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        inside = Path(path.lstrip("/"))
        for folder in (mount / inside, *(mount / above for above in inside.parents)):
            if controllers:  # version 1
                quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = _text(folder / "cpu.max").partition(" ")
            try:
                us, of_us = int(quota), int(period)
            except ValueError:  # no such file, or "max"
                continue
            if us > 0 and of_us > 0:
                yield us / of_us


def _text(path: Path) -> str:
    """What a file of the system says; nothing if there is none."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def host_name() -> str:
    """What tells this host from others. Namespaces of one machine share a name, but not their network."""
    return f"{machine_name()} {os.readlink('/proc/self/ns/net') if os.path.exists('/proc/self/ns/net') else ''}".strip()


# Collectives of the user's own


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made while tracing, or comes in as an argument; others are constants of the trace."""
    return isinstance(tensor, FakeTensor)


DispatchMode = TorchDispatchMode

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@cache
def communicates(target: Any) -> bool:
    """Whether an operator sends or receives, or waits for what does."""
    return isinstance(target, OpOverload) and (
        target.namespace in _COLLECTIVE_NAMESPACES or target._schema.name == "fxcomp::exchange"
    )


def is_functional_collective(target: OpOverload[..., Any]) -> bool:
    """Whether a collective's result is new, and to be waited for."""
    return target.namespace != "c10d"


def bare_name(target: OpOverload[..., Any]) -> str:
    """An operator's name without its namespace."""
    return target._schema.name.partition("::")[2]


def named_arguments(target: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name; those that were left out are missing."""
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def finished_work(target: OpOverload[..., Any], args: Sequence[Any]) -> Any:
    """What an in-place collective returns when it is done: its outputs, and something to wait for that is not busy."""
    from torch._C._distributed_c10d import FakeWork

    returns = len(target._schema.returns)
    if returns == 0:
        return None
    work = FakeWork().boxed()
    return work if returns == 1 else (args[0], work)


def reduction(boxed: Any) -> str | None:
    """The name of a boxed reduction operation; None for one with a factor."""
    name: str = dist.ReduceOp.RedOpType(boxed.op()).name.lower()
    return None if name == "premul_sum" else name


def group_name(boxed: Any) -> str:
    """The name of a boxed process group, which any rank finds it by as long as it lives."""
    return dist.ProcessGroup.unbox(boxed).group_name


def process_group(name: str) -> Any:
    """The living process group of a name."""
    return dist.distributed_c10d._resolve_process_group(cast("Any", name))


OBJECTS = "a collective of Python objects"


def carries_objects() -> bool:
    """Whether a collective of Python objects is being called, which sends their sizes first."""
    here, codes = dist.distributed_c10d.__file__, (frame.f_code for frame in _frames(sys._getframe(1)))
    return any(code.co_filename == here and "_object" in code.co_name for code in codes)


@contextmanager
def without_hidden_communication(refuse: Callable[[str], Any]) -> Generator[None]:
    """Call `refuse` with what was tried where torch.distributed would communicate by other ways than operators."""
    c10d: Any = dist.distributed_c10d
    hidden = {
        "_object_to_tensor": OBJECTS,
        "_tensor_to_object": OBJECTS,
        "_new_group_with_tag": "a new process group",
    }
    before = {name: getattr(c10d, name) for name in hidden}
    try:
        for name, what in hidden.items():
            setattr(c10d, name, partial(_refused, refuse, what))
        yield
    finally:
        for name, function in before.items():
            setattr(c10d, name, function)


def _refused(refuse: Callable[[str], Any], what: str, *_: Any, **__: Any) -> Any:
    return refuse(what)


def users_line(error: BaseException | None = None) -> str | None:
    """Where the code that is neither torch's nor ours stands now, or stood when an error came up: `train.py:41`."""
    place = _users_place(error)
    return f"{os.path.basename(place[0])}:{place[1]}" if place is not None else None


def users_source(error: BaseException) -> str | None:
    """The same with the line itself: `train.py:41: if loss > 1:`."""
    place = _users_place(error)
    return f"{users_line(error)}: {linecache.getline(*place).strip()}" if place is not None else None


def users_level() -> int:
    """The `stacklevel` with which a warning of the caller names the user's line."""
    files = (frame.f_code.co_filename for frame in _frames(sys._getframe(1)))
    return next((level for level, name in enumerate(files, 1) if not name.startswith(_NOT_THE_USERS)), 1)


_NOT_THE_USERS = (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(os.__file__), "<")
"""Beginnings of the names of files of torch, of ours, of Python's library, and of made-up ones."""


def _users_place(error: BaseException | None) -> tuple[str, int] | None:
    if error is None:
        stack = [(frame, frame.f_lineno) for frame in _frames(sys._getframe(2))]
    else:
        stack = list(traceback.walk_tb(error.__traceback__))[::-1]
    lines = ((frame.f_code.co_filename, line) for frame, line in stack)
    return next(((name, line) for name, line in lines if not name.startswith(_NOT_THE_USERS)), None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# Compiling and files


def standalone_compile(module: GraphModule, fakes: Sequence[Any], *, keeps_order: bool) -> Callable[..., Any]:
    """Inductor's code for a graph of fake inputs; returns a function of real ones with a tuple of results.

    `keeps_order` is for graphs that draw random numbers more than once: operators run in the order of the graph.
    """
    from torch._inductor import standalone_compile as compile_graph

    # Inductor's own generator would draw other numbers than eager.
    patches: dict[str, Any] = {"fallback_random": True}
    if keeps_order:
        patches |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    # A step's regions hold their own backward pass: that of parameters, which require gradients, is not differentiated.
    with torch.no_grad():
        return compile_graph(
            module, list(fakes), dynamic_shapes="from_example_inputs", options={"config_patches": patches}
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing; another process may write the same one. What a link leads to is written."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    """What new files are not allowed; it can only be asked for by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cache_directory() -> Path:
    """Where fxcomp keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxcomp"


# Prices


@cache
def has_flop_formula(target: Any) -> bool:
    """Whether torch's flop counter knows an operator."""
    return _flop_formula(target) is not None


@cache
def _flop_formula(target: Any) -> Callable[..., Any] | None:
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(target, "overloadpacket", target))


def flops(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """What torch's flop counter says of an operator's call on fake values; 0 if it does not know it."""
    count = _flop_formula(target)
    if count is None:
        return 0.0
    try:
        return float(size_hint(count(*args, **kwargs, out_val=out)))
    except (TypeError, ValueError, AssertionError, AttributeError):
        return 0.0


def multiplies_in_tf32(*, is_convolution: bool) -> bool:
    """Whether torch would let a GPU round the factors of a float32 product to TF32, by its settings now."""
    if is_convolution:
        return torch._C._get_cudnn_allow_tf32()
    return torch.get_float32_matmul_precision() != "highest"


@cache
def is_bound_by_memory(target: OpOverload[..., Any]) -> bool:
    """Whether torch tags an operator as one that works value by value, or adds values up."""
    return torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags


@cache
def is_pointwise(target: OpOverload[..., Any]) -> bool:
    """Whether torch tags an operator as one that works value by value."""
    return torch.Tag.pointwise in target.tags


@cache
def moves_tensors(target: OpOverload[..., Any]) -> bool:
    """Whether an operator makes tensors or writes into some; the others tell sizes, or one value."""
    makes = any("Tensor" in str(result.type) for result in target._schema.returns)
    return makes or target._schema.is_mutable


@cache
def has_results(target: OpOverload[..., Any]) -> bool:
    """Whether an operator returns anything."""
    return bool(target._schema.returns)


@cache
def is_in_place(target: OpOverload[..., Any]) -> bool:
    """Whether an operator writes into its arguments."""
    return target._schema.is_mutable


@cache
def places_of_arguments(target: OpOverload[..., Any]) -> Mapping[str, int]:
    """Where each argument of an operator stands, by name."""
    return {argument.name: place for place, argument in enumerate(target._schema.arguments)}


@cache
def written_arguments(target: OpOverload[..., Any]) -> tuple[str, ...]:
    """The names of the arguments that an operator writes into. The gradients of a fused optimizer it only may."""
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tuple(name for name in written if name != "grads")


def is_higher_order(target: Any) -> bool:
    """Whether a node's target takes functions: a loop, a branch, flexible attention."""
    return isinstance(target, HigherOrderOperator)


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in: the same number for its views. Tensors without any have their own."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    return address or id(tensor)


def strides(tensor: Tensor) -> Sequence[Any]:
    """How far apart a tensor's values lie; a dimension with 0 is one value, however large. Sparse ones: no 0."""
    return tensor.stride() if tensor.layout is torch.strided else [1] * tensor.dim()


def size_hint(size: Any) -> int:
    """A symbolic size as the number that it was traced with; one that only the data will tell counts as 1."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return 1 if size.node.hint is None else int(size.node.hint)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Memory

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def forget_freed_memory(device: torch.device) -> None:
    """Give what a device's allocator keeps for later back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spare_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """What is left beside the most that this process has used at once so far; None where nobody knows.

    Of a host's memory, processes that torchrun has started there leave each other an equal share.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device)
        return free + kept - torch.cuda.max_memory_allocated(device)
    available = _kilobytes(root / "proc/meminfo", "MemAvailable")
    peak, now = (_kilobytes(root / "proc/self/status", key) for key in ("VmHWM", "VmRSS"))
    if device.type != "cpu" or available is None or peak is None or now is None:
        return None
    limit, used = (_text(root / "sys/fs/cgroup" / f"memory.{what}") for what in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return available // int(neighbours if neighbours.isdigit() else 1) - (peak - now)


def _kilobytes(path: Path, key: str) -> int | None:
    """A line `key:  123 kB` of a file of the system, in bytes."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    return None


def processor_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
