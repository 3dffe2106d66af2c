"""Gather the costs of a job: this machine's, the processors that its ranks share, and the live links'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxcomp.compressors import Compressor
from fxcomp.cost.table import CostTable
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.planning.measure_links import with_live_links
from fxcomp.planning.measure_machine import machine_costs
from fxcomp.runtime.transport import Groups
from fxcomp.site import Site


def gathered_costs(site: Site, pinned: Sequence[Compressor] = ()) -> CostTable:
    """Measure what nobody told: compressors that a mode may choose or that are pinned, and the links.

    A given cluster's links are not measured.
    """
    return with_ranks(machine_costs((*compressors_of(Mode.AGGRESSIVE), *pinned), site.device), site)


def with_ranks(costs: CostTable, site: Site) -> CostTable:
    """Add to a machine's costs the processors that its ranks share, and the live links. Every rank takes part, and
    those of other groups that share them."""
    if site.device.type == "cpu":
        costs = replace(costs, processors=site.processors())
    if not site.ranks.fits_links:
        return costs
    assert isinstance(site.transport, Groups), "several ranks have groups"
    return with_live_links(costs, site.transport, site.cluster, site.device, site.beside)
