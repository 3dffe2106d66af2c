"""Plans that are followed once all ranks have compiled them, so that no rank waits for another's compiler.

another decision, racing plans ─► regions compile during steps ─► ready on all ranks ─► followed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.codegen.program import Program
from fxcomp.search.decision import Decision
from fxcomp.search.runners import Runner
from fxcomp.site import Site

SELDOM = 16
"""Maximum number of steps between two checks."""


@dataclass(slots=True)
class NextPlans:
    topic: str
    decision: Decision | None
    """None if the plan in force stays."""
    runners: Sequence[Runner]
    """Plans of the next race, the plan in force first."""
    programs: Sequence[Program]
    """Programs of the decision's plan, if any, and of all runners but the first."""
    asks_at: int
    """Number of taken steps at the next check."""
    interval: int = 1

    def are_ready(self, steps: int, site: Site) -> bool:
        """Return True if all ranks have compiled all regions. Every rank calls it after the same steps."""
        if steps < self.asks_at:
            return False
        self.asks_at, self.interval = steps + self.interval, min(SELDOM, 2 * self.interval)
        is_ready = all(program.is_compiled for program in self.programs)
        return all(everywhere for (everywhere,) in site.gather_numbers("whether regions are compiled", [is_ready]))
