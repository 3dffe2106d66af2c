"""Make the vectors of powersgd's factors orthonormal, in fp64: one program a matrix, one vector after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors.triton.language import bits_at, constant, constexpr, jit, launch, mix, sum_of, sum_of_rows, tl
from fxcomp.compressors.triton.tiles import INFINITY, magnitude_of

_IN_REGISTERS = 8192  # products that a program folds at once  # assumed
FOLD_WIDTH = constant(1024)  # the same numbers as in the reference
NOTHING_LEFT = constant(2.0**-20)

MATRIX_COLUMNS = constant(7)
FIRST_VALUE, ROW_COUNT, COLUMN_COUNT, Q_AT, P_AT, CHUNKS_AT, RANK_OF = map(constant, range(7))
"""Columns of the table of matrices: offset in the bucket, rows, columns, offset of Q in payload and state, offset of
P in the proposal, offset of the sums by chunks, rank."""


def orthonormal(factors: Tensor, matrices: Tensor, longest: int, *, is_start: bool) -> Tensor:
    """Return the bases of all matrices, fp32, where the factors lie: of Q at the start, else of P."""
    height = max(1, (1 << (longest - 1).bit_length()) // 1024)
    basis = torch.empty_like(factors)
    work = torch.empty_like(factors, dtype=torch.float64)
    scratch = torch.empty(len(matrices) * 1024, dtype=torch.float64, device=factors.device)
    constants = {"HEIGHT": height, "WIDTH": min(1024, max(1, _IN_REGISTERS // height))}
    launch(_orthonormalise, len(matrices), factors, basis, work, scratch, matrices, IS_START=is_start, **constants)
    return basis


@jit
def _dot(one, other, length, scratch, HEIGHT: constexpr, WIDTH: constexpr):
    """Add up products, the upper half to the lower."""
    tl.debug_barrier()
    for first in range(0, FOLD_WIDTH, WIDTH):
        at = tl.arange(0, HEIGHT)[:, None] * FOLD_WIDTH + first + tl.arange(0, WIDTH)[None, :]
        is_there = at < length
        terms = tl.load(one + at, is_there, other=0.0) * tl.load(other + at, is_there, other=0.0)
        tl.store(scratch + first + tl.arange(0, WIDTH), sum_of_rows(terms, HEIGHT, WIDTH))
    tl.debug_barrier()
    return sum_of(tl.load(scratch + tl.arange(0, FOLD_WIDTH)), FOLD_WIDTH)


@jit
def _clean(vector, basis, count, length, scratch, HEIGHT: constexpr, WIDTH: constexpr):
    """Take the basis away, twice; return the length of what is left."""
    number = count * 0
    while number < 2 * count:
        other = basis + (number % tl.maximum(count, 1)) * length
        along = _dot(other, vector, length, scratch, HEIGHT, WIDTH)
        tl.debug_barrier()
        first = length * 0
        while first < length:
            at = first + tl.arange(0, FOLD_WIDTH)
            is_there = at < length
            taken = along * tl.load(other + at, is_there, other=0.0)
            tl.store(vector + at, tl.load(vector + at, is_there, other=0.0) - taken, is_there)
            first += FOLD_WIDTH
        number += 1
    return tl.sqrt(_dot(vector, vector, length, scratch, HEIGHT, WIDTH))


@jit
def _orthonormalise(factors, basis, work, scratch, matrices, IS_START: constexpr, HEIGHT: constexpr, WIDTH: constexpr):
    """Of the rows of Q, zeros if one is not finite, or of P, whose basis is NaN then."""
    matrix = matrices + tl.program_id(0) * MATRIX_COLUMNS
    if IS_START:
        length = tl.load(matrix + COLUMN_COUNT)
        at = tl.load(matrix + Q_AT)
    else:
        length = tl.load(matrix + ROW_COUNT)
        at = tl.load(matrix + P_AT)
    rank = tl.load(matrix + RANK_OF)  # Triton 3.6 cannot compile the loop below if it knows that there is one turn
    factors += at
    basis += at
    work += at
    scratch += tl.program_id(0) * FOLD_WIDTH
    largest = tl.zeros([FOLD_WIDTH], tl.int32)
    first = length * 0
    while first < rank * length:
        place = first + tl.arange(0, FOLD_WIDTH)
        largest = tl.maximum(largest, magnitude_of(tl.load(factors + place, place < rank * length, other=0.0)))
        first += FOLD_WIDTH
    is_sound = tl.max(largest, axis=0) < INFINITY

    index = length * 0
    while index < rank:
        vector = work + index * length
        first = length * 0
        while first < length:
            place = first + tl.arange(0, FOLD_WIDTH)
            value = tl.load(factors + index * length + place, place < length, other=0.0)
            tl.store(vector + place, tl.where(is_sound, value, 0.0).to(tl.float64), place < length)
            first += FOLD_WIDTH
        whole = tl.sqrt(_dot(vector, vector, length, scratch, HEIGHT, WIDTH))
        left = _clean(vector, work, index, length, scratch, HEIGHT, WIDTH)
        if left <= whole * NOTHING_LEFT:  # the interpreter keeps a product that begins with a constant from comparing
            tl.debug_barrier()
            low = mix(index.to(tl.uint32))
            high = mix(low)
            first = length * 0
            while first < length:
                place = first + tl.arange(0, FOLD_WIDTH)
                drawn = bits_at(low, high, place)
                total = (drawn & 255) + ((drawn >> 8) & 255) + ((drawn >> 16) & 255) + (drawn >> 24)
                tl.store(vector + place, (total.to(tl.int32) - 510).to(tl.float64), place < length)
                first += FOLD_WIDTH
            left = _clean(vector, work, index, length, scratch, HEIGHT, WIDTH)
        tl.debug_barrier()
        first = length * 0
        while first < length:
            place = first + tl.arange(0, FOLD_WIDTH)
            value = tl.load(vector + place, place < length, other=0.0) / left
            tl.store(vector + place, value, place < length)
            rounded = value.to(tl.float32)
            if not IS_START:
                rounded = tl.where(is_sound, rounded, float("nan"))
            tl.store(basis + index * length + place, rounded, place < length)
            first += FOLD_WIDTH
        index += 1
