"""A training step as input of the search."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fxcomp.errors import BadOption
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Content
from fxcomp.plan.plan import part_shape

MOST_US = 1e18
"""Upper limit of times in µs, so that sums are finite (assumed)."""


@dataclass(frozen=True, slots=True)
class Gradient:
    name: str
    shape: tuple[int, ...]
    ready_us: float
    """Compute time until backward has produced the gradient."""
    update_us: float
    element_type: ElementType = ElementType.F32
    own_us: float = 0.0
    """Time to update the rank's momentum before the exchange, if momenta are exchanged."""
    moved_us: float = 0.0
    """Replaces `update_us` if momenta are exchanged."""
    joined_bytes: int = 0
    """Bytes of the copy that joins a cut gradient's parts before the update. The part with the update has them."""

    def __post_init__(self) -> None:
        if not (0 <= self.ready_us <= MOST_US and 0 <= self.update_us <= MOST_US):
            name = "update_us" if 0 <= self.ready_us <= MOST_US else "ready_us"
            raise _bad_time(f"the gradient {self.name!r} has {name}", getattr(self, name))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        return self.element_type.itemsize * self.elements

    @property
    def is_vector(self) -> bool:
        return len(self.shape) <= 1

    def part(self, extent: range, *, bears_update: bool) -> Gradient:
        """Return a part of the gradient. With `bears_update` the part includes the whole update."""
        update_us, joined = (self.update_us, self.dense_bytes) if bears_update else (0.0, 0)
        return replace(self, shape=part_shape(self.shape, extent), update_us=update_us, joined_bytes=joined)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Gradient:
        kind = ElementType(data.get("element_type", ElementType.F32))
        values: dict[str, Any] = {**data, "shape": tuple(data["shape"]), "element_type": kind}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step without communication. Gradients are in ready order."""

    gradients: tuple[Gradient, ...]
    backward_us: float
    finish_us: float = 0.0
    """Compute after every gradient has arrived: the check for finite values, the norm, the clip coefficient."""
    clips: bool = False
    commits: bool = False
    """True if updates wait until every gradient is known to be finite, and state is saved for rollback."""
    saves_residuals: bool = False
    """True if a rollback restores residuals from exact copies."""
    broadcast_bytes: int = 0
    """Bytes of the buffers that rank 0 broadcasts, e.g. batch-norm statistics."""
    broadcast_ready_us: float = 0.0
    buffers_us: float = 0.0
    host_us: float = 0.0
    """Host time to launch the step, overlapped with the device's work."""

    def __post_init__(self) -> None:
        for name in ("backward_us", "finish_us", "broadcast_ready_us", "buffers_us", "host_us"):
            if not 0 <= getattr(self, name) <= MOST_US:
                raise _bad_time(f"a workload has {name}", getattr(self, name))
        if not 0 <= self.broadcast_bytes < math.inf:
            raise BadOption(
                f"a workload has broadcast_bytes = {self.broadcast_bytes}: write a size from 0 on, in bytes"
            )
        ready = [gradient.ready_us for gradient in self.gradients]
        assert ready == sorted(ready), "a workload's gradients are in ready order"
        assert not ready or ready[-1] <= self.backward_us, "backward ends with its last gradient or later"

    def after_compute(self, ahead_us: float) -> Workload:
        """Return the step with `ahead_us` more compute at the start; less compute if `ahead_us` is negative."""
        if not ahead_us:
            return self
        last_us = max(0.0, self.backward_us + ahead_us)

        def later(us: float) -> float:
            return min(max(0.0, us + ahead_us), last_us)  # rounding may not change the order

        return replace(
            self,
            gradients=tuple(replace(each, ready_us=later(each.ready_us)) for each in self.gradients),
            backward_us=last_us,
            broadcast_ready_us=later(self.broadcast_ready_us),
        )

    def moved(self, names: Collection[str]) -> Workload:
        """Return the step that exchanges momenta of these parameters."""
        if not names:
            return self
        more_us, broadcast_ready_us = 0.0, self.broadcast_ready_us
        gradients: list[Gradient] = []
        for each in self.gradients:
            if each.name in names:
                if each.ready_us < self.broadcast_ready_us:
                    broadcast_ready_us += each.own_us
                more_us += each.own_us
            update_us = each.moved_us if each.name in names else each.update_us
            gradients.append(replace(each, ready_us=each.ready_us + more_us, update_us=update_us))
        return replace(
            self,
            gradients=tuple(gradients),
            backward_us=self.backward_us + more_us,
            broadcast_ready_us=broadcast_ready_us,
        )

    @property
    def updates_wait(self) -> bool:
        """True if updates start after all gradients have arrived and `finish_us` of compute.

        False if each update waits only for its own bucket.
        """
        return self.clips or self.commits or self.finish_us > 0

    @property
    def compute_us(self) -> float:
        return self.backward_us + self.finish_us + sum(gradient.update_us for gradient in self.gradients)

    @property
    def free_us(self) -> float:
        """Step time without communication: the maximum of compute and host time."""
        return max(self.compute_us, self.host_us)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {gradient.name: gradient.shape for gradient in self.gradients}

    @property
    def sizes(self) -> dict[str, int]:
        return {gradient.name: gradient.elements for gradient in self.gradients}

    @property
    def types(self) -> dict[str, ElementType]:
        return {gradient.name: gradient.element_type for gradient in self.gradients}

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    @property
    def dense_bytes(self) -> int:
        return sum(gradient.dense_bytes for gradient in self.gradients)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Workload:
        fields = dict(data)
        gradients = tuple(map(Gradient.from_json, fields.pop("gradients")))
        return cls(gradients=gradients, **fields)

    def __str__(self) -> str:
        what = f"{len(self.gradients)} gradients, {self.elements:,} elements"
        return f"{what}, {self.free_us / 1e3:.4g} ms without communication"


def content_of(members: Sequence[Gradient]) -> Content:
    kinds = {gradient.is_vector for gradient in members}
    return Content.MIXED if len(kinds) == 2 else Content.VECTORS if kinds == {True} else Content.MATRICES


def _bad_time(what: str, us: float) -> BadOption:
    return BadOption(
        f"{what} = {us}: write a time from 0 to {MOST_US:g}, in us from the start of the step or of its own"
    )
