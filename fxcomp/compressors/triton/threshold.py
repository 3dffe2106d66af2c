"""The values from a given magnitude on: the bits of `fxcomp/compressors/threshold.py`."""

from __future__ import annotations

import torch

from fxcomp.compressors.threshold import Threshold
from fxcomp.compressors.triton.calls import Encoding
from fxcomp.compressors.triton.layout import layout_of_survivors
from fxcomp.compressors.triton.send import send
from fxcomp.compressors.triton.sparse import decode_survivors as decode

__all__ = ["decode", "encode"]


def encode(call: Encoding[Threshold]) -> None:
    cuts = call.bucket.new_full((2, len(call.segments)), call.compressor.bits, dtype=torch.int32)
    send(call, layout_of_survivors(call.segments, call.compressor.ratio, call.bucket.device), cuts)
