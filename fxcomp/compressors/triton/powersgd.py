"""Two thin factors of each matrix, bit-identical to `fxcomp/compressors/powersgd.py`.

Each launch covers all matrices of a bucket.

    propose   orthonormal Q, M Q
    encode    orthonormal P, MᵀP by chunks of 32 rows, the chunks' sum, the residual
    decode    orthonormal P, P Qᵀ
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.powersgd import PowerSGD
from fxcomp.compressors.triton.language import constant, constexpr, jit, launch, sum_of_columns, tl
from fxcomp.compressors.triton.orthonormal import (
    CHUNKS_AT,
    COLUMN_COUNT,
    FIRST_VALUE,
    MATRIX_COLUMNS,
    P_AT,
    Q_AT,
    ROW_COUNT,
    orthonormal,
)
from fxcomp.compressors.triton.tiles import compensated, is_finite, nothing

_ROW_BLOCK, _COLUMN_BLOCK = 8, 256  # tile of P Qᵀ per program: 16 values per thread  # assumed
ROW_BLOCK, COLUMN_BLOCK = constant(_ROW_BLOCK), constant(_COLUMN_BLOCK)
_BACK_COLUMNS = 128  # columns of MᵀP per program: one per thread  # assumed
_SUM_COLUMNS, _SUM_WARPS = 32, 2  # columns of the chunks' sum per program  # assumed
_DENSE = 1024  # dense values per program  # assumed
DENSE = constant(_DENSE)
CHUNK = constant(32)  # the same numbers as in the reference
SPAN = constant(64)
AHEAD = constant(8)  # chunks read before the first is added  # assumed


@dataclass(frozen=True)
class _LaunchPlan:
    """Device tables: matrices, and the work items of each launch."""

    matrices: Tensor
    row_parts: Tensor
    """Work items of M Q: matrix index, first row."""
    chunk_parts: Tensor
    """Work items of MᵀP: matrix index, chunk of rows, first column."""
    column_parts: Tensor
    """Work items of the sum over chunks: matrix index, first column."""
    tiles: Tensor
    """Work items of P Qᵀ: matrix index, first row, first column."""
    dense: Tensor
    """Work items of dense segments: first value's index in the bucket and in the payload, number of values."""
    chunk_elements: int
    longest_row: int
    longest_column: int
    rank_width: int
    """The compressor's `rank`, rounded up to a power of two."""


