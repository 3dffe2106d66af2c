"""Encode a bucket of one parameter, and decode it."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors import Compressor


def encode(compressor: Compressor, bucket: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the payload, and replace the residual; for a compressor without state."""
    payload = torch.full((compressor.payload_elements((len(bucket),)),), 77, dtype=compressor.payload_dtype)
    compressor.encode(bucket, residual, payload, (len(bucket),))
    return payload


def decode(compressor: Compressor, payload: Tensor, size: int) -> Tensor:
    out = torch.full((size,), 77.0)
    compressor.decode(payload, 1, (size,), out)
    return out
