"""Draw the cases that a search under an error budget is judged by, the same on every machine.

A case has up to 12 matrices, a table of measured errors, and a budget that is the error of a uniform setting. Values
and singular values of each gradient fall as powers of their rank, some steeply and some hardly; squares of gradients
differ by a million.

On *one wire* compressing, packing and updating take no time and each strategy has one collective. So a bucket is
nothing but a time on the wire, and the best plan is known for any number of tensors. *All* has every strategy, and the
prices of a data sheet.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors.powersgd import near_square
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ErrorRow, ErrorTable
from fxcomp.error_tables.table import CODECS, LARGEST, LOW_RANK
from fxcomp.plan.budget import Budget, ErrorBudget
from fxcomp.plan.modes import LADDER_COMPRESSORS, Content, Mode
from fxcomp.plan.strategy import Strategy
from fxcomp.search.losses import Losses
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload
from helpers.drawn_cases import exact, on_device, workload_of

MOST_TENSORS = 12
SETTINGS = ("int8", "int4", "int2", "sign", "topk(0.1)", "topk(0.03)", "topk(0.01)", "topk(0.001)", "powersgd(4)")

_NO_TIME = CompressorCost.of(CompressorPoint(4096, 0.0, 0.0, 0.0), CompressorPoint(1 << 20, 0.0, 0.0, 0.0))
_FASTEST = 1e15  # GB/s

ONE_WIRE = exact(
    CostTable(
        compressors={f"{compressor}@gpu": _NO_TIME for compressor in LADDER_COMPRESSORS},
        roofline=Roofline(gflops=_FASTEST, gb_per_s=_FASTEST, launch_us=0.0),
        pack_gb_per_s=_FASTEST,
        launch_us=0.0,
        copy_gb_per_s=12.0,  # so the pool, whose times are not known, takes no part
    )
)
"""Nothing but the wire takes time."""


@dataclass(frozen=True, slots=True)
class OneCollective(Terms):
    """Terms under which every strategy is one collective."""

    def strategies(
        self, limit: float, losses: Losses, cluster: Cluster, content: Content, *, offload: bool = True
    ) -> tuple[Strategy, ...]:
        offered = Terms.strategies(self, limit, losses, cluster, content, offload=offload)
        return tuple(each for each in offered if each.started_stages == 1)


@dataclass(frozen=True)
class BudgetCase:
    """A workload somewhere, and what a plan may lose."""

    name: str
    workload: Workload
    cluster: Cluster
    costs: CostTable
    terms: Terms


def drawn(number: int, *, one_wire: bool = True, most: int = MOST_TENSORS) -> BudgetCase:
    """Draw case `number`. Links between hosts have 0.1 to 10 Gbit/s."""
    chance = random.Random(f"budget {number}")
    hosts, gbit = chance.choice((2, 4, 8)), 10 ** chance.uniform(-1, 1)
    scale, gap_us = 10 ** chance.uniform(4.5, 6.5), 10 ** chance.uniform(1, 4)
    tensors: list[tuple[int, float]] = []
    ready_us = 0.0
    for _ in range(chance.randint(2, most)):
        ready_us += chance.random() * gap_us
        tensors.append((64 * int(65 + scale * 10 ** chance.uniform(-1, 0.7) / 64), round(ready_us, 1)))
    costs = ONE_WIRE if one_wire else on_device("v100")
    workload = _without_updates(tensors) if one_wire else workload_of(tensors, costs)
    cluster = Cluster(hosts, 1, intra=Link(5.0, 12.0), inter=Link.parse(f"{gbit:.3g}gbit"))
    asked = chance.choice(SETTINGS)
    budget = Budget(ErrorBudget.parse(asked), drawn_table(workload, chance))
    terms = (OneCollective if one_wire else Terms)(Mode.LOSSY, budget=budget)
    return BudgetCase(f"{number} {hosts}x1 {gbit:.3g}gbit {asked}", workload, cluster, costs, terms)


def _without_updates(tensors: list[tuple[int, float]]) -> Workload:
    gradients = tuple(Gradient(f"t{k}", near_square(n), ready_us, 0.0) for k, (n, ready_us) in enumerate(tensors))
    return Workload(gradients, tensors[-1][1])


def drawn_table(workload: Workload, chance: random.Random) -> ErrorTable:
    """Draw a row of errors for each gradient."""
    return ErrorTable({gradient.name: _row(gradient, chance) for gradient in workload.gradients})


def _row(gradient: Gradient, chance: random.Random) -> ErrorRow:
    steep, spectrum, spread = chance.uniform(0.0, 2.0), chance.uniform(0.0, 2.5), 10 ** chance.uniform(-0.7, 0.4)
    lengths = min(gradient.shape)
    values = [_left_out(max(1, topk.ratio * gradient.elements), gradient.elements, steep) for topk in LARGEST]
    ranks = [_left_out(powersgd.rank, lengths, spectrum) for powersgd in LOW_RANK]
    codecs = [_ROUNDED[str(codec)] * (spread if str(codec).startswith("int") else 1.0) for codec in CODECS]
    squares = gradient.elements * 10 ** chance.uniform(-3, 3)
    return ErrorRow(gradient.shape, squares, (*values, *ranks, *codecs), samples=8)


# Of Gaussian values, about; by integers it is more where a block has a large value, and less where all are alike.
_ROUNDED = {
    "bf16": 2.7e-6, "fp16": 4e-8,
    "int8": 8e-5, "int4": 0.014, "int2": 0.2, "sign": 0.45,
}  # fmt: skip


def _left_out(kept: float, count: int, power: float) -> float:
    """Return the share of squares after the first `kept` of `count`, if the k-th square is k to the -power."""
    if kept >= count:
        return 0.0
    return 1 - _sum(kept, power) / _sum(count, power)


def _sum(upto: float, power: float) -> float:
    """Integrate x to the -power from 1/2 to `upto` + 1/2, which is near the sum from 1 to `upto`."""
    if abs(power - 1) < 1e-9:
        return math.log(2 * upto + 1)
    return ((upto + 0.5) ** (1 - power) - 0.5 ** (1 - power)) / (1 - power)
