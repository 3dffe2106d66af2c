"""Plausible costs of the machine that runs the tests: a step without `costs=` need not measure it, which takes seconds.

What measures has tests of its own: `tests/cost/test_cost_measure.py`, `tests/commands/test_calibrate_command.py`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import torch

from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.cost.table_cache import cached_table
from fxcomp.plan.modes import Mode, compressors_of
from fxcomp.plan.strategy import Device
from fxcomp.planning.measure_machine import hardware, versions

_POINTS = tuple(CompressorPoint(n, 2.0 + n / 1e3, 2.0 + n / 2e3) for n in (4096, 1 << 20))


def keep_costs_of_memory_and_compressors() -> None:
    """Write tables into the user's cache: for one thread, as ranks have it, and for as many as torch may use here."""
    costs = CompressorCost.of(*_POINTS)
    table = CostTable(
        versions=versions(),
        date=date.today().isoformat(),
        source="measured",
        roofline=Roofline(gflops=50.0, gb_per_s=10.0, launch_us=10.0),
        pack_gb_per_s=5.0,
        copy_gb_per_s=5.0,
        compressors={f"{each}@{place.value}": costs for each in compressors_of(Mode.LOSSY) for place in Device},
    )
    here = torch.get_num_threads()
    for threads in (1, here):
        torch.set_num_threads(threads)
        name = hardware(torch.device("cpu"))
        known = replace(table, hardware=name, threads=threads)
        cached_table(name, versions(), lambda _, known=known: known)
    torch.set_num_threads(here)
