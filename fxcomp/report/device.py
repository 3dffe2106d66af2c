"""Report an estimated step on an absent GPU: kernels, host time, memory, precision, advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxcomp.report.document import Block, Table, decimals, mb, ms


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """The step under one plan, or in eager DDP."""

    name: str
    launches: Mapping[str, int]
    """Numbers of kernels by kind of work, without collectives."""
    kernels_us: float
    host_us: float
    """Host time to launch the kernels."""
    memory: Mapping[str, float]
    """Bytes at the memory peak, by purpose."""

    @property
    def kernels(self) -> int:
        return sum(self.launches.values())

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Estimated step on a named device."""

    memory_bytes: int
    steps: Sequence[StepOnDevice]
    products: Mapping[str, float]
    """Fraction of all matrix products' floating-point operations, by dtype."""
    attention: Mapping[str, int]
    """Calls of fused attention, by kernel."""
    advice: Sequence[str]

    def blocks(self) -> list[Block]:
        digits = decimals(max(step.kernels_us for step in self.steps))
        rows = [
            (
                step.name,
                str(sum(step.launches.values())),
                ms(step.kernels_us, digits),
                ms(step.host_us, digits),
                mb(step.peak_bytes),
            )
            for step in self.steps
        ]
        names = ("a step", "kernels", "ms in kernels", "ms of the host", "peak MB")
        return [
            *self._sentences(),
            Table(names, rows, text=("a step",)),
            self._by_part("kernels", {step.name: step.launches for step in self.steps}, lambda number: f"{number:.0f}"),
            self._by_part("peak MB", {step.name: step.memory for step in self.steps}, mb),
            "Not counted: CUDA's context, workspaces of libraries, the allocator's cache, and in eager mode"
            " temporary memory of an optimizer without fused=True.",
        ]

    @staticmethod
    def _by_part(title: str, steps: Mapping[str, Mapping[str, float]], text: Callable[[float], str]) -> Table:
        parts = dict.fromkeys(part for step in steps.values() for part in step if step[part])
        rows = [(part, *(text(step.get(part, 0)) for step in steps.values())) for part in parts]
        return Table([title, *steps], rows, text=(title,))

    def _sentences(self) -> Iterator[str]:
        if self.products:
            shares = ", ".join(f"{name}: {share:.0%}" for name, share in self.products.items())
            yield f"Products run in {shares} of their floating-point operations."
        if self.attention:
            kinds = ", ".join(f"{name} ({times})" for name, times in self.attention.items())
            yield f"Attention runs in {kinds}."
        for step in self.steps:
            if step.peak_bytes > self.memory_bytes:
                yield f"{step.name} does not fit: {mb(step.peak_bytes)} MB of {mb(self.memory_bytes)}."
        yield from self.advice

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
