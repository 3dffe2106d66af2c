"""Small workloads and costs with round numbers."""

import random

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode
from fxcomp.search.workload import Gradient, Workload


def _points(encode_ns: float, decode_ns: float) -> CompressorCost:
    return CompressorCost.of(
        *(CompressorPoint(n, 2 + encode_ns * n / 1e3, 2 + decode_ns * n / 1e3) for n in (4096, 1 << 20))
    )


COSTS = CostTable(
    compressors={
        f"{parse_compressor('bf16')}@gpu": _points(0.35, 0.3),
        f"{parse_compressor('int8')}@gpu": _points(0.5, 0.3),
        f"{parse_compressor('int4')}@gpu": _points(0.5, 0.3),
        f"{parse_compressor('sign')}@gpu": _points(0.5, 0.3),
        f"{parse_compressor('topk(0.01)')}@gpu": _points(1.5, 0.05),
        f"{parse_compressor('sidco(0.01)')}@gpu": _points(0.6, 0.05),
    }
)

DISTINCT_MODES = (Mode.LOSSLESS, Mode.BALANCED, Mode.LOSSY)
"""`aggressive` offers gradients what `balanced` does."""


def cluster(hosts: int, ranks_per_host: int, inter: str) -> Cluster:
    return Cluster(hosts, ranks_per_host, intra=Link(5.0, 12.0), inter=Link.parse(inter))


def matrices(*elements: int, backward_us: float = 10_000.0, **options: object) -> Workload:
    """Gradients of these sizes, ready at even distances."""
    gradients = tuple(
        Gradient(f"w{k}", (n, 1), backward_us * (k + 1) / len(elements), n / 1e3) for k, n in enumerate(elements)
    )
    return Workload(gradients, backward_us, **options)


def layers(count: int, seed: int = 0, elements: int = 14_000_000, backward_us: float = 80_000.0) -> Workload:
    """A bias and a matrix a layer; forward takes the first third."""
    chance = random.Random(seed)
    shares = [chance.choice((0.3, 0.3, 1, 1, 2, 4)) for _ in range(count)]
    gradients: list[Gradient] = []
    for k, share in enumerate(shares):
        size = int(elements * share / sum(shares))
        ready_us = backward_us * (1 + 2 * (k + 1) / count) / 3.001
        gradients.append(Gradient(f"layer{k}.bias", (384,), ready_us, 2.0))
        gradients.append(Gradient(f"layer{k}.weight", (size, 1), ready_us, size / 1e3))
    return Workload(tuple(gradients), backward_us)
