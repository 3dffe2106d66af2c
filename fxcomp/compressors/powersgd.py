"""Send two thin factors of each matrix, found by one step of subspace iteration.

    M        = v as a matrix of rows * columns (a parameter's first dimension times the others)
    propose  : P = M orthonormal(Q)              summed over the ranks
    P_hat    = orthonormal(sum of P)             the same on every rank
    payload  : Q = MᵀP_hat                       summed over the ranks, and kept: the next step's Q
    decoded  = P_hat (sum of Q)ᵀ
    residual = M - P_hat Qᵀ                      with the rank's own Q

Given P_hat, compression is linear: a sum of payloads decodes to the sum. The first step's Q is random; from then on it
begins where the last step ended, so that over the steps it turns towards the largest singular vectors of the gradient.
The residual is measured against the rank's own part, not against the mean: both forms give the same mean, but the
difference of the ranks' gradients would pile up in the second one.

A vector, and a matrix with rows * columns <= 2 rank (rows + columns), goes dense: its payload is v, its residual 0.

Layout, segment by segment: the proposal holds `rank` columns of P, each `rows` long, for matrices only; the payload and
the state hold `rank` columns of Q, each `columns` long, or the n values of a dense segment. `bound_to` fills `columns`
in, 0 for dense. Without it a segment counts as the matrix nearest to a square that its size can be.

No two ranks can drift apart. P_hat and the decoded matrix are computed from nothing but what was summed for all, with
every sum in an order that is written down here; the kernels follow it on every instruction set with any number of
threads, and are equal bit for bit to the plain torch below. So replicas agree even on machines of different kinds.

    M Q       64 sums, of the columns j, j + 64, ...; then the upper half is added to the lower, six times
    MᵀP       rows by chunks of 32, in order within a chunk, then the chunks in order
    P Qᵀ      in the order of the rank
    lengths   in double precision, the upper half added to the lower, of a power of two of terms

`orthonormal` is Gram-Schmidt in double precision, each vector cleaned twice. A vector of which less than 2^-20 is left
is replaced by a random one, the same on all ranks: after a gradient of zeros, or of a lower rank than asked for, the
factors would stay zero for ever. One more direction never costs accuracy.

If v is not finite anywhere in a segment, P is not, P_hat becomes NaN on every rank, the whole segment decodes to NaN
and all residuals of it stay as they were. The next step sees a state that is not finite, and starts from a random Q.

What is lost depends on the spectrum, and soon is what the best matrix of this rank loses. Relative squared errors of a
fixed 512 * 1024 matrix at rank 4, first step, eighth step, best: Gaussian noise .988, .979, .978; singular values
1 / k .290, .134, .134; of rank 4 or less 0. PyTorch's hook, with the same start, loses as much.

Three passes over the gradient, 28 bytes a value with the residual, and one to decode. At 4096 * 4096 on one thread they
take 33 ms at rank 1, 41 at 4, 52 at 8, 95 at 32; the arithmetic of PyTorch's hook in eager mode takes 94, 294, 270
and 140 (measured, AVX-512, torch 2.13, 2026-11, the fastest of 15 interleaved).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt, prod
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from fxcomp.compressors import randomness
from fxcomp.compressors.base import Compressed, Compressor, mean_over_ranks
from fxcomp.compressors.block_codes import split
from fxcomp.compressors.catalogue import register
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter, ProposalReduction
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.errors import BadTensor

_SPAN = 64  # columns of M Q that add up apart
_CHUNK = 32  # rows of MᵀP that add up before they join the total
_NOTHING_LEFT = 2.0**-20  # of a vector's length, below which it is rounding errors


def _project(value: Tensor, factors: Tensor) -> Tensor:
    """M Q: from `rank` vectors of columns, `rank` vectors of rows."""
    rows, columns = value.shape
    value = pad(value, (0, -columns % _SPAN)).view(rows, -1, _SPAN)
    factors = pad(factors, (0, -columns % _SPAN)).view(len(factors), -1, _SPAN)
    sums = value.new_zeros(len(factors), rows, _SPAN)
    for step in range(value.shape[1]):
        sums = sums + factors[:, None, step] * value[None, :, step]
    return _add_halves(sums).squeeze(-1)


def _project_back(value: Tensor, factors: Tensor) -> Tensor:
    """MᵀP: from `rank` vectors of rows, `rank` vectors of columns."""
    rows, columns = value.shape
    value = pad(value, (0, 0, 0, -rows % _CHUNK)).view(-1, _CHUNK, columns)
    factors = pad(factors, (0, -rows % _CHUNK)).view(len(factors), -1, _CHUNK)
    sums = value.new_zeros(len(factors), len(value), columns)
    for row in range(_CHUNK):
        sums = sums + factors[:, :, row, None] * value[None, :, row]
    total = value.new_zeros(len(factors), columns)
    for chunk in range(len(value)):
        total = total + sums[:, chunk]
    return total


def _expand(left: Tensor, right: Tensor) -> Tensor:
    """P Qᵀ, rows * columns."""
    total = left[0, :, None] * right[0]
    for one, other in zip(left[1:], right[1:], strict=True):
        total = total + one[:, None] * other
    return total


def _add_halves(terms: Tensor) -> Tensor:
    """The sum along the last dimension, whose size is a power of two."""
    while terms.shape[-1] > 1:
        lower, upper = terms.chunk(2, dim=-1)
        terms = lower + upper
    return terms


def _orthonormal(factors: Tensor) -> Tensor:
    """An orthonormal basis of what the vectors span, filled up with random directions; NaN if one is not finite."""
    basis: list[Tensor] = []
    for index, vector in enumerate(factors.double()):
        left, length = _clean(vector, basis)
        # Both are computed, and one is taken: a branch would make the host wait for a GPU.
        other, other_length = _clean(_random(0, index, len(vector), factors.device), basis)
        is_enough = length > _NOTHING_LEFT * _dot(vector, vector).sqrt()
        basis.append(torch.where(is_enough, left / length, other / other_length))
    return torch.where(factors.isfinite().all(), torch.stack(basis).float(), torch.nan)


def _clean(vector: Tensor, basis: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Take the basis away, twice, for the first time leaves rounding errors of the size of what it takes."""
    for other in (*basis, *basis):
        vector = vector - _dot(other, vector) * other
    return vector, _dot(vector, vector).sqrt()


