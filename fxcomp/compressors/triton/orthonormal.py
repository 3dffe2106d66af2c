"""Orthonormalise powersgd's factors in fp64, vector by vector, one program per matrix.

Sums repeatedly add the upper half of the terms to the lower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.triton.language import bits_at, constant, constexpr, jit, launch, mix, tl
from fxcomp.compressors.triton.tiles import INFINITY, magnitude_of

FOLD_WIDTH = constant(1024)  # values read at once for a sum  # assumed
_AT_ONCE = 8192  # values read at once in any order  # assumed
_WARPS = 8  # the fastest of 4, 8, 16 and 32 (H100, measured, 2026-11)
_TERMS = 32  # terms that a thread adds in the first round; later rounds add 8  # assumed
_FIRST, _THEN = constant(_TERMS), constant(8)
NOTHING_LEFT = constant(2.0**-20)

MATRIX_COLUMNS = constant(7)
FIRST_VALUE, ROW_COUNT, COLUMN_COUNT, Q_AT, P_AT, CHUNKS_AT, RANK_OF = map(constant, range(7))
"""Columns of the table of matrices: offset in the bucket, rows, columns, offset of Q in payload and state, offset of P
in the proposal, offset of the chunk sums, rank.
"""


def orthonormal(factors: Tensor, matrices: Tensor, longest: int, *, is_start: bool) -> Tensor:
    """Return orthonormal Q (if `is_start`) or P of all matrices, as fp32 in the layout of `factors`."""
    padded = max(1024, 1 << (longest - 1).bit_length())
    basis = torch.empty_like(factors)
    work = torch.empty_like(factors, dtype=torch.float64)
    terms = 2 * max(1024, padded // _TERMS)
    scratch = torch.empty(len(matrices) * terms, dtype=torch.float64, device=factors.device)
    constants = {"PADDED": padded, "TERMS": terms, "WIDTH": min(padded, _AT_ONCE), "IS_START": is_start}
    launch(_orthonormalise, len(matrices), factors, basis, work, scratch, matrices, warps=_WARPS, **constants)
    return basis


@jit
def _dot(one, other, length, scratch, PADDED: constexpr):
    COUNT: constexpr = max(FOLD_WIDTH, PADDED // _FIRST)
    tl.debug_barrier()
    for first in range(0, COUNT, FOLD_WIDTH):
        at = first + tl.arange(0, FOLD_WIDTH)
        tl.store(scratch + at, _sum_of_products(one, other, at, length, COUNT, PADDED // COUNT))
    return _sum_in_memory(scratch, COUNT)


@jit
def _sum_of_products(one, other, at, length, STEP: constexpr, COUNT: constexpr):
    if COUNT == 1:
        is_there = at < length
        return tl.load(one + at, is_there, other=0.0) * tl.load(other + at, is_there, other=0.0)
    else:  # noqa: RET505  Triton compiles one branch only
        even = _sum_of_products(one, other, at, length, 2 * STEP, COUNT // 2)
        return even + _sum_of_products(one, other, at + STEP, length, 2 * STEP, COUNT // 2)


@jit
def _sum_in_memory(terms, COUNT: constexpr):
    tl.debug_barrier()
    if COUNT <= 2 * _THEN:
        return _sum_of_terms(terms, 1, COUNT)
    else:  # noqa: RET505
        LEFT: constexpr = COUNT // _THEN
        WIDTH: constexpr = min(LEFT, FOLD_WIDTH)
        for first in range(0, LEFT, WIDTH):
            at = first + tl.arange(0, WIDTH)
            tl.store(terms + COUNT + at, _sum_of_terms(terms + at, LEFT, _THEN))
        return _sum_in_memory(terms + COUNT, LEFT)


@jit
def _sum_of_terms(terms, STEP: constexpr, COUNT: constexpr):
    if COUNT == 1:
        return tl.load(terms)
    else:  # noqa: RET505
        return _sum_of_terms(terms, 2 * STEP, COUNT // 2) + _sum_of_terms(terms + STEP, 2 * STEP, COUNT // 2)


@jit
def _clean(vector, basis, count, length, scratch, PADDED: constexpr, WIDTH: constexpr):
    """Subtract a vector's projection on the basis, twice because of rounding; return the length left."""
    number = count * 0
    while number < 2 * count:
        other = basis + (number % tl.maximum(count, 1)) * length
        along = _dot(other, vector, length, scratch, PADDED)
        first = length * 0
        while first < length:
            at = first + tl.arange(0, WIDTH)
            is_there = at < length
            taken = along * tl.load(other + at, is_there, other=0.0)
            tl.store(vector + at, tl.load(vector + at, is_there, other=0.0) - taken, is_there)
            first += WIDTH
        number += 1
    return tl.sqrt(_dot(vector, vector, length, scratch, PADDED))


@jit
def _orthonormalise(
    factors, basis, work, scratch, matrices, PADDED: constexpr, TERMS: constexpr, WIDTH: constexpr, IS_START: constexpr
):
    """Orthonormalise a matrix's Q or P. A non-finite Q counts as zeros; a non-finite P gives NaN."""
    matrix = matrices + tl.program_id(0) * MATRIX_COLUMNS
    if IS_START:
        length = tl.load(matrix + COLUMN_COUNT)
        at = tl.load(matrix + Q_AT)
    else:
        length = tl.load(matrix + ROW_COUNT)
        at = tl.load(matrix + P_AT)
    rank = tl.load(matrix + RANK_OF)  # Triton 3.6 cannot compile the loop below with a constant count of 1
    factors += at
    basis += at
    work += at
    scratch += tl.program_id(0).to(tl.int64) * TERMS
    largest = tl.zeros([WIDTH], tl.int32)
    first = length * 0
    while first < rank * length:
        place = first + tl.arange(0, WIDTH)
        largest = tl.maximum(largest, magnitude_of(tl.load(factors + place, place < rank * length, other=0.0)))
        first += WIDTH
    is_sound = tl.max(largest, axis=0) < INFINITY

    index = length * 0
    while index < rank:
        vector = work + index * length
        first = length * 0
        while first < length:
            place = first + tl.arange(0, WIDTH)
            value = tl.load(factors + index * length + place, place < length, other=0.0)
            tl.store(vector + place, tl.where(is_sound, value, 0.0).to(tl.float64), place < length)
            first += WIDTH
        whole = tl.sqrt(_dot(vector, vector, length, scratch, PADDED))
        left = _clean(vector, work, index, length, scratch, PADDED, WIDTH)
        if left <= whole * NOTHING_LEFT:  # constant second, because the interpreter cannot compare otherwise
            tl.debug_barrier()
            low = mix(index.to(tl.uint32))
            high = mix(low)
            first = length * 0
            while first < length:
                place = first + tl.arange(0, WIDTH)
                drawn = bits_at(low, high, place)
                total = (drawn & 255) + ((drawn >> 8) & 255) + ((drawn >> 16) & 255) + (drawn >> 24)
                tl.store(vector + place, (total.to(tl.int32) - 510).to(tl.float64), place < length)
                first += WIDTH
            left = _clean(vector, work, index, length, scratch, PADDED, WIDTH)
        tl.debug_barrier()
        first = length * 0
        while first < length:
            place = first + tl.arange(0, WIDTH)
            value = tl.load(vector + place, place < length, other=0.0) / left
            tl.store(vector + place, value, place < length)
            rounded = value.to(tl.float32)
            if not IS_START:
                rounded = tl.where(is_sound, rounded, float("nan"))
            tl.store(basis + index * length + place, rounded, place < length)
            first += WIDTH
        index += 1
