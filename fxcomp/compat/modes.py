"""torch's thread-local modes and settings around operators, and its random generators."""

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

Fake = FakeTensor
"""Class of tensors with a shape and no values."""

DispatchMode = TorchDispatchMode

DeviceContext = _device.DeviceContext


def device_of_default(generator: torch.Generator) -> torch.device | None:
    """Return the device whose default generator is given; None for other generators."""
    if is_same_generator(generator, torch.default_generator):
        return torch.device("cpu")
    places = [i for i, default in enumerate(torch.cuda.default_generators) if is_same_generator(default, generator)]
    return torch.device("cuda", places[0]) if places else None


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Return whether two objects wrap one generator. Operators return generators in new objects."""
    return _place(one) == _place(other)


def _place(generator: Any) -> int:
    return generator._cdata


def generators_in(graph: GraphModule) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}

    def note(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            found[_place(value)] = value
        return value

    for node in graph.graph.nodes:
        map_aggregate((node.args, node.kwargs) if node.op != "get_attr" else getattr(graph, str(node.target)), note)
    return list(found.values())


_INSTEAD_OF_VALUES = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
"""torch's dispatch modes under which operators compute no values."""

_HOOKS_MODULES = ("FlopCounterMode", "_FlopCounterMode")
"""torch's dispatch modes that hook module calls, which a compiled step does not make."""


def default_device() -> torch.device | None:
    """Return the default device; None if no function mode is active: a default device is one."""
    return torch.get_default_device() if _C._len_torch_function_stack() else None


def innermost_device() -> torch.device | None:
    return _device.CURRENT_DEVICE


def takes_default_device(function: object) -> bool:
    return function in _device._device_constructors()


def function_modes() -> list[str]:
    """Return the names of active TorchFunctionModes except a default device's."""
    return [type(mode).__name__ for mode in function_mode_stack() if not isinstance(mode, DeviceContext)]


def function_mode_stack() -> list[TorchFunctionMode]:
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]


@contextmanager
def outside_function_modes() -> Generator[None]:
    """Disable function modes, which Python calls for every tensor attribute."""
    with torch._C.DisableTorchFunction():
        yield


def function_mode_in_backward(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Keep a mode active in Python code of backward passes. torch disables function modes during backward()."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if type(mode).__name__ in function_modes() else mode:
            return run(*args, **kwargs)

    return attributes_instead({torch.autograd: {"_engine_run_backward": run_inside}})


def dispatch_mode() -> str | None:
    """Return the name of an active dispatch mode, or None.

    Ignore torch's modes, such as loggers, except modes that compute no values or hook modules.
    """
    for mode in dispatch_mode_stack():
        kind: Any = type(mode)
        if not kind.__module__.startswith("torch.") or kind.__name__ in (*_INSTEAD_OF_VALUES, *_HOOKS_MODULES):
            return kind.__name__
    return None


def dispatch_mode_stack() -> list[Any]:
    return [_C._get_dispatch_stack_at(place) for place in range(_C._len_torch_dispatch_stack())]


def has_saved_tensor_hooks() -> bool:
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_inside_transform() -> bool:
    """Return whether torch.func transforms or forward-mode differentiation are active."""
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def subclass_dispatch() -> Hashable:
    """Return torch-function settings and whether autograd replays views."""
    is_off = _C._is_torch_function_all_disabled()
    return _C._is_torch_function_enabled(), is_off, _C._is_view_replay_enabled()


def determinism() -> Hashable:
    return torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


def cpu_libraries() -> Hashable:
    return backends.mkldnn.enabled, backends.mkldnn.deterministic, _C._get_nnpack_enabled()


def attention_order() -> tuple[tuple[int, ...], bool]:
    return tuple(_C._get_sdp_priority_order()), _C._get_overrideable_sdp_enabled()


_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def float32_precision() -> Hashable:
    return tuple(_C._get_fp32_precision_getter(*each) for each in _PRECISIONS)  # public getters take 5 times as long


def is_profiling() -> bool:
    return profiler._is_profiler_enabled
