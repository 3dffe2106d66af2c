"""The suite notices what is wrong: each test plants one bug in a compressor and names the check that must find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fxcomp_more import RandomK, SharedInt8
from torch import Tensor

from fxcomp.compressors import (
    CATALOGUE,
    Compressor,
    DecoderInput,
    EncoderInput,
    Int8,
    TopK,
    randomness,
)
from fxcomp.testing import CHECKS

Decode = Callable[[Tensor, Sequence[int]], Tensor]


def _planted(parent: type[Compressor], *parameters: object, **methods: object) -> Compressor:
    """A compressor without kernels, some of whose methods are others."""
    made = type(f"Broken{parent.__name__}", (parent,), {"__slots__": (), "__module__": __name__, **methods})
    return dataclass(frozen=True)(made)(*parameters)


def _encoding(parent: type[Compressor], change: Callable[..., Any]) -> Callable[..., object]:
    """`parent`'s, of whatever `change` makes of the bucket, the residual and the segments."""

    def compress_reference(self: Compressor, given: EncoderInput) -> object:
        bucket, residual = change(given.bucket, given.residual, given.segments)
        return parent.compress_reference(self, given._replace(bucket=bucket, residual=residual))

    return compress_reference


def _decoding(parent: type[Compressor], change: Decode) -> Callable[..., Tensor]:
    def decompress_reference(self: Compressor, received: DecoderInput) -> Tensor:
        return change(parent.decompress_reference(self, received).clone(), received.segments)

    return decompress_reference


def _standing_still(parent: type[Compressor]) -> Callable[..., object]:
    def compress_reference(self: Compressor, given: EncoderInput) -> object:
        assert given.state is not None
        return parent.compress_reference(self, given)._replace(state=given.state.clone())

    return compress_reference


def _drawing_from_the_key_alone(parent: type[Compressor]) -> Callable[..., object]:
    """The state moves on, but nothing is drawn from the step."""

    def compress_reference(self: Compressor, given: EncoderInput) -> object:
        assert given.state is not None
        first = given.state.clone()
        first[1::2] = 0
        new = parent.compress_reference(self, given._replace(state=first))
        return new._replace(state=randomness.next_state(given.state))

    return compress_reference


def _of_rank(self: Compressor, size: int, key: int, rank: int) -> Tensor:  # noqa: ARG001
    return randomness.fresh_state(randomness.key_of(key, rank))


def _of_no_rank(self: Compressor, size: int, key: int, rank: int) -> Tensor:  # noqa: ARG001
    return randomness.fresh_state(key)


