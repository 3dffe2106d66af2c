"""Run a GPU training script, and trace its step, on a machine without a GPU.

    device arguments         cuda becomes the CPU, or meta for tensors without memory
    x.device, x.is_cuda      cuda:0 for user and library code, real for torch and fxcomp
    in a trace               all tensors are CPU fakes
    torch.cuda               absent_cuda.py
    process groups           one rank
    wrappers                 DistributedDataParallel and torch.compile only call the wrapped object

No tensor is really on cuda: torch's CPU build aborts the process when CUDA fakes are differentiated.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
# Replacement functions keep the original arguments.
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, _meta_registrations, distributed, nn
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.nn.attention import flex_attention
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from fxcomp.compat.absent_cuda import CUDA, DeviceFacts, Refusal, check_index, cuda_instead, names_cuda
from fxcomp.compat.cuda_attention import cuda_attention
from fxcomp.compat.cuda_autocast import cuda_autocast
from fxcomp.compat.dynamo import compiled_functions_eager, uncompiled
from fxcomp.compat.modes import (
    DeviceContext,
    Fake,
    function_mode_in_backward,
    function_mode_stack,
    innermost_device,
    takes_default_device,
)
from fxcomp.compat.optimizers import GradScaler
from fxcomp.compat.source_lines import is_scripts, users_line
from fxcomp.compat.symbols import attributes_instead
from fxcomp.compat.tracing import is_traced_here

_CPU, _META = torch.device("cpu"), torch.device("meta")

_WITHOUT_MEMORY = torch.device("cuda", 0)
"""Device of a meta tensor, as scripts see it. `_real` recognizes this object and returns meta."""

_BASE: Any = Tensor.__base__

_scopes: list[DeviceFacts] = []


def imagined_device() -> DeviceFacts | None:
    """Return the imitated GPU; None outside `as_if_on`."""
    return _scopes[-1] if _scopes else None


@contextmanager
def as_if_on(facts: DeviceFacts, refusal: Refusal) -> Generator[None]:
    """Run scripts and traces as if a GPU were present. Nested scopes have no effect."""
    if _scopes:
        yield
        return
    mode, default, begin = _Placing(refusal), _default_device(), vars(threading.Thread)["_bootstrap_inner"]

    def begin_thread(thread: Any) -> None:
        with _Placing(refusal):  # a new thread does not inherit modes
            begin(thread)

    instead: dict[Any, Mapping[str, Any]] = {
        **_tensors_instead(refusal),
        **_optimizers_instead(),
        DistributedDataParallel: _WRAPPER,
        threading.Thread: {"_bootstrap_inner": begin_thread},
        nn.SyncBatchNorm: {"forward": _BatchNorm.forward},  # with one rank both are equal
    }
    _scopes.append(facts)
    try:
        with (
            attributes_instead(cuda_instead(facts, refusal)),
            attributes_instead(_functions_instead(refusal)),
            attributes_instead(instead),
            cuda_autocast(),
            cuda_attention(facts.capability),
            compiled_functions_eager(),
            _group_of_one(),
            mode,
            function_mode_in_backward(mode),
        ):
            yield
    finally:
        _scopes.pop()
        if _default_device() != default:
            torch.set_default_device(default)


def _default_device() -> torch.device | None:
    return next((mode.device for mode in function_mode_stack() if isinstance(mode, DeviceContext)), None)


def _real(given: Any, refusal: Refusal, like: Any = None) -> Any:
    """Replace CUDA by the CPU, or by meta if `like` is a meta tensor. In a trace, replace CUDA and meta by the CPU."""
    if names_cuda(given):
        check_index(given, refusal)
        is_meta = given is _WITHOUT_MEMORY or (isinstance(like, Tensor) and like.is_meta)
        return _META if is_meta and not is_traced_here() else _CPU
    return _CPU if is_traced_here() and given in ("meta", _META) else given


class _Placing(TorchFunctionMode):
    """Replaces CUDA in device arguments and default devices of torch functions."""

    def __init__(self, refusal: Refusal):
        super().__init__()
        self._refusal = refusal

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs) if kwargs else {}
        if not _scopes:  # in a script's thread that outlives the scope
            return func(*args, **given)
        if func is torch.device:
            return func("cuda", *args) if args and type(args[0]) is int else func(*args, **given)
        if given.get("pin_memory"):
            del given["pin_memory"]  # torch's CPU build has no pinned memory
        device = given.get("device")
        if device is None and takes_default_device(func):
            device = innermost_device()  # the default-device mode runs later
        if device is not None:
            given["device"] = _real(device, self._refusal, args[0] if args else None)
        return func(*args, **given)


def _tensors_instead(refusal: Refusal) -> dict[Any, dict[str, Any]]:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = kwargs.pop("device", args[0] if args else None)
        if not isinstance(named, torch.device | str | int):
            return _BASE.to(tensor, *args, **kwargs)
        place = _real(named, refusal, tensor)
        if place is not named and len(args) < 4 and _moves(tensor):  # the fourth argument is `copy`
            kwargs.setdefault("copy", True)
        return _BASE.to(tensor, place, *args[1:], **kwargs)

    def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return to(tensor, CUDA if device is None else device, non_blocking=non_blocking, **kwargs)

    def type_of(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = _BASE.type(tensor, dtype.replace(".cuda", "") if isinstance(dtype, str) else dtype, *args, **kwargs)
        is_name = dtype is None and is_scripts(sys._getframe(1))
        return found.replace("torch.", "torch.cuda.", 1) if is_name else found

    def describe_tensor(describer: Any, tensor: Tensor, **kwargs: Any) -> Any:
        found = described(describer, tensor, **kwargs)
        if found.device == _META:
            object.__setattr__(found, "device", _CPU)
        return found

    described: Any = MetaTensorDescriber.describe_tensor
    known: dict[str, Any] = {"is_cuda": lambda _: True, "is_cpu": lambda _: False}
    known["device"] = lambda tensor: _WITHOUT_MEMORY if tensor.is_meta else CUDA
    getters = {name: _getter(getattr(_BASE, name).__get__, answer) for name, answer in known.items()}
    methods: dict[str, Any] = {
        "get_device": lambda tensor: 0 if is_scripts(sys._getframe(1)) else _BASE.get_device(tensor),
        "pin_memory": lambda tensor, device=None: tensor,
        "record_stream": lambda tensor, stream: None,
    }
    fakes: Any = vars(Fake)["device"]
    lazy: Any = cast("Any", nn.parameter).UninitializedTensorMixin
    return {
        Tensor: {**getters, **methods, "to": to, "cuda": cuda, "type": type_of},
        torch: {"get_device": methods["get_device"]},
        Fake: {"device": _getter(fakes.fget, lambda _: CUDA).setter(fakes.fset)},
        MetaTensorDescriber: {"describe_tensor": describe_tensor},
        _meta_registrations: {"device_hint": lambda tensor: "cuda"},  # fakes get CUDA's dtypes and layouts
        lazy: {"_allowed_methods": [*lazy._allowed_methods, to, cuda, methods["get_device"]]},  # other methods raise
    }


def _getter(real: Any, answer: Any) -> property:
    return property(lambda tensor: (answer if is_scripts(sys._getframe(1)) else real)(tensor))


def _moves(tensor: Tensor) -> bool:
    """Return whether `tensor.to` copies, as a move to a GPU would. The copy of a view is dense.

    Tensors that require gradients are not copied. In a trace, dense tensors are not copied, because they may be on the
    GPU already.
    """
    if tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    return not is_traced_here() or not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _functions_instead(refusal: Refusal) -> dict[Any, dict[str, Any]]:
    made, move = cast("Any", torch.Generator), cast("Any", nn.Module.to)
    load, default = torch.load, torch.get_default_device

    class Kind(type(made)):  # pyright: ignore[reportUntypedBaseClass]
        def __call__(self, device: Any = _CPU) -> torch.Generator:
            return made(_real(device, refusal))

        def __instancecheck__(self, value: object) -> bool:
            return isinstance(value, made)

    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_cuda = map_location is None or isinstance(map_location, dict) or names_cuda(map_location)
        return load(f, _CPU if is_cuda else map_location, *args, **kwargs)

    def move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return move(module, *(torch.device("cuda", each) if type(each) is int else each for each in args), **kwargs)

    def default_device() -> torch.device:
        modes = [mode for mode in function_mode_stack() if isinstance(mode, DeviceContext)]
        is_cuda = any(mode.device.type == "cuda" for mode in modes[-1:])
        return CUDA if is_cuda and is_scripts(sys._getframe(1)) else default()

    def compile(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    def refuse_flex_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
        raise refusal(
            f"flex_attention is called at {users_line()}, which one graph cannot follow.\n"
            "  Call scaled_dot_product_attention, with a mask where the scores have one."
        )

    functions = {"load": load_here, "get_default_device": default_device, "compile": compile}
    return {
        torch: {**functions, "Generator": Kind("Generator", (made,), {})},
        nn.Module: {"to": move_module},
        flex_attention: {"_validate_device": refuse_flex_attention},
        torch.UntypedStorage: {"cuda": lambda storage, device=None, non_blocking=False: storage},
    }


def _optimizers_instead() -> dict[Any, dict[str, Any]]:
    is_off, begins = torch.cuda.amp.common.amp_definitely_not_available, GradScaler.__init__.__code__
    names = ("_get_capturable_supported_devices", "_get_fused_kernels_supported_devices")
    instead = dict.fromkeys(names, _supported_devices)
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    found = {each: {name: new for name, new in instead.items() if name in vars(each)} for each in modules}
    scaler = {"amp_definitely_not_available": lambda: sys._getframe(1).f_code is not begins and is_off()}
    return {**found, torch.cuda.amp.common: scaler}


def _supported_devices(supports_xla: bool = True) -> list[str]:
    """Return devices of fused and capturable optimizers. TorchScript of torch.distributed.optim calls this function."""
    return ["cuda", "cpu", "meta"]


def _wrap(wrapper: Any, module: nn.Module, *_: Any, **__: Any) -> None:
    nn.Module.__init__(wrapper)
    wrapper.module = module
    wrapper.device, wrapper.device_ids, wrapper.output_device = CUDA, [0], 0


_WRAPPER: Mapping[str, Any] = {
    "__init__": _wrap,
    "forward": lambda self, *args, **kwargs: self.module(*args, **kwargs),
    **dict.fromkeys(("no_sync", "join"), lambda self, *_, **__: nullcontext()),
    **dict.fromkeys(("register_comm_hook", "_set_static_graph"), lambda self, *_, **__: None),
}
"""Methods that replace DistributedDataParallel's and do not communicate."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside data-parallel and torch.compile wrappers."""
    inner: Any = uncompiled(model)
    while isinstance(inner, DistributedDataParallel | DataParallel):
        inner = uncompiled(inner.module)
    return inner


_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@contextmanager
def _group_of_one() -> Generator[None]:
    """Replace process groups by gloo groups of one rank; destroy them on exit."""
    begin, barrier, new, backend = (
        getattr(distributed, name) for name in ("init_process_group", "barrier", "new_group", "get_backend")
    )
    was_begun, environment = distributed.is_initialized(), {**_TORCHRUN, **os.environ}
    instead: dict[str, Any] = {
        "init_process_group": lambda *_, **__: begin("gloo", store=distributed.HashStore(), rank=0, world_size=1),
        "barrier": lambda group=None, async_op=False, device_ids=None: barrier(group, async_op),
        "is_nccl_available": lambda: True,
        "new_group": lambda ranks=None, *_, **__: new(ranks),
        "get_backend": lambda group=None: "nccl" if is_scripts(sys._getframe(1)) else backend(group),
    }
    with attributes_instead({distributed: instead}), mock.patch.dict(os.environ, environment):
        try:
            yield
        finally:
            if distributed.is_initialized() and not was_begun:
                distributed.destroy_process_group()
