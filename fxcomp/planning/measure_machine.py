"""Measure a machine's memory and compressors, cache the results for the user, and combine all costs of a job."""

from __future__ import annotations

import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from fxcomp import compat
from fxcomp.cluster.cluster import Processors
from fxcomp.compressors import Compressor, kernels_available
from fxcomp.compressors.kernels import fingerprint
from fxcomp.cost.measure import measure_compressors, measure_copy, measure_memory
from fxcomp.cost.measured import CompressorCost
from fxcomp.cost.table import CostTable
from fxcomp.cost.table_cache import cached_table
from fxcomp.plan.strategy import Device
from fxcomp.planning.measure_links import live_links
from fxcomp.runtime.transport import Groups
from fxcomp.site import Site


def machine_costs(compressors: Sequence[Compressor], device: torch.device) -> CostTable:
    """Return costs of memory and compressors, from the user's cache or measured now (0.2 s per compressor)."""

    def complete(known: CostTable | None) -> CostTable:
        table = known or costs_of_memory(device)
        if table.threads != torch.get_num_threads():
            table = replace(table, threads=torch.get_num_threads())
        missing = [c for c in dict.fromkeys(compressors) if not all(table.has_measured(c, place) for place in Device)]
        if not missing:
            return table
        return replace(table, compressors={**table.compressors, **compressor_costs(missing, device)})

    return cached_table(hardware(device), versions(), complete)


def costs_of_memory(device: torch.device) -> CostTable:
    """Measure memory and the device's roofline. Return a table without compressors."""
    pack, roofline = measure_memory(device)
    return CostTable(
        hardware=hardware(device),
        versions=versions(),
        date=date.today().isoformat(),
        source="measured",
        roofline=roofline,
        pack_gb_per_s=pack,
        copy_gb_per_s=measure_copy(device),
        threads=torch.get_num_threads(),
    )


def compressor_costs(
    compressors: Sequence[Compressor], device: torch.device, threads: Sequence[int] = ()
) -> dict[str, CompressorCost]:
    """Measure compressors on the device and in the host's pool. Without a GPU, results are equal.

    `threads` lists CPU thread counts to measure with (default: the current count).
    """
    found = measure_compressors(compressors, on=device) if device.type != "cpu" else {}
    for budget in dict.fromkeys(threads or [torch.get_num_threads()]):
        with _threads(budget):
            here = measure_compressors(compressors, device=Device.CPU)
        found |= here
        if device.type == "cpu":
            found |= {key.replace(f"@{Device.CPU.value}", f"@{Device.GPU.value}"): cost for key, cost in here.items()}
    return found


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{compat.processor_name()}, {threads} thread{'' if threads == 1 else 's'}"


def versions() -> str:
    """Return the versions that affect measurements: torch, Python, and the built kernels."""
    kernels = f"kernels {fingerprint()}" if kernels_available() else "no kernels"
    return f"torch {torch.__version__}, python {platform.python_version()}, {kernels}"


def gathered_costs(site: Site, offered: Sequence[Compressor]) -> CostTable:
    """Measure the offered compressors and the links. A given cluster's links are not measured."""
    return with_ranks(machine_costs(offered, site.device), site)


def with_ranks(costs: CostTable, site: Site) -> CostTable:
    """Add the number of processors per rank, and measured links. All ranks and sibling groups take part."""
    processors = site.processors() if site.device.type == "cpu" else costs.processors
    links = _links(costs, processors, site) if site.ranks.fits_links else {}
    return replace(costs, processors=processors, **links)


def with_links_of_now(costs: CostTable, site: Site) -> CostTable:
    """Measure the links again. Every rank takes part.

    `launch_us` stays as measured in the step, where launches take longer.
    """
    return replace(costs, **{**_links(costs, costs.processors, site), "launch_us": costs.launch_us})


def _links(costs: CostTable, processors: Processors, site: Site) -> dict[str, Any]:
    assert isinstance(site.transport, Groups), "several ranks have groups"
    return live_links(costs, processors, site.transport, site.cluster, site.device, site.beside)
