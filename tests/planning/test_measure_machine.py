"""The compressors that a job measures: those that its choice may need, each once a machine."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks
from helpers.workloads import cluster, layers

import fxcomp
from fxcomp.compressors import Compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.error_tables import ASSUMED
from fxcomp.plan.compress import Compress
from fxcomp.plan.modes import MOMENTUM_COMPRESSORS, Content, Mode, error_limit
from fxcomp.plan.strategy import Device
from fxcomp.planning import measure_machine
from fxcomp.search.choose import bf16_everywhere
from fxcomp.search.losses import Losses
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms

CHOICES = [
    *(Compress.of(mode.value) for mode in Mode),
    Compress(within=0.9),
    Compress(within=fxcomp.like("sign")),
    Compress(within="lossy", measured=True),
    Compress(within="aggressive", steps=5000),
    Compress(pins={"l0.*": "topk(0.1)"}),
]


@pytest.mark.parametrize("compress", CHOICES, ids=lambda compress: str(compress.within))
def test_whatever_may_be_chosen_is_offered_and_so_has_a_price(compress: Compress):
    where, workload = cluster(4, 2, "1gbit"), layers(3)
    terms, losses = Terms.of(compress), Losses(workload.gradients, where, ASSUMED)
    limit = error_limit(compress.mode) if compress.budget is None else 0.9
    ways = [way for content in Content for way in terms.strategies(limit, losses, where, content)]
    ways += [bucket.strategy for bucket in bf16_everywhere(StepPrices(workload, fxcomp.CostTable(), where)).buckets]
    needed = {compressor for way in ways for compressor in way.compressors} | set(compress.pinned.compressors)
    if compress.chooses_point:
        needed |= set(MOMENTUM_COMPRESSORS)
    assert needed <= set(compress.offered)
    assert compress.budget is not None or set(compress.offered) <= needed, "nothing else is measured"


def no_links(*_: object) -> dict[str, Any]:
    return {}


def asked_in_turn() -> tuple[list[list[str]], list[str]]:
    """Compile for one mode after the other; return the compressors that were timed each time, and the last prices."""
    rank, asked = dist.get_rank(), list[list[str]]()

    def timed(compressors: Sequence[Compressor], *, device: Device = Device.GPU, **_: object) -> Any:
        asked[-1] += map(str, compressors)
        return {f"{c}@{device.value}": CompressorCost.of(CompressorPoint(1000, 1.0, 1.0)) for c in compressors}

    measure_machine.measure_compressors = timed
    measure_machine.hardware = lambda _: f"the machine of rank {rank}"  # whose cache is empty
    measure_machine.live_links = no_links
    job, keys = JOBS["mlp"], list[str]()
    for within in ("lossless", "balanced", "balanced", "lossy"):
        asked.append([])
        model, batch = job.build(), job.batch(0, rank)
        step = fxcomp.compile_step(
            model,
            cross_entropy,
            OPTIMIZERS["plain"](model.parameters()),
            batch,
            compress=within,
            checks=fxcomp.Checks(race="off"),
        )
        step(batch)
        step.replan()
        keys = sorted({key.partition("@")[0] for key in step.costs.compressors})
        step.close()
    return asked, keys


def test_a_job_measures_what_its_mode_offers_and_a_later_one_what_is_missing():
    lossy = sorted(str(c) for c in Compress.of("lossy").offered)
    for asked, known in run_ranks(2, asked_in_turn):
        *first, last = asked
        assert first == [["bf16"], ["int8", "int4"], []]
        assert sorted(["bf16", "int8", "int4", *last]) == known == lossy
