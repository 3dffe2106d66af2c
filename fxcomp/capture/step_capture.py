"""Capture a job's step for planning, and again for other batches and settings.

A warning names parameters without a gradient. The step skips them, as eager PyTorch does.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.fake_mode import Varying
from fxcomp.capture.optimizer import baked, live_numbers
from fxcomp.capture.step_guard import StepGuard, settled
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.errors import CaptureFailed, StepChanged
from fxcomp.graph.captured import Captured, buffers, is_known_early, last_writes, parameters_written_apart
from fxcomp.graph.info import update_info
from fxcomp.ranks import ALONE, Ranks

SMALL_BYTES = 1 << 16
"""Maximum total size, in bytes, of sent buffers that no first capture writes (assumed to be cheap)."""


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """Names of the buffers that rank 0 sends, and when.

    DistributedDataParallel sends all buffers before each forward pass. Here only buffers that may have changed are
    sent, after the backward pass. A rank sees only its own captures, so the set is fixed at the first capture:

        written by the first capture of any rank      sent
        others, up to SMALL_BYTES                     sent
        large constants, such as attention masks      not sent; a later write raises an error that names the buffer
    """

    names: frozenset[str]
    leave_early: bool

    @classmethod
    def agree(cls, graph: GraphModule, ranks: Ranks = ALONE) -> SharedBuffers:
        """Agree on the buffers that rank 0 sends. Every rank calls this method with its first capture."""
        inputs = buffers(graph)
        names = {node: name for name, node in inputs.items()}
        mine: dict[str, Any] = {
            "written": [names[node] for node in last_writes(graph)],
            "early": is_known_early(graph),
        }
        everyone = ranks.gather("comparing buffers", mine)
        written = {name for theirs in everyone for name in theirs["written"]}
        early = all(theirs["early"] for theirs in everyone)
        shared = frozenset(written | _small(inputs, written))
        return cls(shared, leave_early=early)

    def mark(self, graph: GraphModule) -> None:
        """Label the buffers that are sent. Raises StepChanged if the capture writes another buffer."""
        inputs = buffers(graph)
        writes = last_writes(graph)
        for name, node in inputs.items():
            if name in self.names:
                update_info(node, leaves_early=self.leave_early)
            elif node in writes:
                raise StepChanged(
                    f"the buffer {name!r} ({_bytes(node) / 1e3:.3g} kB) is written for this batch, and was not on any"
                    " rank when the step was compiled.\n"
                    "  Ranks agree on the buffers that they share when they compile: pass compile_step an example batch"
                    " for which the forward pass writes it, on one rank at least."
                )


def check_parameters_are_read(graph: GraphModule) -> None:
    """Raise CaptureFailed if the forward pass writes a batch-dependent value into a parameter.

    Otherwise replicas would diverge. Values that depend only on other parameters are allowed (MoCo's encoder).
    """
    if written := parameters_written_apart(graph):
        raise CaptureFailed(
            f"the forward pass writes the parameter {written[0]!r}, as nn.Embedding(max_norm=...) does: each"
            " rank would write values of its own batch, and replicas would drift apart.\n"
            "  Write it after the step, the same on all ranks: with torch.no_grad(): parameter.copy_(...)."
        )


def _small(inputs: Mapping[str, Node], written: Collection[str]) -> set[str]:
    chosen: set[str] = set()
    left = SMALL_BYTES
    for name, node in inputs.items():
        if name not in written and _bytes(node) <= left and not _overlaps(node.meta["val"]):
            chosen.add(name)
            left -= _bytes(node)
    return chosen


def _overlaps(value: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`. No step can write it."""
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _bytes(node: Node) -> int:
    return node.meta["val"].nbytes


def warn_unreached(names: Iterable[str]) -> None:
    for name in names:
        warnings.warn(
            f"fxcomp: the loss does not depend on {name!r} in a way that backward() follows: it gets no gradient and is"
            " skipped, as eager PyTorch skips it. Set requires_grad=False if that is meant.",
            stacklevel=compat.users_level(),
        )


def capture_first(training: Training, batch: Any) -> Captured:
    captured = settled(StepGuard(training), lambda: capture(training, batch), attrgetter("graph"))
    warn_unreached(captured.without_gradient)
    return captured


def facts_to_agree_on(training: Training, captured: Captured) -> dict[str, Any]:
    named = list(training.model.named_parameters())
    facts: dict[str, Any] = {f"the shape of {name!r}": list(p.shape) for name, p in named}
    facts |= {f"the type of {name!r}": str(p.dtype) for name, p in named}
    facts |= {f"requires_grad of {name!r}": p.requires_grad for name, p in named}
    for name, buffer in training.model.named_buffers():
        facts[f"the shape of the buffer {name!r}"] = list(buffer.shape)
        facts[f"the dtype of the buffer {name!r}"] = str(buffer.dtype)
    facts |= {f"a gradient of {name!r}": True for name in captured.gradient_names}
    facts["the optimizer"] = ", ".join(type(optimizer).__name__ for optimizer in training.optimizers)
    for number, group in enumerate(training.groups):
        for key, value in {**group, **live_numbers(group)}.items():
            if isinstance(value := baked(value), bool | int | float | str | type(None)):
                facts[f"{key} of parameter group {number}"] = value
    facts["a count with the loss"] = captured.is_weighted
    facts["max_grad_norm"] = training.max_grad_norm
    facts["max_grad_value"] = training.max_grad_value
    return facts


@dataclass(frozen=True, slots=True)
class StepCapture:
    """A step's first capture, and the settings of later captures."""

    training: Training
    first: Captured
    kind: BatchType
    guard: StepGuard
    shared_buffers: SharedBuffers
    alone: bool = True

    @classmethod
    def agreed(cls, training: Training, first: Captured, batch: Any, ranks: Ranks = ALONE) -> StepCapture:
        """Agree on the buffers that rank 0 sends. Every rank calls this method with its first capture."""
        shared_buffers = SharedBuffers.agree(first.graph, ranks)
        shared_buffers.mark(first.graph)
        kind, _ = batch_type(batch)
        return cls(training, first, kind, StepGuard(training), shared_buffers, ranks.world_size == 1)

    def again(self, batch: Any, varying: Varying) -> Captured:
        """Capture for another batch; `varying` maps batch leaves to their symbolic dimensions.

        Ranks do not communicate. Raises StepChanged if the parameters with a gradient differ from the first capture's,
        because all ranks then need another plan.
        """
        captured = capture(self.training, batch, varying)
        if captured.is_weighted != self.first.is_weighted:
            raise StepChanged(
                "loss_fn returns a WeightedLoss for some batches and a plain loss for others, which have no common"
                " mean.\n"
                "  Return a WeightedLoss for all of them, or for none."
            )
        if changed := sorted(set(self.first.gradient_names) ^ set(captured.gradient_names)):
            raise StepChanged(
                "for this batch other parameters get a gradient than when the step was compiled: "
                f"{', '.join(changed[:3])}.\n"
                "  Pass find_unused_parameters=True to compile_step, or let every parameter take part in every loss."
            )
        if not self.alone:
            check_parameters_are_read(captured.graph)
            self.shared_buffers.mark(captured.graph)
        return captured
