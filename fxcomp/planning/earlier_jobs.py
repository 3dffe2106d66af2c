"""Cache a job's measured step costs for the next job with the same step on the same machines.

    facts of the step ─► rank 0's file ─► costs, for all ranks ─► the first steps take as long as predicted
                             ▲                                     │ they do not
                             └── measured again      deleted    ◄──┘

Operators and shapes in order, processors, ranks and versions identify a step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.cost.table_cache import load_table
from fxcomp.graph.work import work_key
from fxcomp.pipeline import Compiler
from fxcomp.planning.measure_machine import hardware, versions
from fxcomp.ranks import Ranks
from fxcomp.site import Site

MOST_FILES = 32
"""Maximum number of cached files, one per step; the oldest are deleted."""


@dataclass(slots=True)
class EarlierJobs:
    """Earlier jobs' measurements of one step, on rank 0's machine."""

    path: Path | None = None

    def find(self, facts: Sequence[str], ranks: Ranks) -> CostTable | None:
        """Return an earlier job's costs of the step from rank 0's file; None without a file. Every rank calls it."""
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
        path = self.path = compat.cache_directory() / "jobs" / f"{key}.json"

        def read() -> dict[str, Any] | None:
            known = load_table(path)
            return None if known is None else known.to_json()

        data = ranks.from_rank_0("an earlier job's costs", read)
        if data is None:
            return None
        known = CostTable.from_json(data)
        source = f"measured in the emitted step, all ranks running, by an earlier job ({known.date})"
        return replace(known, compute={key: replace(found, source=source) for key, found in known.compute.items()})

    def keep(self, costs: Mapping[str, Any]) -> None:
        """Write a cost table, given as JSON data. File errors are ignored."""
        assert self.path is not None, "the step was looked for first"
        try:
            data = compat.sealed({**costs, "date": date.today().isoformat()})
            compat.write_atomically(self.path, json.dumps(data))
            oldest = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST_FILES]
            for path in oldest:
                path.unlink(missing_ok=True)
        except OSError:
            return

    def forget(self) -> None:
        """Delete the costs, so that the next job measures again."""
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                return


def facts_of_step(graph: GraphModule, compiler: Compiler, site: Site) -> list[str]:
    """Return the facts that determine a step's time. Every rank calls it."""
    machines = site.ranks.gather("the machines", f"{hardware(site.device)}; {versions()}")
    processors = site.processors() if site.device.type == "cpu" else ""
    compiled = f"{compiler.feedback}; {compiler.skip_nonfinite}; {compiler.micro_batches}; {processors}"
    cluster = json.dumps(site.cluster.to_json(), sort_keys=True)  # distinguishes given links from measured ones
    keys = (work_key(node) for node in graph.graph.nodes if node.op == "call_function")
    return [cluster, compiled, *machines, *keys]
