"""Choose between exchanging gradients and momenta in mode `aggressive`, by the predicted time of the whole job.

choice at gradients ─► may momenta be exchanged? ─► the fastest plan at momenta ─► both jobs' times, with warm-up
                                no: the reason is noted                   └─► after the warm-up it races with bf16
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fxcomp import compressors
from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption, BadPlan, Unsupported
from fxcomp.options import StepOptions
from fxcomp.plan.error_feedback import UpdateKind, check_plan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Mode, one_shot_ways
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.search.choose import Choice, fastest_of
from fxcomp.search.descent.plan_search import searches_of
from fxcomp.search.exchanged import Exchanged, first_that_pays, job_us, stretches
from fxcomp.search.plan_tasks import StepPrices
from fxcomp.search.question import Terms
from fxcomp.search.runners import BF16, PREDICTED_BEST, Runner, made_runner
from fxcomp.search.shared_draws import in_draws
from fxcomp.search.workload import Workload

LEAST_STEPS = 3000
"""Minimum steps of a job that exchanges momenta.

After 500 steps a char-LM was 2 to 9 % above the dense loss (docs/where_the_mean_stands.md).
"""

Analyze = Callable[[Collection[str]], Workload]
"""Returns the workload of a step that exchanges the momenta of some parameters; raises Unsupported."""


@dataclass(frozen=True, slots=True)
class PointChooser:
    options: StepOptions
    kinds: Collection[UpdateKind]
    costs: CostTable
    cluster: Cluster
    terms: Terms

    def choose(self, choice: Choice, workload: Workload, analyze: Analyze) -> tuple[Choice, Workload, tuple[str, ...]]:
        """Return a choice, its workload and notes for the report. The choice exchanges momenta if that is faster."""
        if not self.options.compress.may_move or self.cluster.world_size == 1:
            return choice, workload, ()
        try:
            moved = self._movable(workload)
            prices = StepPrices(analyze(moved), self.costs, self.cluster)
            plan = fastest_at_momenta(prices, moved, self.terms)
            self._check(plan, workload)
            found = self._compare(choice.fastest, plan, prices)
        except (BadOption, BadPlan, Unsupported) as error:
            return choice, workload, (_note(str(error).partition("\n")[0].rstrip(".")),)
        choice = replace(choice, exchanged=found)
        if not found.pays:
            return choice, workload, (_note(found.reason),)
        step_us = prices.step_us(plan)
        taken = replace(choice, plan=plan, step_us=step_us, fastest=plan, fastest_us=step_us, alternatives=())
        dense_us = in_draws(StepPrices(workload, self.costs, self.cluster), choice.dense)
        return replace(taken, runners=runners_at_momenta(plan, prices, dense_us)), prices.workload, ()

    def _movable(self, workload: Workload) -> list[str]:
        """Return the parameters whose momenta may be exchanged. Raises BadOption if there are none."""
        steps = self.options.compress.steps
        if not self.kinds:
            raise BadOption("this frontend does not see the optimizer, which fxcomp.compile_step does")
        if steps is None:
            how = 'pass Compress(within="aggressive", steps=N), on the command line --steps N'
            raise BadOption(f"steps= is not given, and whole jobs are compared: {how}")
        if steps < LEAST_STEPS:
            why = f"jobs of fewer than {LEAST_STEPS:,} steps have ended above dense's loss by momenta"
            raise BadOption(f"{why}, and this has {steps:,}")
        for what, why in self.options.against_moves.items():
            raise BadOption(f"exchanging momenta does not go with {what}: {why}")
        free = [each for each in workload.gradients if self.terms.pins.rule_for(each.name) is None]
        moved = [each.name for each in free if not each.is_vector]
        if not moved:
            raise BadOption("there is no matrix that is not pinned: vectors stay dense")
        types = {each.name: each.element_type for each in workload.gradients}
        for name in moved:
            if types[name] is not ElementType.F32:
                raise BadOption(f"the gradient of {name!r} is {types[name]}, and momenta are exchanged in f32")
        return moved

    def _check(self, plan: Plan, workload: Workload) -> None:
        """Raise BadOption or BadPlan if this plan may not exchange momenta."""
        if set(self.kinds) != {UpdateKind.SECOND_MOMENT}:
            raise BadOption("only under Adam's kind of update has a job kept dense's loss by momenta")
        if not plan.moves_exchange:
            raise BadOption("no compressed plan at momenta is predicted to be faster than a dense one")
        self.options.check_moves(plan, self.kinds)
        check_plan(self.options.compress.feedback, plan, workload.shapes, self.cluster, self.kinds)

    def _compare(self, gradients: Plan, momenta: Plan, prices: StepPrices) -> Exchanged:
        """Predict the job's time with both plans. Raises BadOption if there can be no warm-up."""
        compress = self.options.compress
        assert compress.steps is not None, "where the point is chosen, the job has a length"
        price = cache(prices.step_us)

        def job(plan: Plan, steps: int) -> float:
            warmup = replace(compress, steps=steps).warmup_for(plan)
            return job_us(stretches(warmup.stages(plan), steps, price))

        since = first_that_pays(lambda steps: job(momenta, steps) < job(gradients, steps))
        since = since and max(since, LEAST_STEPS)
        return Exchanged(compress.steps, job(gradients, compress.steps), job(momenta, compress.steps), since)


def _note(why: str) -> str:
    return f"{Mode.AGGRESSIVE.value}: ranks exchange gradients, because {why}."


def fastest_at_momenta(prices: StepPrices, moved: Collection[str], terms: Terms) -> Plan:
    there = StepPrices(prices.workload.moved(moved), prices.costs, prices.cluster)
    at_momenta = replace(terms, at=ExchangePoint.MOMENTUM, budget=None, bursts=1.0)
    found = fastest_of(searches_of(there, at_momenta), dense_only=False)
    return found.plan.at_momenta(staying=[name for name in prices.workload.sizes if name not in moved])


def runners_at_momenta(plan: Plan, prices: StepPrices, dense_us: Sequence[float]) -> tuple[Runner, ...]:
    """Return two runners: the plan, and bf16 momenta in the same buckets. A race has only one exchange point."""
    ways = one_shot_ways(compressors.BF16(), prices.cluster, offload=prices.costs.offloads)
    controls = [
        plan.with_strategies([way if each.at is ExchangePoint.MOMENTUM else each.strategy for each in plan.buckets])
        for way in ways
    ]
    named = {PREDICTED_BEST: plan, BF16: min(controls, key=prices.step_us)}
    found = [made_runner(name, each, prices, dense_us) for name, each in named.items()]
    return tuple(sorted(found, key=lambda each: each.step_us))
