"""Two thin factors of each matrix: the bits of `fxcomp/compressors/powersgd.py`.

Every sum has the reference's order, so ranks agree though nothing but sums was sent. All matrices of a bucket share
each launch: orthonormal Q and M Q to propose; orthonormal P, MᵀP by chunks of 32 rows, the chunks' sum and the residual
to encode; orthonormal P and P Qᵀ to decode. One program makes a matrix's vectors orthonormal, in fp64, one vector after
the other: the slow part where matrices are few and long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.powersgd import PowerSGD
from fxcomp.compressors.triton.blocks import INFINITY, compensated, folded, nothing
from fxcomp.compressors.triton.language import Value, constant, constexpr, jit, launch, tl
from fxcomp.compressors.triton.randomness import bits_at, mix

_ROW_BLOCK, _COLUMN_BLOCK = 8, 256  # values of a matrix that a program expands: 16 a thread  # assumed
_BACK_COLUMNS = 128  # columns of MᵀP of a program: one a thread  # assumed
_IN_REGISTERS = 8192  # products that a program folds at once  # assumed
_DENSE = 1024  # values of a dense segment of a program  # assumed
FOLD_WIDTH = constant(1024)
CHUNK = constant(32)  # the same numbers as in the reference
SPAN = constant(64)
NOTHING_LEFT = constant(2.0**-20)
MATRIX_COLUMNS = constant(7)


@dataclass(frozen=True)
class _Plan:
    """Tables on the device. Rows of `matrices`: first value, rows, columns, first element of payload and state, of the
    proposal and of the chunks' sums, rank. Other tables begin with a row of it, then tell a program's part."""

    matrices: Tensor
    row_parts: Tensor
    chunk_parts: Tensor
    column_parts: Tensor
    tiles: Tensor
    dense: Tensor
    """First value, first element of the payload, values."""
    chunk_elements: int
    payload_elements: int
    proposal_elements: int
    longest_row: int
    longest_column: int
    rank_width: int
    """The power of two from the rank on."""
    rows: int
    """Of a program of M Q."""


@cache
def _plan(compressor: PowerSGD, segments: tuple[int, ...], device: torch.device) -> _Plan:
    rank = compressor.rank
    rank_width = 1 << (rank - 1).bit_length()
    rows_at_once = max(1, 128 // rank_width)
    matrices: list[tuple[int, ...]] = []
    row_parts: list[tuple[int, int]] = []
    chunk_parts: list[tuple[int, int, int]] = []
    column_parts: list[tuple[int, int]] = []
    tiles: list[tuple[int, int, int]] = []
    dense: list[tuple[int, int, int]] = []
    start = payload = proposal = chunk_element = 0
    for size, columns in zip(segments, compressor.all_columns(segments), strict=True):
        if columns:
            rows, index = size // columns, len(matrices)
            matrices.append((start, rows, columns, payload, proposal, chunk_element, rank))
            row_parts += [(index, row) for row in range(0, rows, rows_at_once)]
            column_parts += [(index, column) for column in range(0, columns, _BACK_COLUMNS)]
            chunks = -(-rows // 32)
            chunk_parts += [(index, i, column) for i in range(chunks) for column in range(0, columns, _BACK_COLUMNS)]
            tiles += [
                (index, row, column)
                for row in range(0, rows, _ROW_BLOCK)
                for column in range(0, columns, _COLUMN_BLOCK)
            ]
            payload += rank * columns
            proposal += rank * rows
            chunk_element += chunks * rank * columns
        else:
            dense += [(start + at, payload + at, min(size - at, _DENSE)) for at in range(0, size, _DENSE)]
            payload += size
        start += size

    def table(rows: list[tuple[int, ...]], columns: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, columns)

    return _Plan(
        table(matrices, 7),
        table([*row_parts], 2),
        table([*chunk_parts], 3),
        table([*column_parts], 2),
        table([*tiles], 3),
        table([*dense], 3),
        chunk_element,
        payload,
        proposal,
        max((columns for _, _, columns, *_ in matrices), default=1),
        max((rows for _, rows, *_ in matrices), default=1),
        rank_width,
        rows_at_once,
    )


@jit
def _is_finite(value: Value):
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY


# Orthonormal vectors, by one program a matrix


@jit
def _fold(terms: Value, HEIGHT: constexpr, WIDTH: constexpr):
    """Add the lower half of the rows to the upper one, until one row is left."""
    if HEIGHT == 1:
        return tl.reshape(terms, [WIDTH])
    else:  # noqa: RET505  Triton compiles one branch only
        one, other = tl.split(tl.permute(tl.reshape(terms, [2, HEIGHT // 2, WIDTH]), (1, 2, 0)))
        return _fold(one + other, HEIGHT // 2, WIDTH)


@jit
def _dot(one: Value, other: Value, length: Value, scratch: Value, HEIGHT: constexpr, WIDTH: constexpr):
    """The sum of products, the upper half added to the lower."""
    tl.debug_barrier()
    for first in range(0, FOLD_WIDTH, WIDTH):
        at = tl.arange(0, HEIGHT)[:, None] * FOLD_WIDTH + first + tl.arange(0, WIDTH)[None, :]
        is_there = at < length
        terms = tl.load(one + at, is_there, other=0.0) * tl.load(other + at, is_there, other=0.0)
        tl.store(scratch + first + tl.arange(0, WIDTH), _fold(terms, HEIGHT, WIDTH))
    tl.debug_barrier()
    lanes = tl.load(scratch + tl.arange(0, FOLD_WIDTH))
    return tl.sum(_fold(tl.reshape(lanes, [FOLD_WIDTH, 1]), FOLD_WIDTH, 1), axis=0)


@jit
def _clean(
    vector: Value, basis: Value, count: Value, length: Value, scratch: Value, HEIGHT: constexpr, WIDTH: constexpr
):
    """Take the basis away, twice; returns the length of what is left."""
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
def _orthonormalise(
    factors: Value,
    basis: Value,
    work: Value,
    scratch: Value,
    matrices: Value,
    IS_START: constexpr,
    HEIGHT: constexpr,
    WIDTH: constexpr,
):
    """Of the rows of Q, zeros if one is not finite, or of P, whose basis is NaN then."""
    matrix = matrices + tl.program_id(0) * MATRIX_COLUMNS
    if IS_START:
        length = tl.load(matrix + 2)
        at = tl.load(matrix + 3)
    else:
        length = tl.load(matrix + 1)
        at = tl.load(matrix + 4)
    rank = tl.load(matrix + 6)  # Triton 3.6 cannot compile the loop below if it knows that there is one turn
    factors += at
    basis += at
    work += at
    scratch += tl.program_id(0) * FOLD_WIDTH
    largest = tl.zeros([FOLD_WIDTH], tl.int32)
    first = length * 0
    while first < rank * length:
        place = first + tl.arange(0, FOLD_WIDTH)
        bits = tl.load(factors + place, place < rank * length, other=0.0).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
        first += FOLD_WIDTH
    is_finite = tl.max(largest, axis=0) < INFINITY

    index = length * 0
    while index < rank:
        vector = work + index * length
        first = length * 0
        while first < length:
            place = first + tl.arange(0, FOLD_WIDTH)
            value = tl.load(factors + index * length + place, place < length, other=0.0)
            tl.store(vector + place, tl.where(is_finite, value, 0.0).to(tl.float64), place < length)
            first += FOLD_WIDTH
        whole = tl.sqrt(_dot(vector, vector, length, scratch, HEIGHT, WIDTH))
        left = _clean(vector, work, index, length, scratch, HEIGHT, WIDTH)
        if left <= NOTHING_LEFT * whole:
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
                rounded = tl.where(is_finite, rounded, float("nan"))
            tl.store(basis + index * length + place, rounded, place < length)
            first += FOLD_WIDTH
        index += 1


# Products


@jit
def _project(
    bucket: Value,
    residual: Value,
    start_factors: Value,
    proposal: Value,
    matrices: Value,
    parts: Value,
    RANK: constexpr,
    RANK_WIDTH: constexpr,
    ROWS: constexpr,
):
    """M Q of some rows: 64 sums of every 64th column, which are then folded."""
    part = parts + tl.program_id(0).to(tl.int64) * 2
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    rows = tl.load(matrix + 1)
    columns = tl.load(matrix + 2)
    start_factors += tl.load(matrix + 3)
    row = tl.load(part + 1) + tl.arange(0, ROWS)
    number = tl.arange(0, RANK_WIDTH)
    at = tl.load(matrix) + row[:, None] * columns
    sums = tl.zeros([RANK_WIDTH, ROWS, SPAN], tl.float32)
    first = columns * 0
    while first < columns:
        column = first + tl.arange(0, SPAN)[None, :]
        is_column = column < columns
        value, _ = compensated(bucket, residual, at + column, (row < rows)[:, None] & is_column)
        factor = tl.load(start_factors + number[:, None] * columns + column, (number < RANK)[:, None] & is_column, 0.0)
        sums += factor[:, None, :] * value[None, :, :]
        first += SPAN
    total = folded(tl.reshape(sums, [RANK_WIDTH * ROWS, SPAN]), RANK_WIDTH * ROWS)
    to = proposal + tl.load(matrix + 4) + number[:, None] * rows + row[None, :]
    is_there = (number < RANK)[:, None] & (row < rows)[None, :]
    tl.store(to, tl.reshape(total, [RANK_WIDTH, ROWS]), is_there)


@jit
def _project_back(
    bucket: Value,
    residual: Value,
    basis: Value,
    chunks: Value,
    matrices: Value,
    parts: Value,
    RANK: constexpr,
    RANK_WIDTH: constexpr,
    WIDTH: constexpr,
):
    """MᵀP of 32 rows, in order."""
    part = parts + tl.program_id(0).to(tl.int64) * 3
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    chunk = tl.load(part + 1)
    rows = tl.load(matrix + 1)
    columns = tl.load(matrix + 2)
    basis += tl.load(matrix + 4)
    column = tl.load(part + 2) + tl.arange(0, WIDTH)
    number = tl.arange(0, RANK_WIDTH)
    sums = tl.zeros([RANK_WIDTH, WIDTH], tl.float32)
    for i in range(CHUNK):
        row = chunk * CHUNK + i
        at = tl.load(matrix) + row * columns + column
        value, _ = compensated(bucket, residual, at, (column < columns) & (row < rows))
        factor = tl.load(basis + number * rows + row, (number < RANK) & (row < rows), 0.0)
        sums += factor[:, None] * value[None, :]
    to = chunks + tl.load(matrix + 5) + (chunk * RANK + number[:, None]) * columns + column[None, :]
    tl.store(to, sums, (number < RANK)[:, None] & (column < columns)[None, :])


@jit
def _add_chunks(
    chunks: Value,
    payload: Value,
    matrices: Value,
    parts: Value,
    RANK: constexpr,
    RANK_WIDTH: constexpr,
    WIDTH: constexpr,
):
    part = parts + tl.program_id(0).to(tl.int64) * 2
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    count = (tl.load(matrix + 1) + CHUNK - 1) // CHUNK
    columns = tl.load(matrix + 2)
    column = tl.load(part + 1) + tl.arange(0, WIDTH)
    number = tl.arange(0, RANK_WIDTH)
    is_there = (number < RANK)[:, None] & (column < columns)[None, :]
    place = number[:, None] * columns + column[None, :]
    chunks += tl.load(matrix + 5)
    total = tl.zeros([RANK_WIDTH, WIDTH], tl.float32)
    chunk = count * 0
    while chunk < count:
        total += tl.load(chunks + chunk * RANK * columns + place, is_there, 0.0)
        chunk += 1
    tl.store(payload + tl.load(matrix + 3) + place, total, is_there)


@jit
def _expanded(basis: Value, right: Value, rows: Value, columns: Value, row: Value, column: Value, RANK: constexpr):
    """P Qᵀ of a tile, in the order of the rank."""
    total = nothing([row.shape[0], column.shape[0]])
    for i in range(RANK):
        left = tl.load(basis + i * rows + row, row < rows, 0.0)
        total += left[:, None] * tl.load(right + i * columns + column, column < columns, 0.0)[None, :]
    return total


@jit
def _leave_out(
    bucket: Value,
    residual: Value,
    payload: Value,
    basis: Value,
    matrices: Value,
    parts: Value,
    RANK: constexpr,
    ROWS: constexpr,
    WIDTH: constexpr,
):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    rows = tl.load(matrix + 1)
    columns = tl.load(matrix + 2)
    row = tl.load(part + 1) + tl.arange(0, ROWS)
    column = tl.load(part + 2) + tl.arange(0, WIDTH)
    right = payload + tl.load(matrix + 3)
    sent = _expanded(basis + tl.load(matrix + 4), right, rows, columns, row, column, RANK)
    at = tl.load(matrix) + row[:, None] * columns + column[None, :]
    is_there = (row < rows)[:, None] & (column < columns)[None, :]
    value, old = compensated(bucket, residual, at, is_there)
    left_out = value - sent
    tl.store(residual + at, tl.where(_is_finite(left_out), left_out, old), is_there)


@jit
def _send_dense(bucket: Value, residual: Value, payload: Value, parts: Value, WIDTH: constexpr):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    number = tl.arange(0, WIDTH)
    is_there = number < tl.load(part + 2)
    at = tl.load(part) + number
    value, old = compensated(bucket, residual, at, is_there)
    tl.store(payload + tl.load(part + 1) + number, value, is_there)
    if residual is not None:
        tl.store(residual + at, tl.where(_is_finite(value), 0.0, old), is_there)


@jit
def _decode(
    payloads: Value,
    basis: Value,
    out: Value,
    matrices: Value,
    parts: Value,
    payload_elements: Value,
    factor: Value,
    RANKS: constexpr,
    RANK: constexpr,
    ROWS: constexpr,
    WIDTH: constexpr,
):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    rows = tl.load(matrix + 1)
    columns = tl.load(matrix + 2)
    row = tl.load(part + 1) + tl.arange(0, ROWS)
    column = tl.load(part + 2) + tl.arange(0, WIDTH)
    right = payloads + tl.load(matrix + 3)
    basis += tl.load(matrix + 4)
    total = nothing([ROWS, WIDTH])
    for _ in range(RANKS):
        total += _expanded(basis, right, rows, columns, row, column, RANK)
        right += payload_elements
    at = tl.load(matrix) + row[:, None] * columns + column[None, :]
    tl.store(out + at, total * factor, (row < rows)[:, None] & (column < columns)[None, :])


@jit
def _decode_dense(
    payloads: Value,
    out: Value,
    parts: Value,
    payload_elements: Value,
    factor: Value,
    RANKS: constexpr,
    WIDTH: constexpr,
):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    number = tl.arange(0, WIDTH)
    is_there = number < tl.load(part + 2)
    payloads += tl.load(part + 1)
    total = tl.load(payloads + number, is_there, other=0.0)
    for _ in range(1, RANKS):
        payloads += payload_elements
        total += tl.load(payloads + number, is_there, other=0.0)
    tl.store(out + tl.load(part) + number, total * factor, is_there)


def _orthonormal(factors: Tensor, plan: _Plan, *, is_start: bool) -> Tensor:
    """The bases of all matrices, fp32, where the factors lie."""
    longest = plan.longest_row if is_start else plan.longest_column
    height = max(1, (1 << (longest - 1).bit_length()) // 1024)
    basis = torch.empty_like(factors)
    work = torch.empty_like(factors, dtype=torch.float64)
    scratch = torch.empty(len(plan.matrices) * 1024, dtype=torch.float64, device=factors.device)
    constants = {"HEIGHT": height, "WIDTH": min(1024, max(1, _IN_REGISTERS // height))}
    arguments = (factors, basis, work, scratch, plan.matrices)
    launch(_orthonormalise, len(plan.matrices), *arguments, IS_START=is_start, **constants)
    return basis


def propose(
    compressor: PowerSGD,
    bucket: Tensor,
    residual: Tensor | None,
    segments: tuple[int, ...],
    state: Tensor | None,
    out: Tensor,
) -> bool:
    assert state is not None, "powersgd proposes from the factors of the step before"
    plan, rank = _plan(compressor, segments, bucket.device), compressor.rank
    start = _orthonormal(state, plan, is_start=True)
    arguments = (bucket, residual, start, out, plan.matrices, plan.row_parts)
    constants = {"RANK": rank, "RANK_WIDTH": plan.rank_width, "ROWS": plan.rows}
    launch(_project, len(plan.row_parts), *arguments, **constants)
    return True


def encode(
    compressor: PowerSGD,
    bucket: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    segments: tuple[int, ...],
    state: Tensor | None,
    agreed: Tensor | None,
) -> bool:
    assert agreed is not None, "powersgd compresses with what the ranks agreed on"
    plan, rank = _plan(compressor, segments, bucket.device), compressor.rank
    basis = _orthonormal(agreed, plan, is_start=False)
    chunks = torch.empty(plan.chunk_elements, device=bucket.device)
    constants = {"RANK": rank, "RANK_WIDTH": plan.rank_width, "WIDTH": _BACK_COLUMNS}
    arguments = (bucket, residual, basis, chunks, plan.matrices, plan.chunk_parts)
    launch(_project_back, len(plan.chunk_parts), *arguments, **constants)
    launch(_add_chunks, len(plan.column_parts), chunks, payload, plan.matrices, plan.column_parts, **constants)
    if residual is not None:
        arguments = (bucket, residual, payload, basis, plan.matrices, plan.tiles)
        launch(_leave_out, len(plan.tiles), *arguments, RANK=rank, ROWS=_ROW_BLOCK, WIDTH=_COLUMN_BLOCK)
    launch(_send_dense, len(plan.dense), bucket, residual, payload, plan.dense, WIDTH=_DENSE)
    return True


def decode(
    compressor: PowerSGD,
    payloads: Tensor,
    ranks: int,
    segments: tuple[int, ...],
    out: Tensor,
    agreed: Tensor | None,
    state: Tensor | None,
) -> bool:
    assert agreed is not None, "powersgd decompresses with what the ranks agreed on"
    plan, rank, factor = _plan(compressor, segments, out.device), compressor.rank, 1.0 / ranks
    basis = _orthonormal(agreed, plan, is_start=False)
    arguments = (payloads, basis, out, plan.matrices, plan.tiles, plan.payload_elements, factor)
    launch(_decode, len(plan.tiles), *arguments, RANKS=ranks, RANK=rank, ROWS=_ROW_BLOCK, WIDTH=_COLUMN_BLOCK)
    arguments = (payloads, out, plan.dense, plan.payload_elements, factor)
    launch(_decode_dense, len(plan.dense), *arguments, RANKS=ranks, WIDTH=_DENSE)
    return True
