"""Sum squares of fp32 values that may be of any size, for the price of reading them once.

Sums of a row are fp32, whose range ends at squares of 1e38; rows beyond it, or too small for it, are summed in fp64,
which takes twenty times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_linalg: Any = torch.linalg

_SMALLEST, _LARGEST = 1e-15, 1e15  # of a norm whose square, and those of its parts, fp32 holds


def row_squares(rows: Tensor) -> Tensor:
    """Return |row|² of each row, in fp64."""
    if rows.numel() == 0:
        return rows.new_zeros(len(rows), dtype=torch.float64)
    norms: Tensor = _linalg.vector_norm(rows, dim=1)
    if not _SMALLEST < float(norms.max()) < _LARGEST:
        norms = _linalg.vector_norm(rows.double(), dim=1)
    return norms.double().square()


def squares(flat: Tensor, run: int = 512) -> float:
    """Return |flat|²; not finite where a value is not."""
    whole = len(flat) // run * run
    parts = [row_squares(flat[:whole].view(-1, run)), row_squares(flat[whole:].view(1, -1))]
    return float(torch.cat(parts).sum())


def row_crests(rows: Tensor, of_rows: Tensor) -> Tensor:
    """Return the square of each row's largest value over |row|², which is given; 0 for a row of zeros."""
    largest: Tensor = _linalg.vector_norm(rows, torch.inf, dim=1)
    return torch.where(of_rows > 0, largest.double().square() / of_rows, 0.0)
