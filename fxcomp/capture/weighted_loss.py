"""A loss that is a sum over some of a batch's elements: how many they are is counted over all ranks."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp.errors import LossNotScalar


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A loss whose elements all count the same, in whatever rank or micro-batch they are.

    The gradient is that of the sum of all ranks' sums over the sum of their counts. The number of ranks is no concern
    of the loss function's; averaging knows it. `WeightedLoss(losses.sum(), (labels != -100).sum())` is the mean over
    all tokens with a label. A step returns the mean over this rank's own batch.
    """

    sum: Tensor
    count: Tensor | float
    """The number of elements, or the sum of their weights: none are negative."""

    @property
    def counted(self) -> Tensor:
        """The count as a tensor of one element in double precision, whole up to 2^53."""
        if isinstance(self.count, Tensor):
            if self.count.numel() != 1:
                raise LossNotScalar(
                    f"the count of a WeightedLoss has the shape {tuple(self.count.shape)}; it must be one number.\n"
                    "  Sum it up in loss_fn: WeightedLoss(losses.sum(), weights.sum())."
                )
            return self.count.detach().to(self.sum.device, torch.float64).reshape(1)
        if not isinstance(self.count, numbers.Real | torch.SymInt | torch.SymFloat):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LossNotScalar(
                f"the count of a WeightedLoss is a {type(self.count).__name__}; it must be a tensor of one element or a"
                " number."
            )
        return torch.full((1,), self.count, dtype=torch.float64, device=self.sum.device)

    @property
    def mean(self) -> Tensor:
        """The loss of this batch alone; zero elements leave the sum."""
        count = self.counted[0]
        return torch.where(count > 0, self.sum.detach() / count, self.sum.detach()).to(self.sum.dtype)


def split(result: Any) -> tuple[Any, Any, bool]:
    """Take apart what a loss function returned: the loss, the auxiliary result, and whether there is one."""
    parts: Any = result
    has_aux = isinstance(result, tuple) and len(parts) == 2
    loss, aux = parts if has_aux else (parts, ())
    return loss, aux, has_aux
