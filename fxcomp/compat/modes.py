"""Read torch's modes of a thread, what Python or C++ puts around every operator, and its random generators."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import backends
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad, profiler
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _device, deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from fxcomp.compat.symbols import attributes_instead

_C: Any = torch._C

FakeMode = FakeTensorMode
"""The mode under which tensors have shapes and no values."""

Fake = FakeTensor
"""The class of such tensors."""

DispatchMode = TorchDispatchMode

DeviceContext = _device.DeviceContext
"""The function mode of a default device."""


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


_INSTEAD_OF_VALUES = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
"""Dispatch modes of torch under which no operator computes on values."""

_HOOKS_MODULES = ("FlopCounterMode", "_FlopCounterMode")
"""Dispatch modes of torch that hook into modules' calls, which a compiled step does not make."""


def default_device() -> torch.device | None:
    """Read the default device; None where nobody has set one, which is told without the microseconds of asking."""
    return torch.get_default_device() if _C._len_torch_function_stack() else None


def innermost_device() -> torch.device | None:
    """Return the device of the innermost mode of a default device; None outside of any."""
    return _device.CURRENT_DEVICE


def takes_default_device(function: object) -> bool:
    """Return whether a function of torch makes a tensor on the default device where it is given none."""
    return function in _device._device_constructors()


def function_modes() -> list[str]:
    """Name the TorchFunctionModes around this thread, but for the one of a default device."""
    return [type(mode).__name__ for mode in function_mode_stack() if not isinstance(mode, DeviceContext)]


def function_mode_stack() -> list[TorchFunctionMode]:
    """List the function modes around this thread, the outermost first."""
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]


@contextmanager
def outside_function_modes() -> Generator[None]:
    """Read and make fakes past all function modes, each of which Python calls for every attribute of a tensor."""
    with torch._C.DisableTorchFunction():
        yield


def function_mode_in_backward(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Keep a mode around the Python that backward passes call; torch takes it off where a function begins one."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if type(mode).__name__ in function_modes() else mode:
            return run(*args, **kwargs)

    return attributes_instead({torch.autograd: {"_engine_run_backward": run_inside}})


def dispatch_mode() -> str | None:
    """Name a TorchDispatchMode around this thread that is not torch's own, or under which nothing is computed.

    Those of torch that remain count, log or trace memory.
    """
    for mode in dispatch_mode_stack():
        kind: Any = type(mode)
        if not kind.__module__.startswith("torch.") or kind.__name__ in (*_INSTEAD_OF_VALUES, *_HOOKS_MODULES):
            return kind.__name__
    return None


def dispatch_mode_stack() -> list[Any]:
    """List the dispatch modes around this thread, the outermost first."""
    return [_C._get_dispatch_stack_at(place) for place in range(_C._len_torch_dispatch_stack())]


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks for saved tensors are around this thread."""
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_inside_transform() -> bool:
    """Ask if this thread is inside of torch.func's vmap, grad and the like, or of forward-mode differentiation."""
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def subclass_dispatch() -> Hashable:
    """Read whether tensors' subclasses are asked, and how autograd repeats views."""
    is_off = _C._is_torch_function_all_disabled()
    return _C._is_torch_function_enabled(), is_off, _C._is_view_replay_enabled()


def determinism() -> Hashable:
    """Read everything that torch.use_deterministic_algorithms and its neighbours set."""
    return torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


def cpu_libraries() -> Hashable:
    """Read which libraries' kernels the CPU may use."""
    return backends.mkldnn.enabled, backends.mkldnn.deterministic, _C._get_nnpack_enabled()


def attention_order() -> tuple[tuple[int, ...], bool]:
    """Read which of the attention kernels that may run is tried first."""
    return tuple(_C._get_sdp_priority_order()), _C._get_overrideable_sdp_enabled()


_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def float32_precision() -> Hashable:
    """Read in which precision products and convolutions of float32 may be computed."""
    return tuple(_C._get_fp32_precision_getter(*each) for each in _PRECISIONS)  # the public ones take 5 times as long


def is_profiling() -> bool:
    """Ask if torch's profiler runs in this process."""
    return profiler._is_profiler_enabled
