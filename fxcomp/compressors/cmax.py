"""Send the index and sign of the largest of every N values, and one fp32 scale per parameter.

    chunk   = N values, a power of two; the last of a segment may be shorter
    m       = ceil(n / N) chunks for n values
    scale   = mean of the chunks' largest |v|, without chunks of zeros
    decoded = sign(v) * scale at the index of the largest |v| in each chunk, 0 elsewhere

Payload, as bytes: for each segment the fp32 scale, then m codes of log2(N) + 1 bits: the index in the lowest bits, the
sign above (1 if v is negative). Codes are split into planes of 8, 4, 2 or 1 bits: five bits become a plane of four and
a plane of one. Planes are packed as in `block_codes.py`. Zeros pad a segment's bytes to a multiple of four.

A chunk of zeros must decode to zeros, because an embedding row without a gradient must not change. So a segment with
chunks of zeros has a negative scale, and the code that `_drawn` hashes from the scale means zero. Another chunk with
this code also decodes to zeros, and the chunk's value stays in the residual. The next scale gives another zero code.

The scale minimises the squared error of the sent values. The error of all values, relative to |v|^2, is 0.60 for
Gaussian values at N = 8, 0.73 at N = 16.

Of equal magnitudes the lowest index is sent. If the sum of a segment's largest magnitudes is not finite, the scale is
NaN, the codes are 0, the segment decodes to NaN, and the residual stays unchanged. The sum has a fixed order: over each
run of 1024 chunks in 64 lanes (partial sums), then over runs in 64 lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.block_codes import (
    WIDTHS,
    count_blocks,
    pack,
    place_of_largest,
    split,
    sum_in_lanes,
    to_blocks,
    unpack,
)
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.errors import BadOption

RUN = 1024
"""Chunks per run; the same number as in csrc/cmax.cpp."""


def _sum(values: Tensor) -> Tensor:
    runs = sum_in_lanes(pad(values, (0, -len(values) % RUN)).view(-1, RUN))
    return sum_in_lanes(runs.view(1, -1)).flatten()


def _drawn(scale: Tensor, bits: int) -> Tensor:
    """Hash a scale's magnitude to `bits` bits."""
    return ((scale.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) * 2654435769 & 0xFFFFFFFF) >> (32 - bits)


@register
@dataclass(frozen=True, slots=True)
class CMax(Compressor):
    """Index and sign of each chunk's largest value: 1/100 of fp32's bytes for chunks of 16 values, 1/60 for 8."""

    chunk: int = 16

    facts: ClassVar[Facts] = Facts(
        name="cmax",
        summary="index and sign of the largest value of each chunk, one scale per parameter",
        payload="4 + Σ_b ⌈mb/8⌉, up to a multiple of 4; m = ⌈n/chunk⌉ codes of log₂(chunk) + 1 bits, split into planes"
        " of b bits, b a power of two (5 = 4 + 1)",
        is_joined=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        passes=2,
        parameters=(Parameter("chunk", "values per sent value, a power of two", 2, 128),),
        grain="chunk",
        use="Momenta instead of gradients, on slow links, in two shots.",
        avoid="Gradients before Adam.",
        source="the largest of each chunk as in ScaleCom, Chen et al. 2020; signs with a scale as in EF-SignSGD,"
        " Karimireddy et al. 2019; momenta as in DeMo, Peng et al. 2024",
    )

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        if self.chunk & (self.chunk - 1):
            raise BadOption(f"{self.name} needs a chunk that is a power of two, such as 8 or 16, not {self.chunk}")

    @property
    def bits(self) -> int:
        return self.chunk.bit_length()

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(map(self._bytes_of, segments))

    def compress_reference(self, given: EncoderInput) -> Compressed:
        sections = [given.bucket.new_empty(0, dtype=torch.uint8)]
        left_out = [given.bucket.new_empty(0)]
        residual = given.bucket if given.residual is None else given.residual
        for piece, old in zip(given.pieces, split(residual, given.segments), strict=True):
            if not len(piece):
                continue
            scale, codes, decoded = self._encode(to_blocks(piece, (len(piece),), self.chunk))
            section = torch.cat([scale.view(torch.uint8), *self._planes(codes)])
            sections.append(pad(section, (0, -len(section) % 4)))
            left_out.append(torch.where(scale.isfinite(), piece - decoded.flatten()[: len(piece)], old))
        payload = torch.cat(sections)
        return Compressed(payload) if given.residual is None else Compressed(payload, torch.cat(left_out))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return mean_over_ranks([self._decompress_one(payload, received.segments) for payload in received.of_ranks])

    def _encode(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a segment's signed scale, codes and decoded values. A row is a chunk."""
        places = place_of_largest(rows)
        largest = rows.gather(1, places).flatten()
        is_zero = largest == 0
        scale = _sum(largest.abs()) / (~is_zero).sum().clamp_min(1)
        is_finite = scale.isfinite()
        scale = torch.where(is_finite, scale, torch.nan)
        scale = torch.where(is_finite & is_zero.any(), -scale, scale)
        codes = places.flatten() + (largest < 0) * self.chunk
        codes = torch.where(is_zero, self._nothing(scale), codes)
        codes = torch.where(is_finite, codes, 0)
        return scale, codes, self._decode(scale, codes)

    def _decode(self, scale: Tensor, codes: Tensor) -> Tensor:
        size = scale.abs()
        values = torch.where(codes >= self.chunk, -size, size)
        values = torch.where(codes == self._nothing(scale), 0.0, values)
        places = (codes % self.chunk).view(-1, 1)
        rows = values.new_zeros(len(codes), self.chunk).scatter_add_(1, places, values.view(-1, 1))
        return torch.where(scale.isfinite(), rows, torch.nan)

    def _nothing(self, scale: Tensor) -> Tensor:
        """Return the code of a chunk of zeros; without such chunks, a number that is no code."""
        return torch.where(scale.signbit(), _drawn(scale, self.bits), 2 * self.chunk)

    def _decompress_one(self, payload: Tensor, segments: Sequence[int]) -> Tensor:
        out = [torch.empty(0, dtype=torch.float32, device=payload.device)]
        for n, section in zip(segments, split(payload, [self._bytes_of(n) for n in segments]), strict=True):
            if n:
                scale = section[:4].clone().view(torch.float32)
                out.append(self._decode(scale, self._codes(section[4:], n)).flatten()[:n])
        return torch.cat(out)

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(width for width in reversed(WIDTHS) if self.bits & width)

    def _plane_bytes(self, m: int) -> list[int]:
        return [-(-m * width // 8) for width in self._widths]

    def _bytes_of(self, n: int) -> int:
        return -(-(4 + sum(self._plane_bytes(count_blocks((n,), self.chunk)))) // 4) * 4 if n else 0

    def _planes(self, codes: Tensor) -> list[Tensor]:
        planes: list[Tensor] = []
        for width in self._widths:
            planes.append(pack((codes & (1 << width) - 1).to(torch.uint8), (len(codes),), width))
            codes = codes >> width
        return planes

    def _codes(self, planes: Tensor, n: int) -> Tensor:
        m, shift = count_blocks((n,), self.chunk), 0
        codes = torch.zeros(m, dtype=torch.int64, device=planes.device)
        sizes = self._plane_bytes(m)
        for width, plane in zip(self._widths, split(planes[: sum(sizes)], sizes), strict=True):
            codes = codes | unpack(plane, (m,), width).long() << shift
            shift += width
        return codes