def _one_draw_a_block(self: Int8, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
    return Int8.codes(self, rows, scale, uniform[:, :1].expand_as(rows))


def _eight_bits_a_draw(self: Int8, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
    return Int8.codes(self, rows, scale, (uniform * 256).floor() / 256)


def _negative_down(self: Int8, rows: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:  # noqa: ARG001
    quotient = (rows / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127)
    return torch.where(quotient < 0, quotient.floor(), quotient.round()).to(torch.int8).view(torch.uint8)


def _short_where_large(mean: Tensor, segments: Sequence[int]) -> Tensor:  # noqa: ARG001
    return mean * 0.9 if len(mean) > 3000 else mean


def _short_in_the_second(mean: Tensor, segments: Sequence[int]) -> Tensor:
    mean[sum(segments[:1]) :] *= 0.9
    return mean


def _cut_off_at(limit: int) -> Decode:
    def change(mean: Tensor, segments: Sequence[int]) -> Tensor:
        for piece in torch.split(mean, list(segments)):
            piece[limit:] = 0
        return mean

    return change


def _no_positive_infinity(bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> object:  # noqa: ARG001
    return bucket.where(bucket != torch.inf, 1e30), residual


def _without_ends(bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> object:
    bucket = bucket.clone()
    for piece in torch.split(bucket, list(segments)):
        piece[:1].nan_to_num_()
        piece[-1:].nan_to_num_()
    return bucket, residual


def _no_nan_in_the_residual(bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> object:  # noqa: ARG001
    return bucket, None if residual is None else residual.nan_to_num(nan=0.0)


def _a_finite_sum(bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> object:  # noqa: ARG001
    if residual is None or not (bucket.isfinite().all() and residual.isfinite().all()):
        return bucket, residual
    return (bucket.double() + residual.double()).clamp(-3.3e38, 3.3e38).float(), torch.zeros_like(residual)


def _more_than_it_makes(self: Compressor, segments: Sequence[int]) -> int:
    return Int8.payload_elements(self, segments) + (4 if len(segments) > 6 else 0)


BUGS: dict[str, tuple[Compressor, str, str]] = {
    "random-k that stands still": (
        _planted(RandomK, 0.05, compress_reference=_standing_still(RandomK)),
        *("streams_move_on", "leaves the stream of segment 0 where it was"),
    ),
    "the step is not drawn from": (
        _planted(RandomK, 0.05, compress_reference=_drawing_from_the_key_alone(RandomK)),
        *("streams_move_on", "four steps draw the same"),
    ),
    "places of each rank's own, summed": (
        _planted(RandomK, 0.25, True, fresh_state=_of_rank),
        *("state_starts_as_it_should", "two ranks decode with other draws"),
    ),
    "one stream for all ranks, gathered": (
        _planted(Int8, 512, True, fresh_state=_of_no_rank),
        *("state_starts_as_it_should", "two ranks draw the same numbers"),
    ),
    "one stream for all ranks, summed": (
        _planted(SharedInt8, fresh_state=_of_no_rank),
        *("state_starts_as_it_should", "two ranks draw the same numbers"),
    ),
    "errors that add up, gathered": (
        _planted(Int8, 512, True, fresh_state=_of_no_rank),
        *("errors_of_ranks_average_out", "4.00 times the square of independent errors"),
    ),
    "errors that add up, summed": (
        _planted(SharedInt8, fresh_state=_of_no_rank),
        *("errors_of_ranks_average_out", "4.00 times the square of independent errors"),
    ),
    "one draw for a block": (
        _planted(Int8, 512, True, codes=_one_draw_a_block),
        *("mean_is_unbiased", "times the variance of independent errors"),
    ),
    "one draw for a block of nine": (
        _planted(Int8, 9, True, codes=_one_draw_a_block),
        *("mean_is_unbiased", "times the variance of independent errors"),
    ),
    "draws of eight bits": (
        _planted(Int8, 512, True, codes=_eight_bits_a_draw),
        *("mean_is_unbiased", "standard errors from 0"),
    ),
    "a tenth too little where there is much": (
        _planted(RandomK, 0.25, True, decompress_reference=_decoding(RandomK, _short_where_large)),
        *("mean_is_unbiased", "standard errors from 0"),
    ),
    "a tenth too little in the second segment": (
        _planted(RandomK, 0.25, True, decompress_reference=_decoding(RandomK, _short_in_the_second)),
        *("mean_is_unbiased", "standard errors from 0"),
    ),
    "positive infinity is taken for large": (
        _planted(Int8, compress_reference=_encoding(Int8, _no_positive_infinity)),
        *("what_is_not_finite_is_seen_and_spares_the_residual", "one positive inf: no rank would notice"),
    ),
    "NaN at the ends is taken for zero": (
        _planted(Int8, compress_reference=_encoding(Int8, _without_ends)),
        *("what_is_not_finite_is_seen_and_spares_the_residual", "first nan: no rank would notice"),
    ),
    "NaN in the residual is taken for zero": (
        _planted(Int8, compress_reference=_encoding(Int8, _no_nan_in_the_residual)),
        *("a_sum_that_is_not_finite_is_seen", "NaN in bucket . residual: no rank would notice"),
    ),
    "too large a sum is taken for the largest": (
        _planted(Int8, compress_reference=_encoding(Int8, _a_finite_sum)),
        *("a_sum_that_is_not_finite_is_seen", "too much in bucket . residual: no rank would notice"),
    ),
    "negative values are rounded down": (
        _planted(Int8, codes=_negative_down),
        *("rounding_goes_either_way", "negative values: the mean error is -0.8"),
    ),
    "70,000 places at most": (
        _planted(TopK, 0.01, decompress_reference=_decoding(TopK, _cut_off_at(70_000))),
        *("large_segments_come_out_whole", "ascending"),
    ),
    "2^20 places at most": (
        _planted(TopK, 0.01, decompress_reference=_decoding(TopK, _cut_off_at(2**20))),
        *("large_segments_come_out_whole", r"ascending, \(1048577,\)"),
    ),
    "2^20 places at most, unbiased": (
        _planted(RandomK, 0.25, True, decompress_reference=_decoding(RandomK, _cut_off_at(2**20))),
        *("large_segments_come_out_whole", "4930000 values, slice.4437000, .*: off by -1 "),
    ),
    "more bytes than it makes, for many segments": (
        _planted(Int8, payload_elements=_more_than_it_makes),
        *("payload_has_the_declared_size", "elements declared"),
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    compressor, check, complaint = BUGS[bug]
    with pytest.raises(AssertionError, match=complaint):
        CHECKS[check](compressor)


def test_what_was_planted_is_in_no_catalogue() -> None:
    assert not [name for name, made in CATALOGUE.items() if made.__name__.startswith("Broken")]


@pytest.mark.parametrize("compressor", [_planted(Int8), _planted(TopK, 0.01), _planted(RandomK, 0.25, True)], ids=str)
@pytest.mark.one_in(3)
def test_nothing_is_found_where_nothing_was_planted(compressor: Compressor) -> None:
    for check in sorted({check for _, check, _ in BUGS.values()}):
        CHECKS[check](compressor)
