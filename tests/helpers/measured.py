"""Errors of compressors by their references, and error tables of several ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.error_tables import FAMILIES, ErrorTable, joined, measure
from fxcomp.testing.rounds import average, replicas_of


def lost(compressor: Compressor, values: Tensor, shape: tuple[int, ...], *, rounds: int = 1) -> float:
    """Return what a compressor's reference loses of values, in the last of so many rounds."""
    segments = (values.numel(),)
    replicas = replicas_of(compressor.bound_to([shape], 1), segments, feedback=False)
    decoded = values
    for _ in range(rounds):
        decoded = average(compressor, [values], replicas, segments, [shape])
    left = (values - decoded).double()
    return (left.square().sum() / values.double().square().sum()).item()


def measured(
    gradients: Mapping[str, Tensor],
    residuals: Mapping[str, Tensor] | None = None,
    *,
    rank: int = 0,
    look: int = 0,
    all_reduce: Callable[[Tensor], object] = lambda _: None,
) -> ErrorTable:
    """Measure all families in one look each, by default on the only rank."""
    looks = (measure(gradients, residuals or {}, each, all_reduce, rank=rank, look=look) for each in FAMILIES)
    return joined(list(looks))


def measured_together(parts: list[dict[str, Tensor]]) -> list[ErrorTable]:
    """Measure by so many ranks at once, each a thread, which add up in rank order."""
    barrier = Barrier(len(parts))
    brought: dict[int, Tensor] = {}

    def all_reduce(rank: int, sums: Tensor) -> None:
        brought[rank] = sums.clone()
        barrier.wait()
        sums.copy_(torch.stack([brought[each] for each in range(len(parts))]).sum(dim=0))
        barrier.wait()

    def on(rank: int) -> ErrorTable:
        return measured(parts[rank], rank=rank, all_reduce=partial(all_reduce, rank))

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(on, range(len(parts))))
