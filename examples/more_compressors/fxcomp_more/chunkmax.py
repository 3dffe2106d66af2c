"""Send the value of largest magnitude of each chunk, with its place in the chunk.

    chunk   = ceil(1 / ratio) values; the last of a segment may be shorter
    m       = ceil(n / chunk)
    decoded = v at the place of largest |v| in each chunk, 0 elsewhere

Payload, as bytes: for each segment its m fp32 values, then m places within their chunks, one byte each for chunks of up
to 256 values and two beyond, filled up to a multiple of four. 5m bytes, or 6m.

Of equal magnitudes the lower place goes. Magnitudes are compared as unsigned bit patterns, so whatever is not finite
counts as largest: the first such value of a chunk is sent (a NaN before an infinity). The residual is 0 where a value
was sent, v elsewhere, and stays as it was where v is not finite.

It needs one pass and no threshold, where top-k needs to know all values. What is left out is at most 1 - 1/chunk of the
squared norm: at 1 % it is 0.92 for Gaussian values, 0.86 for Laplace and 0.12 for a log-normal mixture of scales, where
top-k has 0.92, 0.84 and 0.05. Where the energy of a parameter is concentrated in few rows, top-k is better.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from fxcomp.compressors import (
    Bias,
    Compressed,
    Compressor,
    DecoderInput,
    EncoderInput,
    Facts,
    Feedback,
    Parameter,
    register,
)
from fxcomp.compressors.base import mean_over_ranks
from fxcomp.compressors.block_codes import count_blocks, place_of_largest, split, to_blocks
from fxcomp.compressors.inputs import bad_payload
from fxcomp.compressors.topk import as_fraction, fill_up

_PLACES = 1 << 16  # in the longest chunk


def _decompress_one(payload: Tensor, segments: Sequence[int], chunk: int) -> Tensor:
    out = [torch.empty(0, dtype=torch.float32, device=payload.device)]
    for n, section in zip(segments, split(payload, [_bytes_of(n, chunk) for n in segments]), strict=True):
        m = count_blocks((n,), chunk)
        values = section[: 4 * m].clone().view(torch.float32).view(m, 1)
        if chunk <= 256:
            places = section[4 * m : 5 * m].long()
        else:
            places = section[4 * m : 6 * m].clone().view(torch.int16).long() & 0xFFFF
        # Adding to zero, as the mean over ranks does, makes a sent -0 a 0.
        out.append(values.new_zeros(m, chunk).scatter_add_(1, places.view(m, 1), values).flatten()[:n])
    return torch.cat(out)


def _bytes_of(n: int, chunk: int) -> int:
    m = count_blocks((n,), chunk)
    return 4 * m + -(-m * (1 if chunk <= 256 else 2) // 4) * 4


@register
@dataclass(frozen=True, slots=True)
class ChunkMax(Compressor):
    """Nearly top-k, at the speed of memory; only with error feedback."""

    ratio: float

    facts: ClassVar[Facts] = Facts(
        name="chunkmax",
        summary="the value of largest magnitude of each chunk",
        payload="5m where 1/ratio ≤ 256, 6m beyond, filled up to four; m = ⌈n/⌈1/ratio⌉⌉",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        parameters=(Parameter("ratio", "share of values sent", 1 / _PLACES, 0.5),),
        use="Slow links and few ranks: about half of top-k's time, and its quality where energy is spread.",
        avoid="Where a few places of a parameter hold most of the energy: embeddings, and the kernels of convolutions.",
        source="local selection of ScaleCom, Chen et al. 2020",
    )

    @property
    def grain(self) -> int:
        return self.chunk

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(_bytes_of(n, self.chunk) for n in segments)

    @property
    def chunk(self) -> int:
        """Values of which one is sent, in exact arithmetic."""
        part, whole = as_fraction(self.ratio)
        return -(-whole // part)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        chunk = self.chunk
        sections = [given.bucket.new_empty(0, dtype=torch.uint8)]
        left_out = [given.bucket.new_empty(0)]
        for piece in given.pieces:
            rows = to_blocks(piece, (len(piece),), chunk)
            places = place_of_largest(rows)
            width = torch.uint8 if chunk <= 256 else torch.int16
            values = rows.gather(1, places).flatten()
            sections += [values.view(torch.uint8), fill_up(places.flatten().to(width).view(torch.uint8))]
            left_out.append(rows.scatter(1, places, 0.0).flatten()[: len(piece)])
        if given.residual is None:
            return Compressed(torch.cat(sections))
        is_finite = given.value.isfinite()
        return Compressed(torch.cat(sections), torch.where(is_finite, torch.cat(left_out), given.residual))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        segments = received.segments
        return mean_over_ranks([_decompress_one(payload, segments, self.chunk) for payload in received.of_ranks])

    # The kernel. fxcomp has checked the tensors' sizes, types, devices and layouts.

    def encode_on_cpu(self, given: EncoderInput, payload: Tensor) -> bool:
        library = _library()
        if library is None:
            return False
        library.chunkmax_encode(*map(_pointer, (given.bucket, given.residual, payload)), *self._shape(given.segments))
        return True

    def decode_on_cpu(self, received: DecoderInput, out: Tensor) -> bool:
        library = _library()
        if library is None:
            return False
        ranks, segments = received.ranks, received.segments
        tensors = _pointer(received.payloads), ctypes.c_int64(ranks), _pointer(out)
        if not library.chunkmax_decode(*tensors, *self._shape(segments)):
            raise bad_payload(ranks, segments)
        return True

    def _shape(self, segments: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_int64], ctypes.c_int64, ctypes.c_int64]:
        """The kernels' arguments after the tensors."""
        count = len(segments)
        return (ctypes.c_int64 * count)(*segments), ctypes.c_int64(count), ctypes.c_int64(self.chunk)


@cache
def _library() -> ctypes.CDLL | None:
    """Load the library that setup.py builds; None where it was not built."""
    spec = find_spec("fxcomp_more._chunkmax")
    return ctypes.CDLL(spec.origin) if spec is not None and spec.origin is not None else None


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
