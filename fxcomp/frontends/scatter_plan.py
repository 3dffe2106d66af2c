"""Decide how the modules of a fully_shard model scatter their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, simulate
from fxcomp.frontends.scattered_modules import ScatteredModule, told_plan
from fxcomp.plan.given import GivenPlan, is_path
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import Planner
from fxcomp.search.by_module import ModuleTime, choose_by_module, module_tasks, module_times
from fxcomp.search.choose import Choice
from fxcomp.search.decision import Decision
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from fxcomp.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlanner(Planner):
    """Decides for modules, in the order in which they are ready."""

    modules: Sequence[ScatteredModule]

    def check_pins(self) -> None:
        """Leave it to the choice, which knows the modules."""

    def choose(self, workload: Workload, costs: CostTable, terms: Terms) -> tuple[Choice, Sequence[str]]:
        buckets, overlaps = [module.planned() for module in self.modules], overlaps_on(self.site)
        return choose_by_module(workload, buckets, costs, self.site.cluster, terms, overlaps=overlaps), ()

    def name(self, plan: GivenPlan, workload: Workload, costs: CostTable) -> Plan:
        del workload, costs
        if not isinstance(plan, Plan) and is_path(plan):
            plan = Plan.load(plan)
        return told_plan(plan if isinstance(plan, Plan) else str(plan), self.modules)


def overlaps_on(site: Site) -> bool:
    """Tell a device that computes while gradients travel: with gloo backward waits for each module."""
    return site.device.type != "cpu"


def predicted(decision: Decision, site: Site) -> tuple[tuple[ModuleTime, ...], Timeline]:
    """Price the modules of a plan, and simulate its step."""
    workload, overlaps = decision.workload, overlaps_on(site)
    times = module_times(decision.plan, workload, decision.costs, site.cluster, overlaps=overlaps)
    return times, simulate(module_tasks(times, workload, site.cluster, overlaps=overlaps))
