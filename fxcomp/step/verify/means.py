"""Check that updates get the mean of the ranks' gradients, without sending any gradient again.

A weighted sum of a mean is the mean of the weighted sums: ranks exchange two numbers for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.runtime.runtime import Runtime
from fxcomp.step.verify.compare import HALF

COLUMNS = 128

ROUNDING = 1e-5
"""The error that a weighted sum may have, relative to the norm: roundings of float32 are independent.

Of gradients in 16 bits it is what all their noise may be (`HALF`): they are rounded where they are packed and summed.
"""


class Means:
    """Weighted sums of local gradients, then of their mean."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[str, tuple[float, float]] = {}
        """By parameter: the weighted sum, and the sum of squares."""
        self.is_known = False

    def add(self, name: str, gradient: Tensor, start: int = 0) -> None:
        """Take in a local gradient, or a part of one from element `start` on."""
        weighted, squares = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = weighted + weighted_sum(gradient, start), squares + square_sum(gradient)

    def average(self, names: Sequence[str], runtime: Runtime, ranks: int) -> None:
        """Average over the ranks; all of them call it with the same names."""
        mine = [number for name in names for number in self._sums[name]]
        numbers = torch.tensor(mine, dtype=torch.float64, device=self._device)
        runtime.transport.all_reduce(numbers, "world", "main").wait()
        values = [float(number) / ranks for number in numbers.cpu()]
        self._sums = dict(zip(names, zip(values[0::2], values[1::2], strict=True), strict=True))
        self.is_known = True

    def contradict(self, name: str, gradient: Tensor, factor: float) -> bool:
        """Ask if a gradient is not the mean times a factor."""
        expected, squares = self._sums[name]
        rounding = HALF.get(gradient.dtype, ROUNDING)
        found, allowed = weighted_sum(gradient), rounding * math.sqrt(squares) * factor + _least(gradient)
        if not math.isfinite(expected) or not math.isfinite(allowed):
            return math.isfinite(found)
        return not abs(found - factor * expected) <= allowed + 1e-30


def _least(gradient: Tensor) -> float:
    """Bound the weighted sum of values that are too small for the type: fp16 has none below 6e-8."""
    known = torch.finfo(gradient.dtype)
    return known.smallest_normal * known.eps * math.sqrt(gradient.numel())


def weighted_sum(value: Tensor, start: int = 0) -> float:
    """Sum values with weights that follow from the place alone, on every machine; neighbours weigh differently.

    The first value's place is `start`, so that sums of parts add up to the sum of the whole.
    """
    flat = value.detach().double().reshape(-1)
    row, column = divmod(start, COLUMNS)
    flat = torch.nn.functional.pad(flat, (column, -(column + flat.numel()) % COLUMNS)).view(-1, COLUMNS)
    rows = _weights(row + flat.shape[0], 251, flat.device)[row:]
    return float((flat @ _weights(COLUMNS, 127, flat.device) @ rows).item())


def square_sum(value: Tensor) -> float:
    """Sum the squares of a tensor's values."""
    return float(value.detach().double().square().sum().item())


def _weights(count: int, prime: int, device: torch.device) -> Tensor:
    """Make weights between -1 and 1 without apparent order."""
    return (torch.arange(count, dtype=torch.float64, device=device) * 73 + 11).remainder(prime) * (2 / prime) - 1
