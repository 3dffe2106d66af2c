"""The values from a given magnitude on: the bits of `fxcomp/compressors/threshold.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.threshold import Threshold
from fxcomp.compressors.triton import survivors
from fxcomp.compressors.triton.blocks import is_aligned
from fxcomp.compressors.triton.select import send


def encode(
    compressor: Threshold,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    if not is_aligned(payload):
        return False
    cuts = bucket.new_full((2, len(segments)), compressor.bits, dtype=torch.int32)
    send(bucket, residual, payload, survivors.layout(segments, compressor.ratio, bucket.device), cuts)
    return True


def decode(
    compressor: Threshold,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    return survivors.decode(payloads, ranks, segments, compressor.ratio, out)
