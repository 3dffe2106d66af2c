"""Choose a strategy for each module that fully_shard scatters: dense or compressed.

A module's gradients stay together, so there are no buckets to choose. The own time of module k, own_k, is the sum of
packing, compressing, the collective and decompressing. On a GPU the modules share one wire with the all_gather of
parameters:

    end_k = max(ready_k, end_{k-1}) + own_k          updates follow the last end

With gloo a rank waits for each module's collective, so own_k adds to compute. All strategies end with shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import BF16, Compressor
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Task
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.budget import is_bursty
from fxcomp.plan.given import strategy_named
from fxcomp.plan.kinds import CollectiveKind, Stream, wire_of
from fxcomp.plan.modes import worth_offering
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.choose import Choice
from fxcomp.search.plan_tasks import END_OF_BACKWARD, BucketWriter
from fxcomp.search.question import Terms
from fxcomp.search.runners import DENSE, PREDICTED_BEST, Runner
from fxcomp.search.shared_draws import LEAST_GAIN
from fxcomp.search.workload import Gradient, Workload, content_of

SCATTERED = Strategy.scattered(None)

_BF16 = Strategy.scattered(BF16())

_ROUNDS = 3
"""Maximum number of passes over all modules; passes end earlier if no module changes."""


def can_scatter(compressor: Compressor) -> bool:
    """Return whether a compressor works on any part of a gradient, without agreement, state or whole matrices."""
    facts = compressor.facts
    return facts.agreement is None and not compressor.has_state and not facts.needs_whole_parameters


def scattered(compressor: Compressor | None) -> Strategy:
    """Return the strategy that compresses scattered gradients. Raise BadPlan if the compressor cannot work on parts."""
    if compressor is not None and not can_scatter(compressor):
        raise BadPlan(
            f"{compressor} cannot compress gradients that fully_shard scatters: it needs whole parameters, a state or"
            " an agreement of all ranks.\n  Use a compressor for any part of a gradient: bf16, int8, int4, topk(0.01)."
        )
    return Strategy.scattered(compressor)


def scattered_by(text: str) -> Strategy:
    """Parse a module's strategy: `dense`, a compressor, or the full strategy. Raise BadPlan for others.

    Strategies of earlier versions also gathered the gradients. They are accepted, and the gather is dropped.
    """
    named = strategy_named(text)
    found = scattered(named.compressor)
    if named not in (found, Strategy.flat(named.compressor), Strategy.two_shots(named.compressor, None)):
        raise BadPlan(
            f"{text!r} does not fit gradients that fully_shard scatters: they are compressed once at most.\n"
            f"  Name a compressor, or write {str(found)!r}."
        )
    return found


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """Predicted times of a module's gradients, in µs."""

    ready_us: float
    """Compute time until the gradients are ready."""
    dense_us: float
    own_us: float
    """Own time (see the module) with the plan's strategy."""


def module_times(
    plan: Plan, workload: Workload, costs: CostTable, cluster: Cluster, *, overlaps: bool
) -> tuple[ModuleTime, ...]:
    pricing = _Pricing(workload, plan.buckets, costs, cluster, overlaps=overlaps)
    return tuple(
        ModuleTime(ready, pricing.own_us(k, SCATTERED), pricing.own_us(k, bucket.strategy))
        for k, (bucket, ready) in enumerate(zip(plan.buckets, pricing.ready_us, strict=True))
    )


def module_tasks(times: Sequence[ModuleTime], workload: Workload, cluster: Cluster, *, overlaps: bool) -> list[Task]:
    stream = wire_of(Level.WORLD, cluster.hosts) if overlaps else Stream.COMPUTE
    tasks: list[Task] = []
    done_us = 0.0
    for k, each in enumerate(times):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, max(0.0, each.ready_us - done_us)))
        tasks.append(Task(f"scatter {k}", stream, each.own_us, (f"region {k}",)))
        done_us = max(done_us, each.ready_us)
    tasks.append(Task(END_OF_BACKWARD, Stream.COMPUTE, max(0.0, workload.backward_us - done_us)))
    scattered_last = (f"scatter {len(times) - 1}",) if times else ()
    return [*tasks, Task("finish", Stream.COMPUTE, workload.compute_us - workload.backward_us, scattered_last)]


