"""Read torch's modes of a thread, what Python or C++ puts around every operator, and its random generators.

`torch.Generator` is a C type: a method that somebody has in hand already (`torch.default_generator`, an attribute of a
model) is looked up in the type's own table at each call, and nowhere else can all calls be seen.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The table of a C type is private.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad, profiler
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from fxcomp.compat.symbols import attributes_instead
from fxcomp.compat.tracing import is_traced_here

_METHODS = (
    *("manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state"),
    *("graphsafe_get_state", "graphsafe_set_state", "__reduce__", "__setstate__"),
)


@contextmanager
def calls_of_generators(instead: Callable[[torch.Generator, str, Sequence[Any]], Any]) -> Generator[None]:
    """While open, `instead` is called with a generator, a method's name and arguments wherever this code is traced."""
    table = vars(torch._C.Generator)
    with methods_instead(torch._C.Generator, {n: _instead_of(n, table[n], instead) for n in _METHODS if n in table}):
        yield


@contextmanager
def methods_instead(kind: type, methods: Mapping[str, Any]) -> Generator[None]:
    """Give a C type other methods meanwhile, in its own table."""
    table: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    before = {name: table[name] for name in methods}
    try:
        table.update(methods)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
        yield
    finally:
        table.update(before)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _instead_of(name: str, method: Any, instead: Callable[[torch.Generator, str, Sequence[Any]], Any]) -> Any:
    def called(generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
        if not is_traced_here():  # another thread, or values that are computed aside
            return method(generator, *args, **kwargs)
        with _dispatched():
            return instead(generator, name, (*args, *kwargs.values()))

    return called


def _dispatched() -> Any:
    """Let modes see operators, also where torch's `freeze_rng_state` hides a state from them."""
    c: Any = torch._C
    hidden = c._dispatch_tls_local_exclude_set()
    for key in (c.DispatchKey.Python, c.DispatchKey.PythonTLSSnapshot):
        hidden = hidden.remove(key)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), hidden)


def device_of_default(generator: torch.Generator) -> torch.device | None:
    """Find the device whose default generator this is; None for any other."""
    if is_same_generator(generator, torch.default_generator):
        return torch.device("cpu")
    places = [i for i, default in enumerate(torch.cuda.default_generators) if is_same_generator(default, generator)]
    return torch.device("cuda", places[0]) if places else None


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Compare what two objects stand for: an operator's argument comes back in another object."""
    return _place(one) == _place(other)


def _place(generator: Any) -> int:
    return generator._cdata


def generators_in(graph: GraphModule) -> list[torch.Generator]:
    """List the generators that a graph names, each once."""
    found: dict[int, torch.Generator] = {}

    def note(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            found[_place(value)] = value
        return value

    for node in graph.graph.nodes:
        map_aggregate((node.args, node.kwargs) if node.op != "get_attr" else getattr(graph, str(node.target)), note)
    return list(found.values())


def is_as_made(generator: torch.Generator) -> bool:
    """Ask if a generator was never seeded nor drawn from."""
    return torch.equal(generator.get_state(), torch._C.Generator(generator.device).get_state())


_C: Any = torch._C

_INSTEAD_OF_VALUES = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
"""Dispatch modes of torch under which no operator computes on values."""

_HOOKS_MODULES = ("FlopCounterMode", "_FlopCounterMode")
"""Dispatch modes of torch that hook into modules' calls, which a compiled step does not make."""


def default_device() -> torch.device | None:
    """Read the default device; None where nobody has set one, which is told without the microseconds of asking."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def function_modes() -> list[str]:
    """Name the TorchFunctionModes around this thread, but for the one of a default device."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


@contextmanager
def function_mode_in_backward(mode: TorchFunctionMode) -> Generator[None]:
    """Keep a mode around the Python that backward passes call; torch takes it off where a function begins one."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if type(mode).__name__ in function_modes() else mode:
            return run(*args, **kwargs)

    with attributes_instead({torch.autograd: {"_engine_run_backward": run_inside}}):
        yield


def dispatch_mode() -> str | None:
    """Name a TorchDispatchMode around this thread that is not torch's own, or under which nothing is computed.

    Those of torch that remain count, log or trace memory.
    """
    for place in range(torch._C._len_torch_dispatch_stack()):
        kind: Any = type(torch._C._get_dispatch_stack_at(place))
        if not kind.__module__.startswith("torch.") or kind.__name__ in (*_INSTEAD_OF_VALUES, *_HOOKS_MODULES):
            return kind.__name__
    return None


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks for saved tensors are around this thread."""
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_inside_transform() -> bool:
    """Ask if this thread is inside of torch.func's vmap, grad and the like, or of forward-mode differentiation."""
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def subclass_dispatch() -> Hashable:
    """Read whether tensors' subclasses are asked, and how autograd repeats views."""
    is_off = torch._C._is_torch_function_all_disabled()
    return torch._C._is_torch_function_enabled(), is_off, torch._C._is_view_replay_enabled()


def determinism() -> Hashable:
    """Read everything that torch.use_deterministic_algorithms and its neighbours set."""
    return torch.get_deterministic_debug_mode(), torch._C._get_deterministic_fill_uninitialized_memory()


def cpu_libraries() -> Hashable:
    """Read which libraries' kernels the CPU may use."""
    return torch._C._get_mkldnn_enabled(), torch._C._get_mkldnn_deterministic(), torch._C._get_nnpack_enabled()


def attention_order() -> Hashable:
    """Read which of the attention kernels that may run is tried first."""
    return tuple(torch._C._get_sdp_priority_order()), torch._C._get_overrideable_sdp_enabled()


_GETTER: Any = getattr(torch._C, "_get_fp32_precision_getter", None)

_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def float32_precision() -> Hashable:
    """Read in which precision products and convolutions of float32 may be computed."""
    if _GETTER is None:
        return torch.get_float32_matmul_precision(), torch._C._get_cudnn_allow_tf32()
    return tuple(_GETTER(*each) for each in _PRECISIONS)


def is_profiling() -> bool:
    """Ask if torch's profiler runs in this process."""
    return profiler._is_profiler_enabled
