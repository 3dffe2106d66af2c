"""Read torch's modes of a thread: what Python or C++ puts around every operator."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_C: Any = torch._C

_INSTEAD_OF_VALUES = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
"""Dispatch modes of torch under which no operator computes on values."""

_HOOKS_MODULES = ("FlopCounterMode", "_FlopCounterMode")
"""Dispatch modes of torch that hook into modules' calls, which a compiled step does not make."""


def default_device() -> torch.device | None:
    """Read the default device; None where nobody has set one, which is told without the microseconds of asking."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def function_mode() -> str | None:
    """Name a TorchFunctionMode around this thread; None if there is none, but for the one of a default device."""
    for place in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(place)
        if not isinstance(mode, DeviceContext):
            return type(mode).__name__
    return None


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