def choose_by_module(
    workload: Workload, modules: Sequence[Bucket], costs: CostTable, cluster: Cluster, terms: Terms, *, overlaps: bool
) -> Choice:
    """Choose each module's strategy, such that the step is shortest within the terms.

    `overlaps`: compute continues during collectives. Raise BadOption for contradictory pins.
    """
    return _Search(workload, modules, costs, cluster, terms, overlaps=overlaps).choice()


class _Pricing:
    def __init__(
        self, workload: Workload, modules: Sequence[Bucket], costs: CostTable, cluster: Cluster, *, overlaps: bool
    ) -> None:
        self._writer, self._overlaps = BucketWriter(workload, costs, cluster), overlaps
        by_name = {gradient.name: gradient for gradient in workload.gradients}
        self.members = [[by_name[name] for name in module.names] for module in modules]
        self.ready_us = [max(gradient.ready_us for gradient in members) for members in self.members]

    def own_us(self, number: int, strategy: Strategy) -> float:
        """Return a module's own time, in µs; on a GPU with the gather of parameters, which shares the wire."""
        us = sum(task.duration_us for task in self._tasks(number, strategy))
        if self._overlaps:
            gather = f"{CollectiveKind.ALL_GATHER.value} "
            both = self._tasks(number, Strategy.two_shots(None, None))
            us += sum(task.duration_us for task in both if task.name.startswith(gather))
        return us

    def _tasks(self, number: int, strategy: Strategy) -> list[Task]:
        priced = self._writer.bucket(number, self.members[number], strategy)
        return [task for stage in priced.stages for task in stage] + list(priced.final)