@cache
def _plan(compressor: PowerSGD, segments: tuple[int, ...], device: torch.device) -> _LaunchPlan:
    rank = compressor.rank
    rank_width = 1 << (rank - 1).bit_length()
    matrices: list[tuple[int, ...]] = []
    row_parts: list[tuple[int, ...]] = []
    chunk_parts: list[tuple[int, ...]] = []
    column_parts: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    dense: list[tuple[int, ...]] = []
    start = payload = proposal = chunk_element = 0
    for size, columns in zip(segments, compressor.all_columns(segments), strict=True):
        if columns:
            rows, index = size // columns, len(matrices)
            chunks, stretches = -(-rows // 32), range(0, columns, _BACK_COLUMNS)
            matrices.append((start, rows, columns, payload, proposal, chunk_element, rank))
            row_parts += [(index, row) for row in range(0, rows, _rows_at_once(rank_width))]
            column_parts += [(index, column) for column in range(0, columns, _SUM_COLUMNS)]
            chunk_parts += [(index, chunk, column) for chunk in range(chunks) for column in stretches]
            blocks = range(0, columns, _COLUMN_BLOCK)
            tiles += [(index, row, column) for row in range(0, rows, _ROW_BLOCK) for column in blocks]
            payload += rank * columns
            proposal += rank * rows
            chunk_element += chunks * rank * columns
        else:
            dense += [(start + at, payload + at, min(size - at, _DENSE)) for at in range(0, size, _DENSE)]
            payload += size
        start += size
    tables = [(matrices, 7), (row_parts, 2), (chunk_parts, 3), (column_parts, 2), (tiles, 3), (dense, 3)]
    return _LaunchPlan(
        *(torch.tensor(rows, dtype=torch.int64, device=device).view(-1, columns) for rows, columns in tables),
        chunk_elements=chunk_element,
        longest_row=max((columns for _, _, columns, *_ in matrices), default=1),
        longest_column=max((rows for _, rows, *_ in matrices), default=1),
        rank_width=rank_width,
    )


def _rows_at_once(rank_width: int) -> int:
    return max(1, 128 // rank_width)


def propose(compressor: PowerSGD, given: EncoderInput, out: Tensor) -> None:
    assert given.state is not None, "powersgd proposes from the factors of the step before"
    plan = _plan(compressor, given.segments, given.bucket.device)
    start = orthonormal(given.state, plan.matrices, plan.longest_row, is_start=True)
    arguments = (given.bucket, given.residual, start, out, plan.matrices, plan.row_parts)
    constants = {"RANK": compressor.rank, "RANK_WIDTH": plan.rank_width, "ROWS": _rows_at_once(plan.rank_width)}
    launch(_project, len(plan.row_parts), *arguments, **constants)


def encode(compressor: PowerSGD, given: EncoderInput, payload: Tensor) -> None:
    assert given.agreed is not None, "powersgd compresses with the agreement of the ranks"
    plan, rank, values = _plan(compressor, given.segments, given.bucket.device), compressor.rank, given.bucket
    basis = orthonormal(given.agreed, plan.matrices, plan.longest_column, is_start=False)
    chunks = torch.empty(plan.chunk_elements, device=values.device)
    constants = {"RANK": rank, "RANK_WIDTH": plan.rank_width, "WIDTH": _BACK_COLUMNS}
    arguments = (values, given.residual, basis, chunks, plan.matrices, plan.chunk_parts)
    launch(_project_back, len(plan.chunk_parts), *arguments, **constants)
    constants["WIDTH"] = _SUM_COLUMNS
    arguments = (chunks, payload, plan.matrices, plan.column_parts)
    launch(_add_chunks, len(plan.column_parts), *arguments, warps=_SUM_WARPS, **constants)
    if given.residual is not None:
        arguments = (values, given.residual, payload, basis, plan.matrices, plan.tiles)
        launch(_leave_out, len(plan.tiles), *arguments, RANK=rank)
    launch(_send_dense, len(plan.dense), values, given.residual, payload, plan.dense)


def decode(compressor: PowerSGD, received: DecoderInput, out: Tensor) -> None:
    assert received.agreed is not None, "powersgd decompresses with the agreement of the ranks"
    plan, ranks = _plan(compressor, received.segments, out.device), received.ranks
    basis = orthonormal(received.agreed, plan.matrices, plan.longest_column, is_start=False)
    arguments = (received.payloads, basis, out, plan.matrices, plan.tiles, len(received.payloads) // received.ranks)
    launch(_decode, len(plan.tiles), *arguments, RANKS=ranks, RANK=compressor.rank)
    arguments = (received.payloads, out, plan.dense, len(received.payloads) // received.ranks)
    launch(_decode_dense, len(plan.dense), *arguments, RANKS=ranks)


@jit
def _part_of(matrices, parts, COLUMNS: constexpr):
    """Return this program's work item, and its matrix's table row, rows and columns."""
    part = parts + tl.program_id(0).to(tl.int64) * COLUMNS
    matrix = matrices + tl.load(part) * MATRIX_COLUMNS
    return part, matrix, tl.load(matrix + ROW_COUNT), tl.load(matrix + COLUMN_COUNT)


@jit
def _project(
    bucket, residual, start_factors, proposal, matrices, parts, RANK: constexpr, RANK_WIDTH: constexpr, ROWS: constexpr
):
    part, matrix, rows, columns = _part_of(matrices, parts, 2)
    start_factors += tl.load(matrix + Q_AT)
    row = tl.load(part + 1) + tl.arange(0, ROWS)
    number = tl.arange(0, RANK_WIDTH)
    at = tl.load(matrix + FIRST_VALUE) + row[:, None] * columns
    sums = tl.zeros([RANK_WIDTH, ROWS, SPAN], tl.float32)
    first = columns * 0
    while first < columns:
        column = first + tl.arange(0, SPAN)[None, :]
        is_column = column < columns
        value, _ = compensated(bucket, residual, at + column, (row < rows)[:, None] & is_column)
        factor = tl.load(start_factors + number[:, None] * columns + column, (number < RANK)[:, None] & is_column, 0.0)
        sums += factor[:, None, :] * value[None, :, :]
        first += SPAN
    total = sum_of_columns(tl.reshape(sums, [RANK_WIDTH * ROWS, SPAN]), RANK_WIDTH * ROWS, SPAN)
    to = proposal + tl.load(matrix + P_AT) + number[:, None] * rows + row[None, :]
    is_there = (number < RANK)[:, None] & (row < rows)[None, :]
    tl.store(to, tl.reshape(total, [RANK_WIDTH, ROWS]), is_there)


@jit
def _project_back(
    bucket, residual, basis, chunks, matrices, parts, RANK: constexpr, RANK_WIDTH: constexpr, WIDTH: constexpr
):
    part, matrix, rows, columns = _part_of(matrices, parts, 3)
    chunk = tl.load(part + 1)
    basis += tl.load(matrix + P_AT)
    column = tl.load(part + 2) + tl.arange(0, WIDTH)
    number = tl.arange(0, RANK_WIDTH)
    sums = tl.zeros([RANK_WIDTH, WIDTH], tl.float32)
    for i in range(CHUNK):
        row = chunk * CHUNK + i
        at = tl.load(matrix + FIRST_VALUE) + row * columns + column
        value, _ = compensated(bucket, residual, at, (column < columns) & (row < rows))
        factor = tl.load(basis + number * rows + row, (number < RANK) & (row < rows), 0.0)
        sums += factor[:, None] * value[None, :]
    to = chunks + tl.load(matrix + CHUNKS_AT) + (chunk * RANK + number[:, None]) * columns + column[None, :]
    tl.store(to, sums, (number < RANK)[:, None] & (column < columns)[None, :])


@jit
def _add_chunks(chunks, payload, matrices, parts, RANK: constexpr, RANK_WIDTH: constexpr, WIDTH: constexpr):
    part, matrix, rows, columns = _part_of(matrices, parts, 2)
    count = (rows + CHUNK - 1) // CHUNK
    column = tl.load(part + 1) + tl.arange(0, WIDTH)
    number = tl.arange(0, RANK_WIDTH)
    is_there = (number < RANK)[:, None] & (column < columns)[None, :]
    place = number[:, None] * columns + column[None, :]
    chunks += tl.load(matrix + CHUNKS_AT)
    total = tl.zeros([RANK_WIDTH, WIDTH], tl.float32)
    chunk = count * 0
    while chunk < count:
        for i in tl.static_range(AHEAD):  # adding a zero after the last chunk changes no sum
            is_chunk = is_there & (chunk + i < count)
            total += tl.load(chunks + (chunk + i) * RANK * columns + place, is_chunk, 0.0)
        chunk += AHEAD
    tl.store(payload + tl.load(matrix + Q_AT) + place, total, is_there)


@jit
def _expanded(basis, right, rows, columns, row, column, RANK: constexpr):
    """Compute a tile of P Qᵀ."""
    total = nothing([row.shape[0], column.shape[0]])
    for i in range(RANK):
        left = tl.load(basis + i * rows + row, row < rows, 0.0)
        total += left[:, None] * tl.load(right + i * columns + column, column < columns, 0.0)[None, :]
    return total


@jit
def _leave_out(bucket, residual, payload, basis, matrices, parts, RANK: constexpr):
    part, matrix, rows, columns = _part_of(matrices, parts, 3)
    row = tl.load(part + 1) + tl.arange(0, ROW_BLOCK)
    column = tl.load(part + 2) + tl.arange(0, COLUMN_BLOCK)
    right = payload + tl.load(matrix + Q_AT)
    sent = _expanded(basis + tl.load(matrix + P_AT), right, rows, columns, row, column, RANK)
    at = tl.load(matrix + FIRST_VALUE) + row[:, None] * columns + column[None, :]
    is_there = (row < rows)[:, None] & (column < columns)[None, :]
    value, old = compensated(bucket, residual, at, is_there)
    left_out = value - sent
    tl.store(residual + at, tl.where(is_finite(left_out), left_out, old), is_there)


@jit
def _send_dense(bucket, residual, payload, parts):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    number = tl.arange(0, DENSE)
    is_there = number < tl.load(part + 2)
    at = tl.load(part) + number
    value, old = compensated(bucket, residual, at, is_there)
    tl.store(payload + tl.load(part + 1) + number, value, is_there)
    if residual is not None:
        tl.store(residual + at, tl.where(is_finite(value), 0.0, old), is_there)


@jit
def _decode(payloads, basis, out, matrices, parts, payload_elements, RANKS: constexpr, RANK: constexpr):
    part, matrix, rows, columns = _part_of(matrices, parts, 3)
    row = tl.load(part + 1) + tl.arange(0, ROW_BLOCK)
    column = tl.load(part + 2) + tl.arange(0, COLUMN_BLOCK)
    right = payloads + tl.load(matrix + Q_AT)
    basis += tl.load(matrix + P_AT)
    total = nothing([ROW_BLOCK, COLUMN_BLOCK])
    for _ in range(RANKS):
        total += _expanded(basis, right, rows, columns, row, column, RANK)
        right += payload_elements
    at = tl.load(matrix + FIRST_VALUE) + row[:, None] * columns + column[None, :]
    tl.store(out + at, total * (1.0 / RANKS), (row < rows)[:, None] & (column < columns)[None, :])


@jit
def _decode_dense(payloads, out, parts, payload_elements, RANKS: constexpr):
    part = parts + tl.program_id(0).to(tl.int64) * 3
    number = tl.arange(0, DENSE)
    is_there = number < tl.load(part + 2)
    payloads += tl.load(part + 1)
    total = tl.load(payloads + number, is_there, other=0.0)
    for _ in range(1, RANKS):
        payloads += payload_elements
        total += tl.load(payloads + number, is_there, other=0.0)
    tl.store(out + tl.load(part) + number, total * (1.0 / RANKS), is_there)
