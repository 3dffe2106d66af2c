"""Keep what a rank has summed up of a group of micro-batches that is not complete yet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxcomp.capture.training import Training


class Sums:
    """The sums of gradients over the micro-batches of a group so far, and the factor that makes a mean of them.

    They are fp32 at least, of whole parameters, and know no plan. No memory is taken before the first one is asked for.
    """

    def __init__(self, training: Training, length: int = 1):
        """Sum up `length` micro-batches, unless a group ends sooner."""
        self._length = length
        self._like = {owner.name: owner.parameter for owner in training.owned}
        self._device, self._scale = training.device, training.loss_scale
        self._sums: dict[str, Tensor] = {}
        self.micro_batches = 0
        """The number of micro-batches in the sums."""
        self.factor = torch.ones((), device=training.device) if self._scale is None else self._scale.inverse
        """What gradients are multiplied by in the micro-batch that ends the group."""

        self.count = torch.zeros(1, dtype=torch.float64, device=training.device)
        """The number of elements that weighted losses of the group are sums over, so far."""

    def of(self, name: str) -> Tensor:
        """The sum of a parameter's gradients, zeros at first; micro-batches add to it in place."""
        if name not in self._sums:
            like = self._like[name]
            wide = torch.promote_types(like.dtype, torch.float32)
            self._sums[name] = torch.zeros(like.shape, dtype=wide, device=self._device)
        return self._sums[name]

    def complete(self, *, is_weighted: bool) -> None:
        """Let one more micro-batch end the group: the gradient is the mean over all of its micro-batches.

        The mean of a weighted loss is made by its count. A scale of the loss is taken off.
        """
        ends_after = self.micro_batches + 1
        if self._scale is None:
            self.factor.fill_(1.0 if is_weighted else 1 / ends_after)
        else:
            torch.mul(self._scale.inverse, 1.0 if is_weighted else self._length / ends_after, out=self.factor)

    def seed(self, *, is_weighted: bool) -> Tensor:
        """What the backward pass of a micro-batch begins with: the scale, over the length of a whole group.

        So gradients in fp16 are infinite where those of a loop are that divides its loss by the length.
        """
        assert self._scale is not None, "only a scaled loss has a seed"
        scale = self._scale.scale
        return scale if is_weighted or self._length == 1 else scale / self._length

    def whole(self, name: str, gradient: Tensor, share: Tensor | None = None) -> Tensor:
        """The mean gradient of a group that ends with a micro-batch of this gradient; `share` weighs it."""
        before = self._sums.get(name)
        if before is None and share is None and self._scale is None:
            return gradient
        total = gradient if before is None else before + gradient
        factor = self.factor if share is None else share
        if share is not None and self._scale is not None:
            factor = share * self.factor
        return (total * factor).to(gradient.dtype)

    def share(self, count: Tensor | None, sum_over_ranks: Callable[[Tensor], object], ranks: int) -> Tensor:
        """What weighs gradients if the last batch of a group has this count; every rank calls it."""
        everywhere = self.count.clone() if count is None else self.count + count
        sum_over_ranks(everywhere)
        return torch.where(everywhere > 0, ranks / everywhere, 0.0)[0].float()

    def clear(self) -> None:
        """Begin another group."""
        for total in self._sums.values():
            total.zero_()
        self.count.zero_()
        self.micro_batches = 0
