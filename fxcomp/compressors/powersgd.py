"""Send two thin factors of each matrix, found by one step of subspace iteration.

    M        = v as a matrix of rows * columns (a parameter's first dimension times the others)
    propose  : P = M orthonormal(Q)              summed over the ranks
    P_hat    = orthonormal(sum of P)             the same on every rank
    payload  : Q = MᵀP_hat                       summed over the ranks, and kept as the next step's Q
    decoded  = P_hat (sum of Q)ᵀ
    residual = M - P_hat Qᵀ

For a given P_hat, the sum of payloads decodes to the sum of matrices. The first Q is random. Each step starts from the
last Q, which converges to the gradient's largest singular vectors. The residual uses the rank's own Q, because with the
mean Q, differences between ranks would accumulate.

Vectors, and matrices with rows * columns <= 2 rank (rows + columns), are sent dense: payload v, residual 0. In these
formulas `rank` is the compressor's parameter, the number of columns of a factor.

Layout, by segment: the proposal has `rank` columns of P, each `rows` long, for matrices only. Payload and state have
`rank` columns of Q, each `columns` long, or the n values of a dense segment. Before `bound_to`, a segment is treated as
the most nearly square matrix of its size.

P_hat and the decoded matrix depend on reduced values alone, and each sum has a fixed order. So all ranks and machines
compute the same bits, with or without kernels.

    M Q       64 sums, of the columns j, j + 64, ...; then the upper half is added to the lower, six times
    MᵀP       chunks of 32 rows, in order within a chunk, then the chunks in order
    P Qᵀ      the `rank` products in order
    lengths   in fp64: terms padded to a power of two, then the upper half added to the lower until one is left

`orthonormal` is Gram-Schmidt in fp64, twice for each vector. A vector left with less than 2^-20 of its length is
replaced by a random one, the same on all ranks, because factors would otherwise stay zero after a gradient of zeros.

If a segment is not finite, P_hat is NaN on every rank, the segment decodes to NaN, and its residual stays unchanged.
The next step starts from a random Q.

The error approaches the error of the best matrix of this rank. Relative squared errors of a fixed 512 * 1024 matrix at
rank 4, first step, eighth step, best: Gaussian noise .988, .979, .978; singular values 1 / k .290, .134, .134.
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

_SPAN = 64  # separate sums per element of M Q
_CHUNK = 32  # rows per partial sum of MᵀP
_NOTHING_LEFT = 2.0**-20  # fraction of a vector's length that may be rounding error


def _project(value: Tensor, factors: Tensor) -> Tensor:
    """Return M Q, `rank` vectors."""
    rows, columns = value.shape
    value = pad(value, (0, -columns % _SPAN)).view(rows, -1, _SPAN)
    factors = pad(factors, (0, -columns % _SPAN)).view(len(factors), -1, _SPAN)
    sums = value.new_zeros(len(factors), rows, _SPAN)
    for step in range(value.shape[1]):
        sums = sums + factors[:, None, step] * value[None, :, step]
    return _add_halves(sums).squeeze(-1)


def _project_back(value: Tensor, factors: Tensor) -> Tensor:
    """Return MᵀP, `rank` vectors."""
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
    """Return P Qᵀ, of shape (rows, columns)."""
    total = left[0, :, None] * right[0]
    for one, other in zip(left[1:], right[1:], strict=True):
        total = total + one[:, None] * other
    return total


def _add_halves(terms: Tensor) -> Tensor:
    """Sum along the last dimension, whose size is a power of two."""
    while terms.shape[-1] > 1:
        lower, upper = terms.chunk(2, dim=-1)
        terms = lower + upper
    return terms


def _orthonormal(factors: Tensor) -> Tensor:
    """Orthonormalise the vectors. A random vector replaces a dependent vector. All are NaN if a value is not finite."""
    basis: list[Tensor] = []
    for index, vector in enumerate(factors.double()):
        left, length = _clean(vector, basis)
        # Compute both and select one: a branch would make the host wait for the GPU.
        other, other_length = _clean(_random(0, index, len(vector), factors.device), basis)
        is_enough = length > _NOTHING_LEFT * _dot(vector, vector).sqrt()
        basis.append(torch.where(is_enough, left / length, other / other_length))
    return torch.where(factors.isfinite().all(), torch.stack(basis).float(), torch.nan)


def _clean(vector: Tensor, basis: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Subtract the vector's projection on the basis, twice because of rounding. Also return the length left."""
    for other in (*basis, *basis):
        vector = vector - _dot(other, vector) * other
    return vector, _dot(vector, vector).sqrt()


def _dot(one: Tensor, other: Tensor) -> Tensor:
    terms = one * other
    return _add_halves(pad(terms, (0, (1 << (len(terms) - 1).bit_length()) - len(terms)))).squeeze(-1)


def _random(key: int, step: int, count: int, device: torch.device) -> Tensor:
    """Return sums of four random bytes, minus 510: nearly Gaussian, and the same bits on every machine."""
    state = torch.full((randomness.STATE_ELEMENTS,), key, dtype=torch.int64, device=device)
    state[1].fill_(step)
    stream = randomness.stream_of(state, 0)
    bits = randomness.bits(stream, 0, count)
    return ((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + (bits >> 24) - 510).double()


@lru_cache(maxsize=4096)
def near_square(size: int) -> tuple[int, int]:
    rows = next((rows for rows in range(isqrt(size), 0, -1) if size % rows == 0), 1)
    return rows, size // rows


@lru_cache(maxsize=4096)
def _check_columns(compressor: PowerSGD, segments: tuple[int, ...]) -> None:
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
    """Two factors of each matrix: rank * (rows + columns) values instead of rows * columns, in two all_reduces."""

    rank: int
    columns: tuple[int, ...] = ()
    """Columns of each segment's matrix, 0 for dense; set by `bound_to`."""

    facts: ClassVar[Facts] = Facts(
        name="powersgd",
        summary="two thin factors of each matrix, from one step of subspace iteration",
        payload="4·rank·columns for a matrix; 4n for vectors and small matrices",
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
        proposal="4·rank·rows for a matrix",
        needs_whole_parameters=True,
        use="Large matrices on many ranks: fewer bytes than any quantiser, independent of the number of ranks.",
        avoid="Where a second latency costs more than bytes; vectors, small matrices, and gradients of full rank.",
        source="Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019",
    )

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        object.__setattr__(self, "columns", tuple(self.columns))  # an op in a graph passes a list

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
        """Return the first Q, the same on all ranks."""
        [columns] = self.all_columns((size,))
        return _random(key, 0, self.rank * columns, torch.device("cpu")).float() if columns else torch.zeros(size)

    def state_after(self, before: Compressor, size: int, state: Tensor, fresh: Tensor) -> Tensor:
        """Return `state`, cut or extended by random columns of Q to this compressor's `rank`."""
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
        assert given.agreed is not None, "powersgd compresses with the agreement of the ranks"
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
        assert received.agreed is not None, "powersgd decompresses with the agreement of the ranks"
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
        """Return the number of columns of a parameter's matrix; 0 if the parameter is sent dense."""
        if len(shape) < 2 or size == 0:
            return 0
        rows, columns = shape[0], size // shape[0]
        return columns if size > 2 * self.rank * (rows + columns) else 0

    def kernel_arguments(self, what: str, segments: tuple[int, ...]) -> tuple[tuple[int, ...] | float, ...]:
        return segments, self.all_columns(segments), len(segments), self.rank
