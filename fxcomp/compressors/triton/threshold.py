"""The values from a given magnitude on: the bits of `fxcomp/compressors/threshold.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.inputs import EncoderInput
from fxcomp.compressors.threshold import Threshold
from fxcomp.compressors.triton.layout import layout_of_survivors
from fxcomp.compressors.triton.send import send
from fxcomp.compressors.triton.sparse import decode_survivors as decode

__all__ = ["decode", "encode"]


def encode(compressor: Threshold, given: EncoderInput, payload: Tensor) -> None:
    cuts = given.bucket.new_full((2, len(given.segments)), compressor.bits, dtype=torch.int32)
    send(given, payload, layout_of_survivors(given.segments, compressor.ratio, given.bucket.device), cuts)
