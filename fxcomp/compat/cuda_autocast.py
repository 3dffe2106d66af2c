"""Apply CUDA's autocast rules to CPU tensors that represent tensors of an absent GPU.

    with cuda_autocast(), torch.autocast("cuda"):
        layer_norm(x.half())     # in float32, as on CUDA

Lists: "CUDA Op-Specific Behavior" in torch's AMP documentation, and ATen/autocast_mode.h. Kernels registered
for AutocastCPU cast the arguments and call the operator without autocast.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import (
    Tensor,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
    set_autocast_gpu_dtype,
)
from torch._C import _dispatch_get_registrations_for_dispatch_key
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import DefaultDeviceType

from fxcomp.compat.operators import Operator, kernels_instead, named_arguments
from fxcomp.compat.symbols import attributes_instead

# fmt: off
LOWER_PRECISION = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
"""
"""Operators that compute in autocast's dtype."""

CUDNN_RNN = "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data"
"""Operators that run `_cudnn_rnn` on CUDA, where autocast casts input, state and weights (cudnn/AutocastRNN.cpp)."""

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
"""
"""Operators that compute in float32. For the last two, CUDA's autocast calls the overload with a result dtype."""

FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
"""Operators that return float32 unless the call names a dtype."""

WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Operators that compute in the widest dtype of their arguments."""

BANNED = "binary_cross_entropy"
"""Operators that raise under autocast."""
# fmt: on

_USERS = {"cpu": "maia"}
"""Unused device type that stores the user's autocast state of "cpu" inside the context.

The context overwrites the state of "cpu" itself, which kernels read.
"""

_DEVICES = ("cuda", *_USERS, *_USERS.values())


@contextmanager
def cuda_autocast() -> Generator[None]:
    """Under autocast for "cuda" or "cpu", cast CPU tensors by CUDA's lists.

    The default dtype of "cuda" is float16. If autocast is enabled for both devices, the dtype of "cuda" applies.
    """
    assert torch.set_autocast_enabled is set_autocast_enabled, "cuda_autocast is not entered twice"
    before = {device: (is_autocast_enabled(device), get_autocast_dtype(device)) for device in _DEVICES}
    casts = _Casts()
    attributes: dict[Any, dict[str, Any]] = {
        torch: {**_functions(), "clear_autocast_cache": casts.clear},
        torch.autocast: {"__init__": _begin_without_cuda},
        autocast_mode: {"_cast": _cast_on_cpu},
        DefaultDeviceType: {"_default_device_type": "cuda"},  # activation checkpointing repeats its autocast
    }
    try:
        with kernels_instead(_kernels(casts), "AutocastCPU"), attributes_instead(attributes):
            _set(_USERS["cpu"], *before["cpu"])
            _apply()
            yield
    finally:
        casts.clear()
        for device, state in before.items():
            _set(device, *state)


def _kernels(casts: _Casts) -> dict[str, Callable[..., Any]]:
    on_cpu, on_cuda = (
        [name.removeprefix("aten::") for name in _dispatch_get_registrations_for_dispatch_key(key)]
        for key in ("AutocastCPU", "AutocastCUDA")
    )
    kernels = dict.fromkeys(on_cpu, torch.library.fallthrough_kernel)
    for names, run in (
        (f"{LOWER_PRECISION} {CUDNN_RNN}", partial(casts.run, lambda _: _lower())),
        (FLOAT32, partial(casts.run, lambda _: torch.float32)),
        (FLOAT32_RESULT, _with_float32_result), (WIDEST, partial(casts.run, _widest)), (BANNED, _raise),
    ):  # fmt: skip
        known = (name for name in names.split() if name in on_cuda or name in CUDNN_RNN)  # an older torch has fewer
        kernels |= {name: partial(run, _operator(name)) for name in known}
    return kernels


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Casts:
    """Casts arguments, and caches casts of weights as at::autocast::cached_cast does."""

    def __init__(self) -> None:
        self._of_weights: dict[Tensor, Tensor] = {}

    def clear(self) -> None:
        self._of_weights.clear()
        clear_autocast_cache()

    def run(self, choose: Callable[[Any], torch.dtype], operator: Operator, *args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            cast = partial(self._cast, choose((args, kwargs)))
            given, named = pytree.tree_map_only(Tensor, cast, (args, kwargs))
            return operator(*given, **named)

    def _cast(self, dtype: torch.dtype, value: Tensor) -> Tensor:
        if not _is_cast(value) or value.dtype is dtype:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_weight and dtype is _lower() and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if value not in self._of_weights:
            self._of_weights[value] = value.to(dtype)
        return self._of_weights[value]


@contextmanager
def _without_autocast() -> Generator[None]:
    is_enabled = is_autocast_enabled("cpu")
    set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        set_autocast_enabled("cpu", is_enabled)


def _is_cast(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return is_number and value.device.type == "cpu"


def _lower() -> torch.dtype:
    return get_autocast_dtype("cpu")


def _widest(values: Any) -> torch.dtype:
    types = {value.dtype for value in pytree.tree_leaves(values) if _is_cast(value)}
    if types - {_lower(), torch.float32}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # torch's text
    return torch.float32 if torch.float32 in types else _lower()


def _with_float32_result(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    given = named_arguments(operator, args, kwargs)
    if given.get("dtype") is None and _is_cast(given["self"]):
        given["dtype"] = torch.float32
    with _without_autocast():
        return operator(**given)


def _raise(*_: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use"
        " binary_cross_entropy_with_logits or BCEWithLogitsLoss, without the sigmoid before."
    )


# State of autocast


def _functions() -> dict[str, Callable[..., Any]]:
    of_device = (is_autocast_enabled, set_autocast_enabled, get_autocast_dtype, set_autocast_dtype)
    on_cpu = {each.__name__.replace("autocast", "autocast_cpu"): partial(_call, each, "cpu") for each in of_device}
    return on_cpu | {each.__name__: partial(_call, each) for each in (*of_device, set_autocast_gpu_dtype)}


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given, named = pytree.tree_map_only(str, lambda device: _USERS.get(device, device), (args, kwargs))
    result = function(*given, **named)
    _apply()
    return result


def _apply() -> None:
    """Set the state that kernels read: the state of "cuda" if enabled, else the user's state of "cpu"."""
    device = "cuda" if is_autocast_enabled("cuda") else _USERS["cpu"]
    _set("cpu", is_autocast_enabled(device), get_autocast_dtype(device))


def _set(device: str, enabled: bool, dtype: torch.dtype) -> None:
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)


_BEGIN, _CAST = torch.autocast.__init__, autocast_mode._cast


def _begin_without_cuda(
    self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
) -> None:
    _BEGIN(self, device_type, dtype, enabled and device_type != "cuda", cache_enabled)
    self._enabled = self._enabled or (enabled and device_type == "cuda")


def _cast_on_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast inputs of torch.amp.custom_fwd, which are CPU tensors also for "cuda"."""
    return _CAST(value, "cpu" if device_type == "cuda" else device_type, dtype)
