"""Draw independent samples of known distributions: magnitudes, each with a random sign."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, dtype=torch.float64).clamp_min(1e-12)


def _pareto(shape: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: (_uniform(n, generator) ** -shape - 1) / shape


def _student_3(n: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(4, n, generator=generator, dtype=torch.float64)
    return normal[0].abs() / normal[1:].square().mean(dim=0).sqrt()


DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "Laplace": lambda n, generator: -_uniform(n, generator).log(),
    "Gaussian": lambda n, generator: torch.randn(n, generator=generator, dtype=torch.float64).abs(),
    "gamma ½": lambda n, generator: torch.randn(n, generator=generator, dtype=torch.float64).square(),
    "Pareto .2": _pareto(0.2),
    "Pareto .45": _pareto(0.45),
    "Student t₃": _student_3,
}


def draw(distribution: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = DISTRIBUTIONS[distribution](n, generator).float()
    return torch.where(torch.rand(n, generator=generator) < 0.5, magnitudes, -magnitudes)
