"""The workloads that `optimality.py` judges a search by: drawn, or read from a file.

A workload says how many elements each tensor has and when its gradient is ready. What is left to say is assumed, and
the same for all: up to 4,096 elements are a vector, more are a matrix as square as may be; the optimizer reads and
writes five values for each element; backward ends with the last gradient.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cluster.processors import Processors
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost.devices import preset_named
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption, FxcompError
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
    return exact(preset_named(name).costs(compressors_of(Mode.AGGRESSIVE)))


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


# Reading


def read(path: Path, costs: CostTable) -> list[Case]:
    """Read workloads from a file. Raises BadOption, which says what is wrong where."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadOption(f"cannot read the workloads {path}: {error}") from None
    if not isinstance(data, list):
        raise BadOption(f"{path}: must be a list of {{name, cluster, tensors}}, not {_shown(data)}")
    return [_case(f"{path}: [{k}]", each, costs) for k, each in enumerate(data)]


def _case(place: str, data: Any, costs: CostTable) -> Case:
    if not isinstance(data, dict) or set(data) != {"name", "cluster", "tensors"}:
        raise BadOption(f"{place} must have name, cluster and tensors and nothing else, not {_shown(data)}")
    if not isinstance(data["name"], str):
        raise BadOption(f"{place}.name must be a text, not {_shown(data['name'])}")
    tensors = _tensors(f"{place}.tensors", data["tensors"])
    return Case(data["name"], workload_of(tensors, costs), _cluster(f"{place}.cluster", data["cluster"]), costs)


def _cluster(place: str, data: Any) -> Cluster:
    try:
        if isinstance(data, str):
            return Cluster.parse(data, intra=INTRA, inter=INTER)
        if isinstance(data, dict):
            return Cluster.from_json(data)
    except FxcompError as error:
        raise BadOption(f"{place}: {error}") from None
    raise BadOption(
        f'{place} must be a text like "8x8, inter 10gbit" or what Cluster.to_json gives, not {_shown(data)}'
    )


def _tensors(place: str, data: Any) -> list[tuple[int, float]]:
    if not isinstance(data, list) or not data:
        raise BadOption(f"{place} must be a list of [elements, ready_us], at least one, not {_shown(data)}")
    found: list[tuple[int, float]] = []
    for k, each in enumerate(data):
        if not isinstance(each, list) or len(each) != 2:
            raise BadOption(f"{place}[{k}] must be [elements, ready_us], not {_shown(each)}")
        elements, ready_us = each
        if not isinstance(elements, int) or isinstance(elements, bool) or not 1 <= elements <= MOST_ELEMENTS:
            raise BadOption(f"{place}[{k}][0], elements, must be 1 to {MOST_ELEMENTS:,}, not {_shown(elements)}")
        if not isinstance(ready_us, int | float) or isinstance(ready_us, bool) or not 0 <= ready_us < math.inf:
            raise BadOption(f"{place}[{k}][1], ready_us, must be a time from 0 on, not {_shown(ready_us)}")
        if found and ready_us < found[-1][1]:
            raise BadOption(f"{place}[{k}] is ready before the one before it: write tensors in ready order")
        found.append((elements, float(ready_us)))
    return found


MOST_ELEMENTS = 10**12


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
