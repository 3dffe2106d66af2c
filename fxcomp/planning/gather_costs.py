"""Gather the costs of a job: this machine's, the processors that its ranks share, and the live links'."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.planning.measure_links import with_live_links
from fxcomp.planning.measure_machine import machine_costs
from fxcomp.ranks import Ranks
from fxcomp.runtime.transport import Groups, Transport


def gathered_costs(ranks: Ranks, cluster: Cluster, transport: Transport, device: torch.device) -> CostTable:
    """Measure what nobody told: every compressor that a mode may choose, and the links unless the cluster was given."""
    return with_ranks(machine_costs(compressors_of(Mode.AGGRESSIVE), device), ranks, cluster, transport, device)


def with_ranks(
    costs: CostTable, ranks: Ranks, cluster: Cluster, transport: Transport, device: torch.device
) -> CostTable:
    """Add to a machine's costs the processors that its ranks share, and the live links. Every rank takes part."""
    if device.type == "cpu":
        costs = replace(costs, processors=ranks.processors())
    if not ranks.fits_links:
        return costs
    assert isinstance(transport, Groups), "several ranks have groups"
    return with_live_links(costs, transport, cluster, device)
