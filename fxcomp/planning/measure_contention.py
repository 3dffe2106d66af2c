"""Work out how compute and communication slow each other in this very job, from its dense step on three networks.

NullTransport    what its regions take alone
the real one     what summing gradients does to them, and they to it
AllGatherStandIn what gathers do, which compressed steps are made of, before anything is compressed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cost.contention import FittedContention, SeenStep, fit_contention
from fxcomp.cost.measure import MOST_RECEIVED
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task
from fxcomp.graph.ops import ALL_REDUCE
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.planning.measure_step import StepMeasurement
from fxcomp.runtime.group import Work
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.runtime.transport import NullTransport, Transport
from fxcomp.search.plan_tasks import handing_out
from fxcomp.search.read_workload import graph_tasks

GATHERED = 4
"""A gather sends one in so many bytes of the gradient: about what quantizing to 8 bits leaves."""


class AllGatherStandIn:
    """A network on which a dense step gathers: it sends a part of what it would sum over all ranks, and drops it."""

    def __init__(self, transport: Transport, ranks: int) -> None:
        self._transport, self._ranks = transport, ranks
        self._outputs: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def place(self, level: str) -> int:
        return self._transport.place(level)

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:
        if level != Level.WORLD.value or how != "sum":
            return self._transport.all_reduce(value, level, lane, how)
        sent = value.flatten()[: max(1, value.numel() // GATHERED)]
        key = value.data_ptr(), sent.numel(), sent.dtype  # tensors without elements have one address
        out = self._outputs.get(key)  # several may be under way
        if out is None:
            out = self._outputs[key] = sent.new_empty(self._ranks * sent.numel())
        return self._transport.start(Transfer(Pattern.ALL_GATHER, sent, out, self._ranks, level, lane))

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:
        return self._transport.broadcast(value, source, level, lane)

    def start(self, transfer: Transfer) -> Work:
        return self._transport.start(transfer)

    def settle(self) -> None:
        self._transport.settle()


def networks(graph: GraphModule, transport: Transport, processors: Processors, cluster: Cluster) -> list[Transport]:
    """Return the networks to measure a dense step on: none, the real one, and gathers where processors are short.

    Gathers are left out where they would need memory that training would miss, or much more time than the real network.
    """
    first: list[Transport] = [NullTransport(transport), transport]
    received = cluster.world_size * sum(summed_bytes(graph).values()) / GATHERED
    is_worth_it = not processors.has_spare and 0 < received <= MOST_RECEIVED
    return [*first, AllGatherStandIn(transport, cluster.world_size)] if is_worth_it else first


def as_slowest(here: Sequence[StepMeasurement], everyone: Sequence[Sequence[Sequence[float]]]) -> list[StepMeasurement]:
    """Scale this rank's measurements on each network to the rank that computes the longest, for which the others wait.

    `everyone` holds each rank's (step, compute) on each network, in us. Ranks are taken to share compute out to
    operators alike.
    """
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank][0][1])
    found: list[StepMeasurement] = []
    for k, mine in enumerate(here):
        times = everyone[slowest][k][1] / mine.compute_us if mine.compute_us else 1.0
        regions = {name: us * times for name, us in mine.region_us.items()}
        step_us = max(ranks[k][0] for ranks in everyone)
        found.append(replace(mine, step_us=step_us, region_us=regions, pack_us=mine.pack_us * times))
    return found


def summed_bytes(graph: GraphModule) -> dict[str, int]:
    """Return the bytes that a step sums over all ranks, by the task's name."""
    values = {
        node.name: node.args[0].meta["val"]
        for node in graph.graph.nodes
        if node.target is ALL_REDUCE and node.args[-1] == Level.WORLD.value
    }
    return {name: value.numel() * value.element_size() for name, value in values.items()}


def contention_of(
    costs: CostTable, graph: GraphModule, cluster: Cluster, measured: Sequence[StepMeasurement]
) -> FittedContention:
    """Fit the contention that a dense step showed on `networks`, with the error of steps predicted without their own.

    The graph is annotated with its regions' times, and knows of no contention. A step that the host bounds
    (`costs.host_us`) is not taken for one that the network slows.
    """
    alone, *seen = measured
    tasks, summed = (*handing_out(costs.host_us), *graph_tasks(graph)), summed_bytes(graph)
    gathers: list[Task] = []
    for task in tasks:
        if task.name in summed:
            size = summed[task.name] / GATHERED
            price = costs.collective(CollectiveKind.ALL_GATHER, Level.WORLD, size, cluster)
            task = replace(task, duration_us=price.us, load=price.load, overlap_speed=price.overlap_speed)
        gathers.append(task)
    steps = [
        SeenStep(run, on.step_us, max(0.0, on.compute_us - alone.compute_us))
        for run, on in zip((tasks, tuple(gathers)), seen, strict=False)  # gathers may have been left out
    ]
    return fit_contention(steps, costs.processors)
