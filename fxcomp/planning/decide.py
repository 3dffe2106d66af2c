"""Choose a plan: rank 0 decides by measured costs of the job's steps, and all ranks follow.

first          by costs that are given, cached or measured; or dense, so that steps can be timed
after_steps    by the times of the first training steps
again          by new measurements of the links
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.cost.contention import FittedContention
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.errors import BadPlan
from fxcomp.graph.edit import clone
from fxcomp.graph.exact_type import proof_note
from fxcomp.graph.info import info
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.pipeline import Compiler
from fxcomp.plan.error_feedback import UpdateKind
from fxcomp.plan.given import GivenPlan, check_names_compressor, facts_of_plan, is_path, strategy_named
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.modes import EXACT, in_rank_order
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.planning.earlier_jobs import EarlierJobs, facts_of_step
from fxcomp.planning.exchange_point import PointChooser
from fxcomp.planning.measure_links import LARGEST_FROM_DEVICE, TimedCollectives
from fxcomp.planning.measure_machine import gathered_costs, hardware, machine_costs, with_links_of_now
from fxcomp.planning.timed_steps import TimedStep, Way, apportion, contention_of, feed_costs, measurement
from fxcomp.progress import phase
from fxcomp.ranks import Ranks
from fxcomp.runtime.transport import Groups
from fxcomp.search.choose import Choice, choose, predict_us, uniform
from fxcomp.search.decision import Decision
from fxcomp.search.descent.engine import search_notes
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from fxcomp.site import Site

SMALLEST_ERROR = 0.05
"""Lower bound on the relative error of predicted times: the median over models, links and plans (docs/costs.md)."""

LARGEST_ERROR = 0.5


LIKE, NOISE_US = 2.0, 1e3

PROBES = 2
"""Repetitions of an all_reduce to look at links. On two loaded cores, the shorter of 2 exceeds a later one so that they
are not alike in 10 to 20 % of cases (measured, 2026-11); the shortest of many short ones may be a burst above the rate.
"""


def is_alike(us: float, other_us: float) -> bool:
    """Return True if two times differ by at most NOISE_US or a factor LIKE."""
    return abs(us - other_us) <= NOISE_US or 1 / LIKE <= us / other_us <= LIKE


def costs_of_steps(site: Site, steps: Sequence[TimedStep], feed_us: float, costs: CostTable) -> CostTable:
    """Add the slowest rank's costs of dense steps to a table.

    Every rank passes its timed steps (`Way`). `feed_us` is the host time before a step's program, in µs.
    Each operator's share of compute is assumed equal on all ranks.
    """
    ranks, program = site.ranks, steps[0].program
    by_way = {way: [step for step in steps if step.way is way] for way in Way}
    mine = [measurement(by_way[way]) for way in (Way.HELD, Way.OVERLAPPED)]
    times_us = (us for on in mine for us in (on.step_us, on.compute_us))
    everyone = ranks.gather("the times of the first steps", [feed_us + mine[0].between_us, *times_us, mine[0].wait_us])
    slowest = max(everyone, key=lambda each: each[2])
    slowed_us = statistics.fmean(each[4] - each[2] for each in everyone)  # the median of one rank is noisy
    held, overlapped = (
        on.times(us / on.compute_us if on.compute_us else 1.0, max(each[1 + 2 * k] for each in everyone))
        for k, (on, us) in enumerate(zip(mine, (slowest[2], slowest[2] + slowed_us), strict=True))
    )
    priced = annotate_costs(clone(program.graph), costs, site.cluster).graph.nodes
    node_us = {node.name: info(node).cost_us or 0.0 for node in priced}  # used if no step ran one by one
    node_us |= {name: us for step in by_way[Way.ONE_BY_ONE] for name, us in step.node_us.items()}
    compute = apportion(program, held, node_us, "measured in the emitted step, all ranks running")
    around_us = max(each[0] for each in everyone)
    held = replace(held, wait_us=min(each[-1] for each in everyone))  # the slowest rank waits least
    own = replace(
        costs,
        compute={**costs.compute, **compute},
        pack_gb_per_s=held.pack_gb_per_s or costs.pack_gb_per_s,
        launch_us=costs.launch_us if overlapped.launch_us is None else overlapped.launch_us,
        **feed_costs(site.device, around_us),
    )

    def fitted() -> dict[str, float]:
        graph = annotate_costs(clone(program.graph), own, site.cluster)
        return asdict(contention_of(own, graph, held, overlapped))

    # The other ranks leave the processors to rank 0 meanwhile.
    fit = FittedContention(**ranks.from_rank_0("fitting contention", fitted))
    return replace(
        own,
        contention=fit.factor,
        overlap_speed=fit.overlap_speed,
        collectives={key: found.times(fit.link_factor) for key, found in own.collectives.items()},
        error=min(max(SMALLEST_ERROR, fit.error), LARGEST_ERROR),
    )


@dataclass(frozen=True, slots=True)
class Planner:
    """Planner of one captured graph. Every rank makes the same calls."""

    site: Site
    options: StepOptions
    compiler: Compiler
    graph: GraphModule
    bursts: float = 1.0
    """Maximum fraction of elements that error feedback may send in bursts: rarely, then with a large value."""
    kinds: Collection[UpdateKind] = ()
    """Kinds of the optimizer's updates; empty if unknown."""
    earlier: EarlierJobs = field(default_factory=EarlierJobs)

    def first(self, costs: CostTable | None, *, is_whole: bool = False) -> Decision:
        """Return the given plan, or choose a plan by given or measured costs.

        If no costs are given, the step includes its optimizer (`is_whole`) and plans may race, choose by an earlier
        job's costs. Without an earlier job, return the dense plan provisionally.
        Raises BadPlan or BadOption if a given plan or pins do not fit.
        """
        compress = self.options.compress
        if self.site.cluster.world_size == 1 or compress.plan is not None:
            table = costs or CostTable()
            return self._as_told(compress.plan, self.compiler.analyze(self.graph, table), table)
        self.check_pins()
        is_remembered = False
        if costs is None and is_whole and self.options.begins_dense:
            costs = self.earlier.find(self._facts(), self.site.ranks)
            if costs is None:
                return self.dense()
            offered = machine_costs(self.offered, self.site.device)
            costs, is_remembered = replace(costs, compressors=offered.compressors), True
        elif costs is None:
            costs = self._gathered()
        with phase("choosing a plan"):
            found = self._best(self.compiler.analyze(self.graph, costs), costs, "the plan")
        return replace(found, is_remembered=is_remembered)

    def after_steps(self, steps: Sequence[TimedStep], feed_us: float) -> Decision:
        """Choose by timed dense steps. `feed_us` is the host time before a step's program, in µs. Every rank calls it.

        If a rank could not time its steps, `steps` is empty on all ranks, and machine and link costs decide.
        """
        costs = self._gathered()
        if steps:
            costs = costs_of_steps(self.site, steps, feed_us, costs)
            if self.site.rank == 0:
                self.earlier.keep(costs.to_json())
        topic = "choosing a plan"
        workload = self.site.ranks.attempt(
            f"{topic}: reading the costs", lambda: self.compiler.analyze(self.graph, costs)
        )
        with phase("searching"):
            return self._best(workload, costs, topic)

    def dense(self) -> Decision:
        """Return the dense plan, provisionally. The assumed costs are equal on all ranks."""
        costs = CostTable()
        workload = self.compiler.analyze(self.graph, costs)
        plan = uniform("dense", workload, costs, self.site.cluster)
        return Decision(plan, costs, workload, is_provisional=True)

    def _gathered(self) -> CostTable:
        with phase("measuring the machine and the links"):
            return gathered_costs(self.site, self.offered)

    def _facts(self) -> Sequence[str]:
        return facts_of_step(self.graph, self.compiler, self.site)

    @property
    def offered(self) -> Sequence[Compressor]:
        exact = dict.fromkeys(EXACT[kind.narrow] for kind in self.compiler.exact.values() if kind.narrow is not None)
        ordered = EXACT.values() if self.options.compress.sums == "ranks" else ()
        return tuple(dict.fromkeys((*self.options.compress.offered, *exact, *ordered)))

    def check_pins(self) -> None:
        self.options.compress.pinned.check_fits(self.site.cluster)

    def choose(self, workload: Workload, costs: CostTable, terms: Terms) -> tuple[Choice, Sequence[str]]:
        """Choose a plan on this rank, and return it with notes on the search."""
        return choose(workload, costs, self.site.cluster, terms), search_notes()

    def name(self, plan: GivenPlan, workload: Workload, costs: CostTable) -> Plan:
        return plan_as_given(plan, workload, costs, self.site.cluster, self.options.compress.point)

    def with_momenta(self, decision: Decision) -> Decision:
        """Add the costs of exchanging momenta if a given plan exchanges them. Raises Unsupported."""
        moved, costs = decision.plan.moved, decision.costs
        if not moved or decision.choice is not None:
            return decision
        topic = "reading the costs of momenta"
        workload = self.site.ranks.attempt(topic, lambda: self.compiler.analyze(self.graph, costs, moved))
        return replace(decision, workload=workload)

    def links_are_as_they_were(self, costs: CostTable, dense_bytes: int) -> bool:
        """Return True if an all_reduce of all gradients takes about as long as `costs` predict. Every rank calls it."""
        size = min(dense_bytes, LARGEST_FROM_DEVICE)
        told = costs.collective(CollectiveKind.ALL_REDUCE, Level.WORLD, size, self.site.cluster)
        return is_alike(told.us, self.sum_us(size))

    def sum_us(self, size: int) -> float:
        """Return the time of an all_reduce of `size` bytes over all ranks, in µs: the shorter of PROBES.

        Every rank calls it.
        """
        assert isinstance(self.site.transport, Groups), "several ranks have groups"
        timed = TimedCollectives(self.site.transport, self.site.device, self.site.beside)
        return 1e6 * min(timed(CollectiveKind.ALL_REDUCE, Level.WORLD, size) for _ in range(PROBES))

    def again(self, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision:
        """Measure the links again. Choose by the new costs and by `errors` of this job's gradients.

        If `costs` lacks compressors, as under a saved plan, the machine is measured too.
        """
        ranks = self.site.ranks
        costs = with_links_of_now(costs, self.site) if costs.compressors else self._gathered()
        workload = ranks.attempt(f"{topic}: reading the costs", lambda: self.compiler.analyze(self.graph, costs))
        return self._best(workload, costs, topic, errors)

    @property
    def terms(self) -> Terms:
        return Terms.of(self.options.compress, self.bursts)

    def _best(self, workload: Workload, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision:
        """Choose on rank 0 for all ranks. If there are sibling groups, the first group chooses for all groups."""
        cluster, terms = self.site.cluster, self.terms.by(errors)

        def decide() -> dict[str, Any]:
            chosen, notes = self.choose(workload, costs, terms)
            chooser = PointChooser(self.options, self.kinds, costs, cluster, terms)
            chosen, known, more = chooser.choose(chosen, workload, partial(self.compiler.analyze, self.graph, costs))
            if self.options.compress.sums == "ranks":
                chosen = with_ordered_sums(chosen, workload, costs, cluster)
            chosen_by = {"costs": costs.to_json(), "workload": known.to_json(), "notes": [*notes, *more]}
            return {"choice": chosen.to_json(), **chosen_by}

        beside = self.site.beside
        data = self.site.ranks.from_rank_0(topic, lambda: beside.from_first(topic, decide))
        agreed, work = CostTable.from_json(data["costs"]), Workload.from_json(data["workload"])
        choice = self.site.ranks.attempt(f"{topic}: reading the choice", lambda: Choice.from_json(data["choice"]))
        proof = proof_note(self.graph, self.compiler.exact)
        notes = (*data["notes"], *terms.notes(work, cluster), *foreign_note(agreed.hardware, self.site.device))
        notes = (*notes, *([proof] if proof else []))
        return Decision(choice.plan, agreed, work, choice, notes=notes)

    def _as_told(self, plan: GivenPlan | None, workload: Workload, costs: CostTable) -> Decision:
        """Follow the given plan as rank 0 reads it. Raises ReplicasDiffer if another rank has a different plan."""
        ranks, cluster = self.site.ranks, self.site.cluster
        if plan is None or cluster.world_size == 1:
            notes = ("one rank: nothing to communicate", *foreign_note(costs.hardware, self.site.device))
            return Decision(Plan(()), costs, workload, notes=notes)
        data = ranks.from_rank_0("the plan", lambda: self.name(plan, workload, costs).to_json())
        followed = Plan.from_json(data)

        def mine() -> Plan:
            # A strategy's name gives other plans on other ranks, because costs differ.
            if isinstance(plan, Plan):
                return plan
            return Plan.load(plan) if is_path(plan) and Path(plan).exists() else followed

        ranks.check_same("comparing plans", ranks.attempt("reading the plan", lambda: facts_of_plan(mine())))
        followed.check_covers(workload.sizes, workload.types)
        followed.check_fits(cluster)
        if self.options.compress.sums == "ranks":
            check_adds_in_rank_order(followed)
        notes = ("the plan was given, not chosen", *foreign_note(costs.hardware, self.site.device))
        return Decision(followed, costs, workload, notes=notes)


def with_ordered_sums(chosen: Choice, workload: Workload, costs: CostTable, cluster: Cluster) -> Choice:
    """Choose the fastest dense plan's buckets, with exact strategies that add in rank order."""
    plan = in_rank_order(chosen.dense, cluster)
    step_us = predict_us(workload, plan, costs, cluster)
    return replace(chosen, plan=plan, step_us=step_us, alternatives=(), runners=())


def check_adds_in_rank_order(plan: Plan) -> None:
    for number, bucket in enumerate(plan.buckets):
        if not bucket.strategy.adds_in_rank_order:
            raise BadPlan(
                f"bucket {number} of the plan is added up by the network ({bucket.strategy}), and sums='ranks' asks for"
                " sums in the order of the ranks.\n  Use exact_fp32, exact_bf16 or exact_fp16, in one or two shots."
            )


def plan_as_given(
    plan: GivenPlan,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    at: ExchangePoint = ExchangePoint.GRADIENT,
) -> Plan:
    """Build the user's plan. Raises BadPlan, or BadStrategy if a rank would end with a shard."""
    made = _made_as_given(plan, workload, costs, cluster)
    return made if at is ExchangePoint.GRADIENT else made.at_momenta()


def _made_as_given(plan: GivenPlan, workload: Workload, costs: CostTable, cluster: Cluster) -> Plan:
    if isinstance(plan, Plan) or is_path(plan):
        named = plan if isinstance(plan, Plan) else Plan.load(plan)
        for bucket in named.buckets:
            bucket.strategy.check_is_whole()
        return named
    check_names_compressor(str(plan))
    strategy_named(str(plan)).check_is_whole()
    return uniform(str(plan), workload, costs, cluster)


def costs_as_given(costs: GivenCosts | None, ranks: Ranks) -> CostTable | None:
    """Return the user's costs, if any. Rank 0 reads a saved table, because others may lack the file."""
    if isinstance(costs, str | Path):
        path = costs
        costs = CostTable.from_json(ranks.from_rank_0("the costs", lambda: CostTable.read(path).to_json()))
    return costs and replace(costs, threads=torch.get_num_threads())


def foreign_note(measured_on: str, device: torch.device) -> tuple[str, ...]:
    """Return a note if costs were measured on other hardware, ignoring the number of threads."""
    here = hardware(device)
    if _machine_of(measured_on) in (_machine_of(here), CostTable().hardware):
        return ()
    return (f"The costs were measured on another machine: {measured_on}. This one is {here}.",)


def _machine_of(hardware: str) -> str:
    return re.sub(r", \d+ threads?$", "", hardware)
