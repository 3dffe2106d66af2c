"""The small job of docs/how_fxcomp_decides.md: five gradients on two hosts, and made-up costs with round numbers."""

from __future__ import annotations

import math

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode
from fxcomp.search.workload import Gradient, Workload

LINK = Link(alpha_us=50.0, gb_per_s=0.625)  # 5 Gbit/s
CLUSTER = Cluster(hosts=2, ranks_per_host=1, intra=LINK, inter=LINK)
MODE = Mode.BALANCED

UPDATE_US_PER_ELEMENT = 0.0005
COMPRESSOR_START_US = 10.0
COMPRESSORS_US = {"bf16": (200.0, 100.0), "int8": (300.0, 200.0), "int4": (400.0, 200.0)}
"""Time to compress and to decompress a million values, without the start of a kernel."""


def _compressor(encode_us: float, decode_us: float) -> CompressorCost:
    """Price a compressor by what a million values take."""
    ends = (COMPRESSOR_START_US + encode_us, COMPRESSOR_START_US + decode_us)
    start = CompressorPoint(1, COMPRESSOR_START_US, COMPRESSOR_START_US)
    return CompressorCost.of(start, CompressorPoint(1_000_000, *ends))


COSTS = CostTable(
    pack_gb_per_s=20.0,
    launch_us=10.0,
    compressors={f"{name}@gpu": _compressor(*us) for name, us in COMPRESSORS_US.items()},
    processors=Processors(1.0, 1.0),  # one core: no pool that could compress beside compute
    error=0.1,
)


def _workload() -> Workload:
    shapes_ready = {
        "head.weight": ((512, 1000), 8_000.0),
        "fc2.weight": ((1024, 512), 10_000.0),
        "norm.weight": ((1024,), 10_100.0),
        "fc1.weight": ((1024, 1024), 14_000.0),
        "embed.weight": ((2000, 1024), 20_000.0),
    }
    gradients = tuple(
        Gradient(name, shape, ready_us, update_us=UPDATE_US_PER_ELEMENT * math.prod(shape))
        for name, (shape, ready_us) in shapes_ready.items()
    )
    return Workload(gradients, backward_us=20_000.0)


WORKLOAD = _workload()
