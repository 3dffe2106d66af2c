"""Copy gradients to their places in a bucket, scaled on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors import kernels
from fxcomp.errors import BadTensor

_KERNELS = {torch.float32: "fxcomp_scale_copy", torch.bfloat16: "fxcomp_bf16_scale_copy"}


def scale_copy(source: Tensor, scale: float, out: Tensor) -> None:
    """Write `source * scale` to `out`, in one pass; `out` is fp32 or bf16 (rounded to nearest, ties to even)."""
    if source.dtype is not torch.float32:
        raise BadTensor(f"a scaled copy is made of fp32, not of {source.dtype}.\n  Convert it with .float().")
    if out.numel() != source.numel() or out.device != source.device or not out.is_contiguous():
        raise BadTensor(
            f"{source.numel()} values on {source.device} cannot be copied to {_describe(out)}.\n"
            "  Give a contiguous tensor of as many elements on the same device."
        )
    if kernels.can_run_on(source) and source.is_contiguous() and out.dtype in _KERNELS:
        kernels.run(_KERNELS[out.dtype], source, float(scale), out, out.numel())
    else:
        out.copy_((source * scale).view_as(out) if source.is_contiguous() else (source * scale).reshape(out.shape))


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else "scattered"
    return f"{tensor.numel()} {layout} elements on {tensor.device}"
