"""Hold what comes next in a running job until it can be followed: on no rank may the others wait for a compiler.

another decision, plans that will race ─► their regions compile beside steps ─► ready on all ranks ─► followed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.codegen.program import Program
from fxcomp.search.decision import Decision
from fxcomp.search.runners import Runner
from fxcomp.site import Site

SELDOM = 16
"""Maximum number of steps between two looks at whether all ranks are ready."""


@dataclass(slots=True)
class NextPlans:
    """The programs of plans that come next, the same plans on all ranks."""

    topic: str
    decision: Decision | None
    """The decision to follow; None if the plan in force stays."""
    runners: Sequence[Runner]
    """The plans that take turns afterwards, the one that stays first; empty if none do."""
    programs: Sequence[Program]
    """The programs of the decision's plan, if there is one, and of the runners but the first."""
    asks_at: int
    """After this number of steps ranks compare whether they are ready."""
    interval: int = 1

    def are_ready(self, steps: int, site: Site) -> bool:
        """Return whether all regions are compiled on all ranks; every rank calls it, after the same steps."""
        if steps < self.asks_at:
            return False
        self.asks_at, self.interval = steps + self.interval, min(SELDOM, 2 * self.interval)
        is_ready = all(program.is_compiled for program in self.programs)
        return all(everywhere for (everywhere,) in site.gather_numbers("whether regions are compiled", [is_ready]))
