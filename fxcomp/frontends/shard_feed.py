"""Pass the gradient shards of a fully_shard model to a plan, module by module, during a backward pass.

    fully_shard: reduce_scatter of a module ──► flat shard ──► here ──► `.grad`, views of the flat shard
                                                                │
                                      the plan's emitted step (hook_job.py), over the replicas

Because `.grad` is read only after backward, averages may be written after fully_shard's hook has returned, while
earlier layers compute. If `.grad` is not a view of the flat shard (accumulation, another dtype), the shard is copied
and zeroed, and the average of the copy is added to `.grad` after backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import FxcompError, Unsupported
from fxcomp.frontends.hook_job import HookJob
from fxcomp.frontends.sharded_modules import called
from fxcomp.runtime.packing import not_finite_too

REDUCED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes in which fully_shard finishes dividing gradients before it calls its hook (torch 2.13)."""


@dataclass(slots=True)
class _FeedPass:
    came: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Flat shards by module index."""
    fed: int = 0
    copied: list[int] = field(default_factory=list[int])
    """Indices of modules whose average is added to `.grad`."""
    not_finite: Tensor | None = None
    stream: Any = None


class ShardFeed:
    """Link between sharded modules and the plan that averages their shards."""

    def __init__(self, modules: Sequence[compat.ShardedModule], stand_ins: Sequence[list[Tensor]], job: HookJob):
        self._modules, self._stand_ins, self._job = modules, stand_ins, job
        self._shards = modules[0].shard_group.size()
        self._order: list[int] | None = None
        """Module indices in arrival order of the first pass. Later passes keep this order."""
        self._pass = _FeedPass()
        self._is_partial = [False] * len(modules)
        """True for modules whose `.grad` holds values that have not been averaged."""
        self.is_off = False

    def install(self) -> None:
        for number, module in enumerate(self._modules):
            module.on_reduced(partial(self._arrive, number))

    # A pass

    def _arrive(self, number: int, reduced: Tensor) -> None:
        """Take a module's flat shard after its reduction within the replica; torch calls it."""
        try:
            with torch.no_grad():
                module = self._modules[number]
                if self.is_off:
                    self._is_partial[number] = True
                    return
                if not self._pass.came:
                    compat.at_end_of_backward(self._end)
                self._check(number, module, reduced)
                self._pass.stream = compat.stream_of(reduced.device)
                flat = self._own(number, module, reduced)
                self._pass.not_finite = not_finite_too(self._pass.not_finite, flat)
                self._pass.came[number] = flat
        except FxcompError as error:
            self._stop(error)
            raise
        self._feed()

    def _own(self, number: int, module: compat.ShardedModule, reduced: Tensor) -> Tensor:
        """Return the flat shard, to be replaced by the average: a copy unless `.grad` is a view of `reduced`."""
        if module.becomes_gradients(reduced):
            self._is_partial[number] = False
            return reduced
        flat = reduced.clone()
        reduced.zero_()
        self._pass.copied.append(number)
        if self._is_partial[number]:
            for part, gradient in zip(_parts(module, flat), module.gradients(), strict=True):
                if gradient is not None:
                    _cut(part, gradient).add_(gradient)
                    gradient.zero_()
            self._is_partial[number] = False
        return flat

    def _feed(self) -> None:
        """Pass arrived shards to the job, in the order of the first pass."""
        now = self._pass
        order = list(now.came) if self._order is None else self._order
        while now.fed < len(order) and order[now.fed] in now.came:
            number = order[now.fed]
            is_last = now.fed == len(self._modules) - 1
            if is_last:
                self._agree_on_finite(now.came[number])
            now.fed += 1
            self._job.take(now.came[number], self._stand_ins[number], is_last=is_last)

    def _agree_on_finite(self, last: Tensor) -> None:
        """Make all ranks skip the step and keep residuals if any shard is not finite.

        Averaging carries a non-finite value only to ranks with the same shard. Therefore the ranks of a replica share a
        flag. If the flag is set, every rank sets an element of its last shard to NaN.
        """
        flag = self._pass.not_finite
        assert flag is not None, "a shard has come"
        if self._shards > 1:
            compat.largest(flag, self._modules[0].shard_group)
        if self._job.may_keep and bool(flag):
            last[0] = torch.nan

    def _end(self) -> None:
        """Add averages of copied shards to `.grad`; torch calls it at the end of backward."""
        now, self._pass = self._pass, _FeedPass()
        if now.fed < len(self._modules):
            if now.came:
                missing = next(k for k in range(len(self._modules)) if k not in now.came)
                error = Unsupported(
                    f"the backward pass has brought no gradients of {called(self._modules[missing])}, which"
                    " average_replicas was called for.\n  Let every module take part in each backward pass, or freeze"
                    " its parameters before average_replicas."
                )
                self._stop(error)
                raise error
            return
        if self._order is None:
            self._order = list(now.came)
        compat.wait_for_stream(now.stream)
        with torch.no_grad():
            for number in now.copied:
                module = self._modules[number]
                for part, gradient in zip(_parts(module, now.came[number]), module.gradients(), strict=True):
                    assert gradient is not None, "fully_shard has set the gradients of a reduced module"
                    gradient.add_(_cut(part, gradient))

    def _stop(self, error: BaseException) -> None:
        self._pass = _FeedPass()
        self._job.stop(error)

    def _check(self, number: int, module: compat.ShardedModule, reduced: Tensor) -> None:
        if number in self._pass.came:
            raise Unsupported(
                f"{called(module)} has reduced its gradients twice in one backward pass, as it does where a backward"
                " pass runs inside another one.\n  Pass use_reentrant=False to torch.utils.checkpoint."
            )
        if reduced.numel() != module.elements:
            raise Unsupported(
                f"some parameters of {called(module)} got no gradient in this backward pass: {reduced.numel()} of"
                f" {module.elements} elements have come.\n  Call model.set_reduce_scatter_unused_params(True), so that"
                " they bring zeros, or freeze them before average_replicas."
            )
        if reduced.dtype not in REDUCED_DTYPES:
            raise Unsupported(
                f"fully_shard reduces gradients as {reduced.dtype}, and divides a part of them after the replicas'"
                " mean.\n  Pass MixedPrecisionPolicy(reduce_dtype=torch.float32)."
            )
        if module.has_gradient_hooks:
            raise Unsupported(
                f"a parameter of {called(module)} has a hook that runs when its gradient is there"
                " (register_post_accumulate_grad_hook); the mean over replicas comes later.\n"
                "  Step the optimizer after backward."
            )


def _parts(module: compat.ShardedModule, flat: Tensor) -> Sequence[Tensor]:
    return torch.split_with_sizes(flat, [torch.Size(shape).numel() for shape in module.shapes])


def _cut(part: Tensor, gradient: Tensor) -> Tensor:
    return part[: gradient.numel()].view(gradient.shape)
