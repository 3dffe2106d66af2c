"""Trace scaled_dot_product_attention on CPU fakes as the operator that a GPU would choose.

    F.scaled_dot_product_attention(q, k, v)     of bf16 fakes
 -->
    aten._scaled_dot_product_flash_attention(q, k, v, ...)

The choice follows torch's select_sdp_backend (ATen/native/transformers: cuda/sdp_utils.cpp, sdp_utils_cpp.h), the calls
follow attention.cpp. Real tensors use the CPU kernel.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend

from fxcomp.compat.modes import attention_order
from fxcomp.compat.operators import kernels_instead
from fxcomp.compat.tracing import is_traced_here

aten = torch.ops.aten

_FLASH, _EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_CUDNN, _MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH

_SMALL = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with little shared memory, where the flash kernel has no backward pass for wide heads."""


@contextmanager
def cuda_attention(capability: tuple[int, int]) -> Generator[None]:
    """Replace attention on fakes by the GPU's operator."""
    on_cpu = torch.library.get_kernel(aten.scaled_dot_product_attention.default, "CPU")

    def attend(keys: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_wrong = any(each.dtype != q.dtype or each.is_nested or each.dim() < 2 for each in (q, k, v))
        if is_wrong or not is_traced_here():
            return on_cpu.call_boxed(keys, q, k, v, *args, **kwargs)
        # torch prefers cuDNN from 9.15.1 on, which its CUDA wheels include. A script's own order has precedence.
        is_usual = attention_order() == usual and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        first = [_CUDNN] if capability[0] in (9, 10) and is_usual else []
        return _attend(capability, first, q, k, v, *args, **kwargs)

    usual = attention_order()
    with kernels_instead({"scaled_dot_product_attention": attend}, "CompositeImplicitAutograd", with_keyset=True):
        yield


def _attend(
    capability: tuple[int, int], first: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
    p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    kernel = _choose(capability, first, q, k, v, mask, p, is_causal=is_causal, enable_gqa=enable_gqa, trains=trains)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, q.new_zeros(()), q.new_full((), float("-inf")))
    if kernel == _FLASH:
        width = q.shape[-1]
        q, k, v = (functional.pad(each, (0, -width % 8)) if width % 8 else each for each in (q, k, v))
        scale = width**-0.5 if scale is None else scale
        return aten._scaled_dot_product_flash_attention(q, k, v, p, is_causal, scale=scale)[0][..., :width]
    if kernel == _MATH:
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if kernel == _EFFICIENT and mask is not None:
        if any(step % 8 for step in mask.stride()[:-1]):
            mask = functional.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*q.shape[:3], k.shape[2])
    fused = getattr(aten, f"_scaled_dot_product_{'cudnn' if kernel == _CUDNN else 'efficient'}_attention")
    return fused(q, k, v, mask, trains, p, is_causal, scale=scale)[0]


def _choose(
    capability: tuple[int, int], first: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    p: float, *, is_causal: bool, enable_gqa: bool, trains: bool,
) -> SDPBackend:  # fmt: skip
    """Return the first kernel, in `first` and then in torch's order, that is enabled and supports this call.

    Raise RuntimeError, like torch, if no kernel does.
    """
    can = {_MATH: cuda.math_sdp_enabled()}
    is_plain = q.dim() == k.dim() == v.dim() == 4 and (mask is None or mask.stride(-1) == 1)
    if is_plain and q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] > 0 and k.shape[2] > 0:
        (_, h, n, d), (_, h_k, s, d_k), (_, h_v, _, d_v) = q.shape, k.shape, v.shape
        is_half, is_new = q.dtype in (torch.float16, torch.bfloat16), capability[0] >= 8
        steps = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        heads = h % h_k == 0 and h_k == h_v if enable_gqa else h == h_k == h_v
        on_tensor_cores = is_half and is_new and heads and (steps or d == 1)
        unit = 16 // q.element_size() if is_new or (capability[0] == 7 and is_half) else 1
        fits_small = not trains or capability not in _SMALL or d <= 192 or (d > 224 and p == 0)
        can[_FLASH] = (
            cuda.flash_sdp_enabled() and on_tensor_cores and mask is None and d == d_k == d_v and d <= 256
            and (not is_causal or n == s) and fits_small
        )  # fmt: skip
        can[_EFFICIENT] = (
            cuda.mem_efficient_sdp_enabled() and steps and h == h_k == h_v and d == d_k and d % unit == 0
            and d_v % unit == 0 and (q.dtype in (torch.float16, torch.float32) or (is_half and is_new))
        )  # fmt: skip
        can[_CUDNN] = (
            cuda.cudnn_sdp_enabled() and on_tensor_cores and max(d, d_v) <= 128 and d % 8 == 0 and d_v % 8 == 0
            and s != 1 and (p == 0 or n != 1) and (16 * p).is_integer() and (mask is None or mask.dim() in (2, 4))
            and not (mask is not None and mask.requires_grad) and not torch.are_deterministic_algorithms_enabled()
        )  # fmt: skip
    found = next((each for each in (*first, *map(SDPBackend, attention_order()[0])) if can.get(each)), None)
    if found is None:
        raise RuntimeError("No available kernel. Aborting execution.")  # torch's text
    return found