def _dot(one: Tensor, other: Tensor) -> Tensor:
    terms = one * other
    return _add_halves(pad(terms, (0, (1 << (len(terms) - 1).bit_length()) - len(terms)))).squeeze(-1)


def _random(key: int, step: int, count: int, device: torch.device) -> Tensor:
    """Sums of four random bytes, about their mean: whole numbers, nearly Gaussian, and no logarithm to round."""
    state = torch.full((randomness.STATE_ELEMENTS,), key, dtype=torch.int64, device=device)
    state[1].fill_(step)
    stream = randomness.stream_of(state, 0)
    bits = randomness.bits(stream, 0, count)
    return ((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + (bits >> 24) - 510).double()


@lru_cache(maxsize=4096)
def near_square(size: int) -> tuple[int, int]:
    """Rows and columns of the matrix nearest to a square that so many values fill."""
    rows = next((rows for rows in range(isqrt(size), 0, -1) if size % rows == 0), 1)
    return rows, size // rows


@lru_cache(maxsize=4096)
def _check_columns(compressor: PowerSGD, segments: tuple[int, ...]) -> None:
    """Raise BadTensor for columns that no matrix of a segment's size has: some of its values would be in no row."""
    for index, (size, columns) in enumerate(zip(segments, compressor.columns, strict=True)):
        if columns < 0 or (columns > 0 and (size == 0 or size % columns)):
            raise BadTensor(
                f"no matrix of {size} values has rows of {columns}.\n"
                f"  segment {index} of {len(segments)}, of {compressor} bound to columns={compressor.columns}\n"
                "  Bind it with bound_to to the shapes of this bucket's parameters; 0 columns make a segment dense."
            )


@register
@dataclass(frozen=True, slots=True)
class PowerSGD(Compressor):
    """A rank times the sum of the sides instead of their product, by two plain all_reduces."""

    rank: int
    columns: tuple[int, ...] = ()
    """Of each segment, 0 for a dense one; `bound_to` fills it in."""

    facts: ClassVar[Facts] = Facts(
        name="powersgd",
        summary="two thin factors of each matrix, from one step of subspace iteration",
        payload="4 rank columns of a matrix; 4n of vectors and small matrices",
        payload_dtype=torch.float32,
        is_linear=True,
        bias=Bias.BIASED,
        feedback=Feedback.REQUIRED,
        passes=3,
        parameters=(Parameter("rank", "columns of a factor", 1, 64),),
        filled_in=("columns",),
        state="as the payload",
        state_from_payload=True,
        agreement=ProposalReduction.SUM,
        proposal="4 rank rows of a matrix",
        needs_whole_parameters=True,
        use="Large matrices on many ranks: fewer bytes than any quantiser, independent of the number of ranks.",
        avoid="Where a second latency costs more than bytes; vectors, small matrices, and gradients of full rank.",
        source="Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019",
    )

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        object.__setattr__(self, "columns", tuple(self.columns))  # an op of a graph has it as a list

    def bound_to(self, shapes: Sequence[Sequence[int]], ranks: int) -> Self:
        return replace(self, columns=tuple(self._columns_of(prod(shape), shape) for shape in shapes))

    def of_segment(self, index: int) -> Self:
        return replace(self, columns=self.columns[index : index + 1])

    def payload_elements(self, segments: Sequence[int]) -> int:
        return sum(self._payload_sizes(segments))

    def proposal_elements(self, segments: Sequence[int]) -> int:
        pairs = zip(segments, self.all_columns(segments), strict=True)
        return sum(self.rank * (size // columns) for size, columns in pairs if columns)

    def state_elements(self, size: int) -> int:
        return self.payload_elements((size,))

    def fresh_state(self, size: int, key: int, rank: int) -> Tensor:
        """The same on all ranks: Q is shared."""
        [columns] = self.all_columns((size,))
        return _random(key, 0, self.rank * columns, torch.device("cpu")).float() if columns else torch.zeros(size)

    def state_after(self, before: Compressor, size: int, state: Tensor, fresh: Tensor) -> Tensor:
        """Keep the leading factors; those that a higher rank adds are random."""
        assert isinstance(before, PowerSGD), "a state goes on under the same compressor"
        [columns] = self.all_columns((size,))
        if not columns or before.all_columns((size,)) != (columns,):
            return fresh
        kept = min(state.numel(), fresh.numel())
        return torch.cat([state[:kept], fresh[kept:]])

    def propose_reference(self, given: EncoderInput) -> Tensor:
        assert given.state is not None, "powersgd proposes from the factors of the step before"
        proposals = [given.bucket.new_empty(0)]
        states = split(given.state, self._payload_sizes(given.segments))
        for part, columns, factors in zip(given.pieces, self.all_columns(given.segments), states, strict=True):
            if columns:
                warm = factors.view(self.rank, columns)
                start = _orthonormal(torch.where(warm.isfinite().all(), warm, 0.0))
                proposals.append(_project(part.view(-1, columns), start).flatten())
        return torch.cat(proposals)

    def compress_reference(self, given: EncoderInput) -> Compressed:
        assert given.agreed is not None, "powersgd compresses with what the ranks agreed on"
        payloads, sent = [given.bucket.new_empty(0)], [given.bucket.new_empty(0)]
        bases = self._bases(given.segments, given.agreed)
        for part, columns, basis in zip(given.pieces, self.all_columns(given.segments), bases, strict=True):
            if basis is None:
                payloads.append(part)
                sent.append(part)
            else:
                right = _project_back(part.view(-1, columns), basis)
                payloads.append(right.flatten())
                sent.append(_expand(basis, right).flatten())
        if given.residual is None:
            return Compressed(torch.cat(payloads))
        left_out = given.value - torch.cat(sent)
        return Compressed(torch.cat(payloads), torch.where(left_out.isfinite(), left_out, given.residual))

    def decompress_reference(self, received: DecoderInput) -> Tensor:
        assert received.agreed is not None, "powersgd decompresses with what the ranks agreed on"
        segments, bases = received.segments, self._bases(received.segments, received.agreed)
        return mean_over_ranks([self._decompress_one(payload, segments, bases) for payload in received.of_ranks])

    def _decompress_one(self, payload: Tensor, segments: Sequence[int], bases: Sequence[Tensor | None]) -> Tensor:
        parts = [payload.new_empty(0)]
        for part, basis in zip(split(payload, self._payload_sizes(segments)), bases, strict=True):
            parts.append(part if basis is None else _expand(basis, part.view(self.rank, -1)).flatten())
        return torch.cat(parts)

    def _payload_sizes(self, segments: Sequence[int]) -> list[int]:
        return [self.rank * columns or size for size, columns in zip(segments, self.all_columns(segments), strict=True)]

    def _bases(self, segments: Sequence[int], agreed: Tensor) -> list[Tensor | None]:
        """P_hat of each segment, None for a dense one."""
        columns = self.all_columns(segments)
        sizes = [self.rank * (size // width) if width else 0 for size, width in zip(segments, columns, strict=True)]
        return [
            _orthonormal(part.view(self.rank, -1)) if width else None
            for part, width in zip(split(agreed, sizes), columns, strict=True)
        ]

    def all_columns(self, segments: Sequence[int]) -> tuple[int, ...]:
        if self.columns:
            if len(self.columns) != len(segments):
                raise BadTensor(
                    f"{self} is bound to {len(self.columns)} parameters, not to {len(segments)}.\n"
                    "  Bind it with bound_to to the parameters of this bucket, one segment each."
                )
            _check_columns(self, tuple(segments))
            return self.columns
        return tuple(self._columns_of(size, near_square(size)) for size in segments)

    def _columns_of(self, size: int, shape: Sequence[int]) -> int:
        """Of the matrix that a parameter of this shape is; 0 if it goes dense."""
        if len(shape) < 2 or size == 0:
            return 0
        rows, columns = shape[0], size // shape[0]
        return columns if size > 2 * self.rank * (rows + columns) else 0

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return segments, self.all_columns(segments), len(segments), self.rank
