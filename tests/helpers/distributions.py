"""Draw independent samples of known distributions, and count what thresholds send of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, survivors
from fxcomp.compressors.topk import counts


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
    """Draw magnitudes, each with a random sign."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = DISTRIBUTIONS[distribution](n, generator).float()
    return torch.where(torch.rand(n, generator=generator) < 0.5, magnitudes, -magnitudes)


def shares_sent(compressor: Compressor, ratio: float, stream: Sequence[Tensor]) -> list[float]:
    """Encode a stream of one size, and return how many values each call sends, relative to the target."""
    n = len(stream[0])
    payload = torch.empty(compressor.payload_elements((n,)), dtype=torch.uint8)
    state, found = compressor.fresh_state(n, 0, 0), list[float]()
    for values in stream:
        compressor.encode(values, None, payload, (n,), state)
        found.append(values_sent(payload, (n,), ratio)[0] / counts((n,), ratio)[0])
    return found


def values_sent(payload: Tensor, segments: tuple[int, ...], ratio: float) -> list[int]:
    """Read from a payload how many values each segment sends."""
    found: list[int] = []
    start = 0
    for n, slots in zip(segments, survivors.capacities(segments, ratio), strict=True):
        found.append(int(payload[start : start + 4].view(torch.int32)))
        start += survivors.section_bytes(n, slots)
    return found
