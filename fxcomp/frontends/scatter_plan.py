"""Choose the reduce-scatter strategy of each module of a fully_shard model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, simulate
from fxcomp.errors import BadPlan
from fxcomp.frontends.sharded_modules import ScatteredModule
from fxcomp.plan.given import GivenPlan, is_path
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import Planner
from fxcomp.search.by_module import SCATTERED, ModuleTime, choose_by_module, module_tasks, module_times, scattered_by
from fxcomp.search.choose import Choice
from fxcomp.search.decision import Decision
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from fxcomp.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlanner(Planner):
    """Planner with one bucket per module, in ready order."""

    modules: Sequence[ScatteredModule]

    def check_pins(self) -> None:
        """Do nothing, because `choose` checks pins."""

    def choose(self, workload: Workload, costs: CostTable, terms: Terms) -> tuple[Choice, Sequence[str]]:
        buckets, overlaps = [module.planned() for module in self.modules], overlaps_on(self.site)
        return choose_by_module(workload, buckets, costs, self.site.cluster, terms, overlaps=overlaps), ()

    def name(self, plan: GivenPlan, workload: Workload, costs: CostTable) -> Plan:
        del workload, costs
        if not isinstance(plan, Plan) and is_path(plan):
            plan = Plan.load(plan)
        return told_plan(plan if isinstance(plan, Plan) else str(plan), self.modules)


def overlaps_on(site: Site) -> bool:
    """Return True if compute overlaps communication. With gloo it does not."""
    return site.device.type != "cpu"


def predicted(decision: Decision, site: Site) -> tuple[tuple[ModuleTime, ...], Timeline]:
    workload, overlaps = decision.workload, overlaps_on(site)
    times = module_times(decision.plan, workload, decision.costs, site.cluster, overlaps=overlaps)
    return times, simulate(module_tasks(times, workload, site.cluster, overlaps=overlaps))


def told_plan(plan: Plan | str, modules: Sequence[ScatteredModule]) -> Plan:
    """Convert a plan, or one strategy's text for all modules, to a plan of reduce-scatters. Raises BadPlan.

    With a text, modules that have only vectors stay dense.
    """
    dense = Plan(tuple(each.planned() for each in modules))
    if isinstance(plan, str):
        way = scattered_by(plan)
        are_vectors = [all(len(shape) <= 1 for shape in each.module.whole_shapes) for each in modules]
        return dense.with_strategies([SCATTERED if are else way for are in are_vectors])
    known = {frozenset(bucket.names): bucket for bucket in plan.buckets}
    wrong = next((each for each in dense.buckets if frozenset(each.names) not in known), None)
    if wrong is not None or len(known) != len(modules):
        what = f"{wrong.names[0]!r} and the gradients scattered with it" if wrong else "every module once"
        raise BadPlan(
            f"the plan has no bucket of {what}: fully_shard scatters the gradients of a module together.\n"
            "  Save a plan with compress_reduce_scatter(model, ...).plan.save(path), or name one compressor."
        )
    plan.check_covers(dense.sizes, dense.types)
    return plan.with_strategies([scattered_by(str(bucket.strategy)) for bucket in plan.buckets])
