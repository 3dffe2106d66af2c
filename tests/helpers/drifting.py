"""A job whose links change in virtual time: a table that every step keeps to, and windows that are soon full."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import fxcomp
from fxcomp.cluster.cluster import Processors
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning import decide
from fxcomp.step import calendar, drift, schedule
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy

JOB = JOBS["mlp"]
WINDOW = 8
POINTS = tuple(CompressorPoint(n, n * 1e-2, n * 1e-2, n * 1e-2) for n in (1_000, 100_000))


def table(gbit: float, **more: Any) -> CostTable:
    """An operation takes 10 us, compressing a value 10 ns, and sending all 9,310 of them over 2 Gbit/s 150 us."""
    names = ("bf16", "int8", "int4", "sign", "topk(0.01)", "sidco(0.01)")
    points = {f"{name}@{device}": CompressorCost.of(*POINTS) for name in names for device in ("gpu", "cpu")}
    wires = {
        (kind, sits): MeasuredCollective.line(kind, ranks, 0.01, gbit / 8)
        for sits, ranks in (("1x2", 2), ("1x3", 3), ("2x2", 4), ("2x1*2", 2))
        for kind in CollectiveKind
    }
    known: dict[str, Any] = {
        "roofline": Roofline(50.0, 10.0, launch_us=10.0),
        "collectives": wires, "compressors": points, "launch_us": 10.0, "error": 0.1,
        "processors": Processors(1.0),
    }  # fmt: skip
    return CostTable(**{**known, **more})


def compiled(costs: CostTable, optimizer: str = "sgd", **options: Any) -> fxcomp.CompiledStep:
    model = JOB.build()
    given: dict[str, Any] = {"verify": 5, "within": "balanced", "costs": costs, "race": "off", **options}
    return fxcomp.compile_step(
        model,
        cross_entropy,
        OPTIMIZERS[optimizer](model.parameters()),
        JOB.batch(0, dist.get_rank()),
        **gathered(**given),
    )


@contextmanager
def short_windows() -> Generator[None]:
    """Steps are compared WINDOW at a time, of which two must be timed."""
    with (
        patch.object(drift, "LEAST", WINDOW // 4),
        patch.object(calendar, "WINDOW", WINDOW),
        patch.object(schedule, "WINDOW", WINDOW),
    ):
        yield


@contextmanager
def links_become(gbit: float) -> Generator[None]:
    """Links that are measured again have this speed."""

    def measured(costs: CostTable, _: Any) -> CostTable:
        return replace(costs, collectives=table(gbit).collectives)

    with patch.object(decide, "with_links_of_now", measured):
        yield


def same(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks found alike, to the bit."""
    for rank in ranks[1:]:
        for what in ("notes", "plan", "parameters", "rows"):
            assert rank[what] == ranks[0][what]
    return ranks[0]
