"""Draw the workloads that a search is judged by, the same on every machine.

A workload says how many elements each tensor has and when its gradient is ready. What is left to say is assumed, and
the same for all: up to 4,096 elements are a vector, more are a matrix as square as may be; the optimizer reads and
writes five values for each element; backward ends with the last gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost.devices import preset_named
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.search.workload import Gradient, Workload

VECTOR = 4096
UPDATE_BYTES = 20  # an element: SGD with momentum
INTRA = Link.parse("12GB/s@5us")
INTER = Link.parse("10gbit")


@dataclass(frozen=True)
class Case:
    """A workload somewhere."""

    name: str
    workload: Workload
    cluster: Cluster
    costs: CostTable


# Costs


def on_device(name: str) -> CostTable:
    """Prices by a data sheet; nothing runs on the host."""
    return exact(preset_named(name).costs(compressors_of(Mode.LOSSY)))


def on_host(processors: float) -> CostTable:
    """Prices where the host is the device: compute takes one processor, the pool's two threads share the others."""
    costs = {f"{parse_compressor(name)}@gpu": _points(*ns) for name, ns in _NS.items()}
    return exact(CostTable(compressors=costs, roofline=_HOST, processors=Processors(processors, 1.0)))


COSTS: Mapping[str, Callable[[], CostTable]] = {
    "v100": lambda: on_device("v100"),
    "host": lambda: on_host(1.0),  # no pool
    "pool": lambda: on_host(3.0),
    "shared": lambda: on_host(2.0),  # a pool that slows itself
}

_HOST = Roofline(gflops=100.0, gb_per_s=10.0, launch_us=2.0, source="assumed")

# Nanoseconds for an element, to encode and to decode (assumed: of the order of what one core was measured to take).
_NS = {
    "bf16": (0.35, 0.3),
    "int8": (0.5, 0.3),
    "int4": (0.5, 0.3),
    "sign": (0.5, 0.3),
    "topk(0.01)": (1.5, 0.05),
    "sidco(0.01)": (0.6, 0.05),
    "powersgd(4)": (2.0, 1.5),
    "powersgd(2)": (1.2, 0.9),
}


def _points(encode_ns: float, decode_ns: float) -> CompressorCost:
    sizes = (4096, 1 << 20)
    return CompressorCost.of(
        *(CompressorPoint(n, 2 + encode_ns * n / 1e3, 2 + decode_ns * n / 1e3, 2 + encode_ns * n / 2e3) for n in sizes)
    )


def exact(costs: CostTable) -> CostTable:
    """Believe every prediction: searches are compared by what they find, not by what they dare."""
    return replace(costs, error=0.0, compute_error=0.0)


# Making


def workload_of(tensors: Sequence[tuple[int, float]], costs: CostTable) -> Workload:
    """Make a workload of tensors with their elements and the time when they are ready."""
    gradients = tuple(
        Gradient(
            name=f"t{k}",
            shape=(elements,) if elements <= VECTOR else near_square(elements),
            ready_us=ready_us,
            update_us=costs.roofline.us(0.0, UPDATE_BYTES * elements),
        )
        for k, (elements, ready_us) in enumerate(tensors)
    )
    return Workload(gradients, max((ready_us for _, ready_us in tensors), default=0.0))


SHAPES = ("2x1", "4x1", "8x8")


def drawn(number: int, sizes: tuple[int, int] = (5, 8), costs: str | None = None) -> Case:
    """Draw workload `number`: the same on every machine.

    A quarter of the tensors are vectors. Matrices differ by a factor of 50 within a workload, workloads by 300; some
    gradients come at once after others, some much later. Links between hosts have 100 Mbit/s to 100 Gbit/s.
    """
    chance = random.Random(number)
    shape, gbit = chance.choice(SHAPES), 10 ** chance.uniform(-1, 2)
    name = costs or chance.choices(("v100", "host", "pool"), (9, 9, 2))[0]
    scale = 10 ** chance.uniform(4.5, 7)
    tensors: list[tuple[int, float]] = []
    ready_us = 0.0
    for _ in range(chance.randint(*sizes)):
        is_vector = chance.random() < 0.25
        elements = (
            chance.choice((64, 256, 768, 3072))
            if is_vector
            else 64 * int(65 + scale * 10 ** chance.uniform(-1, 0.7) / 64)
        )
        ready_us += chance.random() * 10 ** chance.uniform(1, 4)
        tensors.append((elements, round(ready_us, 1)))
    table = COSTS[name]()
    cluster = Cluster.parse(shape, intra=INTRA, inter=Link.parse(f"{gbit:.3g}gbit"))
    title = f"{number} {shape} {gbit:.3g}gbit {name}"
    return Case(title, workload_of(tensors, table), cluster, table)
