"""Copy gradients to their places in a bucket, scaled on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors import kernels

_KERNELS = {torch.float32: "fxcomp_scale_copy", torch.bfloat16: "fxcomp_bf16_scale_copy"}


def scale_copy(source: Tensor, scale: float, out: Tensor) -> None:
    """Write `source * scale` to `out`, in one pass; `out` is fp32 or bf16 (rounded to nearest, ties to even)."""
    assert source.dtype is torch.float32, f"the source must be fp32, not {source.dtype}"
    assert out.numel() == source.numel(), f"{source.numel()} values do not fit into {out.numel()}"
    assert out.is_contiguous(), "the place in the bucket must be contiguous"
    if kernels.can_run_on(source) and source.is_contiguous() and out.dtype in _KERNELS:
        kernels.run(_KERNELS[out.dtype], source, float(scale), out, out.numel())
    else:
        out.copy_((source * scale).view_as(out) if source.is_contiguous() else (source * scale).reshape(out.shape))
