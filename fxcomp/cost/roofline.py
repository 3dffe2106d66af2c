"""Roofline prices of operations that were not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Measured:
    us: float
    spread: float = 0.0
    source: str = ASSUMED


@dataclass(frozen=True, slots=True)
class Roofline:
    gflops: float
    """GFLOP/s of float32 products."""
    gb_per_s: float
    launch_us: float = 5.0  # assumed: torch's dispatch of one op
    source: str = ASSUMED
    others: Mapping[str, float] = field(default_factory=dict[str, float])
    """GFLOP/s of products in other types, and of attention: `{"bf16": 312_000.0, "bf16 attention": 230_000.0}`. By
    default, attention has the rate of its type's products, and a type the rate of float32.
    """

    def us(self, flops: float, size: float, math_type: str = "f32") -> float:
        """Return the time of an operation of `flops` that moves `size` bytes.

        The maximum of launch, arithmetic and memory time (Williams and others, "Roofline", 2009).
        """
        gflops = self.others.get(math_type) or self.others.get(math_type.split()[0], self.gflops)
        return max(self.launch_us, flops / (gflops * 1e3), size / (self.gb_per_s * 1e3))

    def __str__(self) -> str:
        others = "".join(f", {name} {_flops(gflops)}" for name, gflops in self.others.items() if " " not in name)
        return f"{_flops(self.gflops)}{others} and {self.gb_per_s:.4g} GB/s"


def _flops(gflops: float) -> str:
    return f"{gflops / 1e3:.4g} TFLOP/s" if gflops >= 1e3 else f"{gflops:.4g} GFLOP/s"