class _Search:
    def __init__(
        self,
        workload: Workload,
        modules: Sequence[Bucket],
        costs: CostTable,
        cluster: Cluster,
        terms: Terms,
        *,
        overlaps: bool,
    ) -> None:
        self._workload, self._modules, self._costs, self._cluster = workload, modules, costs, cluster
        self._terms, self._overlaps = terms, overlaps
        self._places = {gradient.name: k for k, gradient in enumerate(workload.gradients)}
        pricing = _Pricing(workload, modules, costs, cluster, overlaps=overlaps)
        self._members, self._ready = pricing.members, pricing.ready_us
        self._losses = terms.losses(workload, cluster)
        self._limit = terms.limit(workload, cluster)
        self._offered = [self._offers(members) for members in self._members]
        self._own_us = [
            {strategy: pricing.own_us(k, strategy) for strategy in dict.fromkeys((SCATTERED, _BF16, *offered))}
            for k, offered in enumerate(self._offered)
        ]

    def _offers(self, members: Sequence[Gradient]) -> tuple[Strategy, ...]:
        pinned = self._pinned(members)
        if pinned is not None:
            return (pinned,)
        content = content_of(members)
        found = self._terms.strategies(self._limit, self._losses, self._cluster, content, offload=False)
        found = worth_offering(found, members[0].element_type, self._cluster, offload=False)
        firsts = [each.compressors[0] for each in found if len(each.compressors) == 1]
        return tuple(dict.fromkeys((SCATTERED, *(scattered(first) for first in firsts if can_scatter(first)))))

    def _pinned(self, members: Sequence[Gradient]) -> Strategy | None:
        """Return a module's pinned strategy, if any. A pin on one parameter applies to the whole module."""
        rules = {rule.text: each.name for each in members if (rule := self._terms.pins.rule_for(each.name))}
        if len(rules) > 1:
            (one, first), (other, second) = list(rules.items())[:2]
            raise BadOption(
                f"pins= sets {one} for {first!r} and {other} for {second!r}, whose gradients fully_shard"
                " scatters together.\n  Pin both to the same, or call fully_shard for each of their modules."
            )
        return next((scattered_by(text) for text in rules), None)

    def choice(self) -> Choice:
        dense = self._with_pins(SCATTERED)
        starts = [dense, [min(each, key=lambda s, k=k: self._own_us[k][s]) for k, each in enumerate(self._offered)]]
        found = [self._improved(start) for start in starts if self._is_allowed(start) or start is dense]
        best = self._gentler(min(found, key=self._step_us))
        if self._step_us(best) > (1 - LEAST_GAIN) * self._step_us(dense):
            best = dense  # the gain is below the error of the costs
        plan, runner = self._plan(best), self._runner(DENSE, dense)
        others = () if best == dense else (self._runner(PREDICTED_BEST, best),)
        return Choice(
            plan=plan,
            step_us=self._step_us(best),
            dense=runner.plan,
            dense_us=runner.step_us,
            fastest=plan,
            fastest_us=self._step_us(best),
            bf16_us=self._step_us(self._with_pins(_BF16)),
            free_us=self._workload.free_us,
            error=self._costs.error_of(self._workload.free_us, runner.step_us),
            alternatives=((),) * len(best),
            runners=(*others, runner),
            pins=self._terms.pins,
        )

    def _with_pins(self, strategy: Strategy) -> list[Strategy]:
        return [offered[0] if len(offered) == 1 else strategy for offered in self._offered]

    def _plan(self, strategies: Sequence[Strategy]) -> Plan:
        return Plan(tuple(replace(module, strategy=s) for module, s in zip(self._modules, strategies, strict=True)))

    def _runner(self, name: str, strategies: Sequence[Strategy]) -> Runner:
        lost = math.fsum(self._lost(k, strategy) for k, strategy in enumerate(strategies))
        loss = lost / max(1, self._losses.elements)
        return Runner(name, self._plan(strategies), self._step_us(strategies), float(name == PREDICTED_BEST), loss)

    def _improved(self, start: list[Strategy]) -> list[Strategy]:
        """Change one module's strategy at a time while the step gets shorter, the longest dense module first."""
        order = sorted(range(len(start)), key=lambda k: -self._own_us[k][SCATTERED])
        best, best_us = list(start), self._step_us(start)
        for _ in range(_ROUNDS):
            before = best_us
            for k in order:
                for strategy in self._offered[k]:
                    tried = [*best[:k], strategy, *best[k + 1 :]]
                    us = self._step_us(tried)
                    if us < best_us * (1 - 1e-9) and self._is_allowed(tried):
                        best, best_us = tried, us
            if best_us == before:
                break
        return best

    def _gentler(self, best: list[Strategy]) -> list[Strategy]:
        """Minimize each module's error without lengthening the step."""
        best_us = self._step_us(best)
        for k in sorted(range(len(best)), key=lambda k: self._own_us[k][SCATTERED]):
            for strategy in sorted(self._offered[k], key=lambda strategy: self._lost(k, strategy)):
                if self._lost(k, strategy) >= self._lost(k, best[k]):
                    break
                tried = [*best[:k], strategy, *best[k + 1 :]]
                if self._step_us(tried) <= best_us * (1 + 1e-9):
                    best = tried
                    break
        return best

    def _step_us(self, strategies: Sequence[Strategy]) -> float:
        own = [self._own_us[k][strategy] for k, strategy in enumerate(strategies)]
        if not self._overlaps:
            return self._workload.compute_us + sum(own)
        end = 0.0
        for ready, us in zip(self._ready, own, strict=True):
            end = max(ready, end) + us
        return max(self._workload.backward_us, end) + self._workload.compute_us - self._workload.backward_us

    def _lost(self, number: int, strategy: Strategy) -> float:
        return self._losses.of(strategy, [self._places[gradient.name] for gradient in self._members[number]])

    def _is_allowed(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether a plan keeps the limits of error and bursts, or compresses only pinned modules."""
        free = [k for k, offered in enumerate(self._offered) if len(offered) > 1]
        lost = math.fsum(self._lost(k, strategies[k]) for k in range(len(strategies)))
        bursts = sum(self._modules[k].elements for k in free if is_bursty(strategies[k], self._cluster))
        compresses = any(strategies[k] != SCATTERED for k in free)
        within = lost <= self._limit * self._losses.elements and bursts <= self._terms.bursts * self._losses.elements
        return within or not compresses
