"""Shared code of int8, int4, int2 and sign, which send a scale per block and a code of a few bits per value.

    scale   = f(values of a block)
    code    = f(value, scale of its block), b bits
    decoded = f(code, scale of its block)

Payload, as bytes: the fp32 scales of all blocks; the codes, 8 / b per byte, the first in the lowest bits; and zeros up
to a multiple of four, for alignment. Each segment starts a new block and a new byte of codes, and its last block may be
short.

A block whose scale is not finite gets scale NaN and codes 0: it decodes to NaN, and its residual stays unchanged. Other
scales are at most `most_scale`, so decoded values are finite.

Stochastic rounding draws u in [0, 1) for each value from its index in the segment. Each rank has its own random stream,
because errors from equal draws would add up.

References use one row per block:

    segments (5, 3), block 4:   a b c d e | x y z   -->   a b c d
                                                          e 0 0 0
                                                          x y z 0
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import randomness
from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.facts import Bias, Feedback
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.errors import BadOption


def count_blocks(segments: Sequence[int], block: int) -> int:
    return sum(-(-size // block) for size in segments)


def split(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(flat, list(sizes))


def to_blocks(flat: Tensor, segments: Sequence[int], block: int) -> Tensor:
    """Return one row per block, padded with zeros."""
    rows = [pad(piece, (0, -len(piece) % block)).view(-1, block) for piece in split(flat, segments)]
    return torch.cat([flat.new_empty(0, block), *rows])


def from_blocks(rows: Tensor, segments: Sequence[int], block: int) -> Tensor:
    pieces = split(rows, [-(-size // block) for size in segments])
    return torch.cat(
        [rows.new_empty(0), *(piece.flatten()[:size] for piece, size in zip(pieces, segments, strict=True))]
    )


def block_sizes(segments: Sequence[int], block: int, *, device: torch.device) -> Tensor:
    """Return the number of values in each row, as a column."""
    sizes = torch.full((count_blocks(segments, block), 1), block, dtype=torch.int64, device=device)
    end = 0
    for size in segments:
        end += count_blocks((size,), block)
        if size % block:
            sizes[end - 1].fill_(size % block)
    return sizes


_LANES = 64  # the same number as in csrc/blocks.h

WIDTHS = (1, 2, 4, 8)
"""Allowed bits of a code."""


class BlockCompressor(Compressor):
    """Base of block quantisers. A row is a block."""

    __slots__ = ()

    block: int

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code, one of WIDTHS."""

    @property
    def is_random(self) -> bool:
        return False

    @property
    def largest_value(self) -> float:
        """Decoded value of the largest code, in units of the scale."""
        return 1.0

    @abstractmethod
    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Return each row's scale, not finite if a value is not. Scales and `sizes` (values per row) are columns."""

    @abstractmethod
    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        """Return each value's code, uint8. `uniform` has u for each value, or zeros without stochastic rounding."""

    @abstractmethod
    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the decoded value of each code."""

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        if self.bits not in WIDTHS:
            raise BadOption(
                f"{self.name} has codes of {self.bits} bits; block_codes.py packs codes of 1, 2, 4 or 8 bits.\n"
                "  Store each code in the next larger of these, or derive from Compressor and pack codes yourself."
            )
        in_a_byte = 8 // self.bits
        if self.block % in_a_byte:
            raise BadOption(
                f"{self.name} needs a block of whole bytes, a multiple of {in_a_byte}, not block={self.block}"
            )

    @property
    def has_state(self) -> bool:
        return self.is_random

    def state_elements(self, size: int) -> int:
        return randomness.STATE_ELEMENTS if self.is_random else 0

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        if not self.is_random:
            return Compressor.fresh_state(self, size, key, rank)
        return randomness.fresh_state(randomness.key_of(key, rank))

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(self._sections(segments))

    def compress_reference(self, given: EncoderInput) -> Compressed:
        segments, residual = given.segments, given.residual
        rows = to_blocks(given.value, segments, self.block)
        scale = self.scales(rows, block_sizes(segments, self.block, device=rows.device))
        is_finite = scale.isfinite()
        scale = torch.where(is_finite, scale.clamp_max(most_scale(self.largest_value)), torch.nan)
        drawn = None if given.state is None else randomness.uniform_of(given.state, segments)
        uniform = torch.zeros_like(rows) if drawn is None else to_blocks(drawn, segments, self.block)
        codes = self.codes(torch.where(is_finite, rows, 0.0), torch.where(is_finite, scale, 0.0), uniform)
        codes = torch.where(is_finite, codes, 0)

        code_bytes = pack(from_blocks(codes, segments, self.block), segments, self.bits)
        filling = code_bytes.new_zeros(-len(code_bytes) % 4)
        payload = torch.cat([scale.flatten().view(torch.uint8), code_bytes, filling])
        new_state = None if given.state is None else randomness.next_state(given.state)
        if residual is None:
            return Compressed(payload, state=new_state)
        old = to_blocks(residual, segments, self.block)
        left_out = torch.where(is_finite, rows - self.values(codes, scale), old)
        return Compressed(payload, from_blocks(left_out, segments, self.block), new_state)

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        return mean_over_ranks([self._decompress_one(payload, received.segments) for payload in received.of_ranks])

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return segments, len(segments), self.block

    def _decompress_one(self, payload: Tensor, segments: Sequence[int]) -> Tensor:
        scale_bytes, code_bytes, _ = split(payload, self._sections(segments))
        scale = scale_bytes.clone().view(torch.float32).view(-1, 1)
        rows = to_blocks(unpack(code_bytes, segments, self.bits), segments, self.block)
        return from_blocks(self.values(rows, scale), segments, self.block)

    def _sections(self, segments: Sequence[int]) -> list[int]:
        code_bytes = sum(_bytes_of_codes(segments, self.bits))
        return [4 * count_blocks(segments, self.block), code_bytes, -code_bytes % 4]


class SymmetricCompressor(BlockCompressor):
    """Symmetric quantiser, whose largest code decodes to a block's largest magnitude: int8 and int4."""

    __slots__ = ()

    stochastic: bool

    @property
    def levels(self) -> int:
        """Number of codes on each side of zero. An asymmetric range would clip one side."""
        return 2 ** (self.bits - 1) - 1

    @property
    def largest_value(self) -> float:
        return self.levels

    @property
    def is_random(self) -> bool:
        return self.stochastic

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.stochastic else Bias.ROUNDING

    @property
    def feedback(self) -> Feedback:
        return feedback_at_random(self.block, self.levels) if self.stochastic else Feedback.REQUIRED

    def scales(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return rows.abs().amax(dim=1, keepdim=True) / self.levels

    def codes(self, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
        return whole_codes(rows, scale, uniform, self.levels, self.bits, at_random=self.stochastic)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return whole_values(codes, scale, self.bits)


@cache
def most_scale(largest_value: float) -> float:
    """Return the largest fp32 scale whose product with `largest_value` is finite."""
    largest = torch.tensor(largest_value)
    scale = torch.finfo(torch.float32).max / largest
    return (scale if (scale * largest).isfinite() else scale.nextafter(torch.tensor(0.0))).item()


def mean_magnitude(rows: Tensor, sizes: Tensor) -> Tensor:
    return sum_in_lanes(rows.abs()) / sizes


def sum_in_lanes(rows: Tensor) -> Tensor:
    """Return row sums, as a column. Lane k of 64 adds values k, k + 64, ... Then halves of the lanes are added."""
    terms = pad(rows, (0, -rows.shape[1] % _LANES))
    lanes = rows.new_zeros(len(rows), _LANES)
    for start in range(0, terms.shape[1], _LANES):
        lanes = lanes + terms[:, start : start + _LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


_MOST_PLACES = 1 << 16


def place_of_largest(rows: Tensor) -> Tensor:
    """Return the index of each row's largest magnitude, as a column; of equal magnitudes, the lowest index.

    Bit patterns are compared, so NaN is the largest. A row has at most 2^16 values.
    """
    magnitude = (rows.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    order = magnitude * _MOST_PLACES - torch.arange(rows.shape[1], device=rows.device)  # distinct in a row
    return order.argmax(dim=1, keepdim=True) if rows.numel() else magnitude[:, :1]


def whole_codes(rows: Tensor, scale: Tensor, uniform: Tensor, levels: int, bits: int, *, at_random: bool) -> Tensor:
    """Round rows / scale to integers within -levels..levels, in two's complement.

    If `at_random`, add `uniform` and round down, which is unbiased. Else round to nearest, ties to even.
    """
    quotient = (rows / torch.where(scale > 0, scale, 1.0)).clamp(-levels, levels)
    whole = (quotient + uniform).floor().clamp_max(levels) if at_random else quotient.round()
    return whole.to(torch.int8).view(torch.uint8) & (2**bits - 1)


def whole_values(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Decode the codes of `whole_codes`."""
    sign_bit = 2 ** (bits - 1)
    return ((codes ^ sign_bit).float() - sign_bit) * scale


def feedback_at_random(block: int, levels: float) -> Feedback:
    """Return OPTIONAL if stochastic rounding to steps of max|v| / levels may use feedback, else FORBIDDEN.

    The relative squared error is at most (block - 1) / (4 levels^2): a quarter of a squared step for all but the
    largest value. If this bound is 1 or more, a residual could grow.
    """
    return Feedback.OPTIONAL if block - 1 < 4 * levels**2 else Feedback.FORBIDDEN


def _bytes_of_codes(segments: Sequence[int], bits: int) -> list[int]:
    return [-(-size * bits // 8) for size in segments]


def pack(codes: Tensor, segments: Sequence[int], bits: int) -> Tensor:
    """Pack codes of 1, 2, 4 or 8 bits into bytes. Each segment begins a new byte."""
    shifts = _shifts(codes, bits)
    padded = [pad(piece, (0, -len(piece) % len(shifts))) for piece in split(codes, segments)]
    bytes_of_codes = torch.cat([codes.new_empty(0), *padded]).view(-1, len(shifts))
    return (bytes_of_codes << shifts).sum(dim=1, dtype=torch.uint8)


def unpack(code_bytes: Tensor, segments: Sequence[int], bits: int) -> Tensor:
    shifts = _shifts(code_bytes, bits)
    pieces = split(code_bytes, _bytes_of_codes(segments, bits))
    codes = [((piece.view(-1, 1) >> shifts) & (2**bits - 1)).flatten() for piece in pieces]
    cut = [piece[:size] for piece, size in zip(codes, segments, strict=True)]
    return torch.cat([code_bytes.new_empty(0), *cut])


def _shifts(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)
