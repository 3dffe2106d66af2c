"""Torch's settings and modes around a step: those that tracing bakes in, and those under which no step is captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from fxcomp import compat
from fxcomp.errors import UnsupportedMode

READ: dict[str, Callable[[], Hashable]] = {
    "autocast on the CPU": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autocast on CUDA": lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    "the cache of autocast": torch.is_autocast_cache_enabled,
    "the default dtype": torch.get_default_dtype,
    "the default device": compat.default_device,
    "torch.use_deterministic_algorithms": compat.determinism,
    "torch.backends.cudnn": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic),
    "the precision of float32": compat.float32_precision,
    "which libraries the CPU may use": compat.cpu_libraries,
    "which kernels attention may use": lambda: (
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
    "the order of attention's kernels": compat.attention_order,
    "how subclasses of tensors are asked": compat.subclass_dispatch,
}
"""A change of one of these is captured again."""


def surroundings() -> tuple[Hashable, ...]:
    """Read the settings that tracing bakes in. Raises UnsupportedMode."""
    if mode := compat.function_mode():
        _refuse(f"the TorchFunctionMode {mode} is", "Enter it inside loss_fn, where it is traced with the rest.")
    if mode := compat.dispatch_mode():
        _refuse(f"the TorchDispatchMode {mode} is", "Enter it inside loss_fn, or leave it while the step runs.")
    if compat.has_saved_tensor_hooks():
        _refuse(
            "hooks for saved tensors (torch.autograd.graph) are",
            "Enter them inside loss_fn, around the forward pass: there they are traced.",
        )
    if compat.is_inside_transform():
        _refuse("a transformation of torch.func, or forward-mode differentiation, is", "Call the step outside of it.")
    if torch.is_anomaly_enabled():
        _refuse(
            "anomaly detection (torch.autograd.set_detect_anomaly) is",
            "It watches autograd's backward pass, which a compiled step does not run. Switch it off; to find a gradient"
            " that is not finite, run loss_fn eagerly under it with this batch.",
        )
    return tuple([read() for read in READ.values()])


def _refuse(what: str, remedy: str) -> None:
    raise UnsupportedMode(f"{what} on around the compiled step, which would not take part in it.\n  {remedy}")
