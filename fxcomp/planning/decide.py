"""Decide on a plan, all ranks together: the dense step is measured, rank 0 chooses by its costs, and all follow."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cost.contention import FittedContention
from fxcomp.cost.table import CostTable
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.graph.edit import clone
from fxcomp.graph.run_passes import finished
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.pipeline import Compiler
from fxcomp.plan.error_feedback import UpdateKind
from fxcomp.plan.given import GivenPlan, check_names_compressor, facts_of_plan, is_path, strategy_named
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import ExchangePoint, Plan
from fxcomp.planning.earlier_jobs import EarlierJobs, facts_of_step, step_costs
from fxcomp.planning.exchange_point import PointChooser
from fxcomp.planning.measure_contention import as_slowest, contention_of, networks
from fxcomp.planning.measure_machine import gathered_costs, hardware, with_links_of_now
from fxcomp.planning.measure_step import StepMeasurement, apportion, feed_costs, feed_us, measure_step
from fxcomp.progress import phase
from fxcomp.ranks import Ranks
from fxcomp.search.choose import Choice, choose, uniform
from fxcomp.search.decision import Decision
from fxcomp.search.descent.engine import search_notes
from fxcomp.search.question import Terms
from fxcomp.search.workload import Workload
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.inputs import Example

MEASURED_STEPS = ((0.3e6, 8), (1e6, 5), (2e6, 3), (6e6, 2), (math.inf, 1))
"""Numbers of dense steps that are timed with the network and without, in turns, by the longest that one is predicted to
take, in µs: the same number on every rank. One of each goes before them and does not count."""

SMALLEST_ERROR = 0.05
"""A prediction is never trusted further than this: the median error over models, links and plans (docs/costs.md)."""

LARGEST_ERROR = 0.5


def measured_on_job(
    compiler: Compiler, site: Site, example: Example, costs: CostTable, earlier: EarlierJobs
) -> CostTable:
    """Add to a table what this job's regions cost and how far its prediction is off; every rank calls it.

    What an earlier job measured of the same step is taken over.
    """
    ranks, cluster = site.ranks, site.cluster
    workload = compiler.analyze(example.captured.graph, costs)
    facts = facts_of_step(example.captured.graph, compiler, site, costs.processors)
    dense_bytes = workload.dense_bytes
    now_us = costs.collective(CollectiveKind.ALL_REDUCE, Level.WORLD, dense_bytes, cluster).us
    topic = "what an earlier job measured"
    known = ranks.from_rank_0(topic, lambda: earlier.find(facts, cluster, dense_bytes, now_us))
    if known is not None:
        return replace(costs, **step_costs(known, costs.compute))
    data = ranks.from_rank_0("the dense plan", lambda: uniform("dense", workload, costs, cluster).to_json())
    measured = replace(costs, **_measured_now(compiler, site, example, costs, Plan.from_json(data)))
    if site.rank == 0:
        earlier.keep(measured.to_json())
    return measured


def _starting_us(alone: StepMeasurement, others: Sequence[StepMeasurement]) -> float:
    """Return what starting collectives takes the host over a network, beyond what it takes without one."""
    return statistics.fmean(on.starting_us for on in others) - alone.starting_us if others else 0.0


def _measured_now(compiler: Compiler, site: Site, example: Example, costs: CostTable, plan: Plan) -> dict[str, Any]:
    """Run the dense step over and without the network; return the fields of a cost table that are the step's own."""
    ranks, cluster = site.ranks, site.cluster
    program = finished(compiler.emit(example.captured, plan, costs))
    state = GradientState.fresh(plan, example.inputs.shapes, site, compiler.feedback)
    arguments = example.arguments(program, state)
    predicted_us = program.timeline.step_time_us
    mine = next(repeats for limit_us, repeats in MEASURED_STEPS if predicted_us < limit_us)
    repeats = int(ranks.from_rank_0("how many steps are timed", lambda: mine))  # a rank that times one more would wait
    here = measure_step(program, arguments, networks(program.graph, site.transport, costs.processors, cluster), repeats)
    starting_us = _starting_us(here[0], here[1:])
    mine_us = feed_us(here[0], lambda: example.feed(program, state)) + starting_us
    around_us = ranks.gather("timing what feeds a step", mine_us)
    everyone = ranks.gather("timing the dense step", [[on.step_us, on.compute_us] for on in here])
    alone, *others = as_slowest(here, everyone)
    compute = apportion(program, alone, "measured in the emitted step, all ranks running")
    starts = [on.launch_us for on in others if on.launch_us is not None]
    found: dict[str, Any] = {
        "compute": {**costs.compute, **compute},
        "pack_gb_per_s": alone.pack_gb_per_s or costs.pack_gb_per_s,
        "launch_us": statistics.fmean(starts) if starts else costs.launch_us,
        "host_us": alone.between_us + starting_us if compat.works_later(site.device) else 0.0,
    }

    def fitted() -> dict[str, float]:
        own = replace(costs, **found)
        graph = annotate_costs(clone(program.graph), own, cluster)
        return asdict(contention_of(own, graph, cluster, [alone, *others]))

    # By rank 0's tasks, like the plan; meanwhile the others leave it the processors.
    fit = FittedContention(**ranks.from_rank_0("fitting contention", fitted))
    error = min(max(SMALLEST_ERROR, fit.error), LARGEST_ERROR)
    return {**found, "contention": fit.factor, "error": error, **feed_costs(site.device, max(around_us))}


@dataclass(frozen=True, slots=True)
class Planner:
    """Decides for one captured graph. Every rank calls its methods at the same places."""

    site: Site
    options: StepOptions
    compiler: Compiler
    graph: GraphModule
    bursts: float = 1.0
    """The part of all elements that may come in bursts."""
    kinds: Collection[UpdateKind] = ()
    """Those of all updates, if they are known."""
    earlier: EarlierJobs = field(default_factory=EarlierJobs)
    """Remembers what this step costs, for the next job."""

    def first(self, costs: CostTable | None, example: Example | None = None) -> Decision:
        """Decide by given costs, or by what is measured now: with an example, on the job itself.

        Raises BadPlan where a given plan does not fit, and BadOption where what is pinned does not.
        """
        cluster = self.site.cluster
        compress = self.options.compress
        if cluster.world_size == 1 or compress.plan is not None:
            table = costs or CostTable()
            return self._as_told(compress.plan, self.compiler.analyze(self.graph, table), table)
        self.check_pins()
        if costs is None:
            with phase("measuring the machine and the links"):
                costs = gathered_costs(self.site, compress.offered)
            if example is not None:
                with phase("measuring the dense step"):
                    costs = measured_on_job(self.compiler, self.site, example, costs, self.earlier)
        with phase("choosing a plan"):
            return self._best(self.compiler.analyze(self.graph, costs), costs, "the plan")

    def check_pins(self) -> None:
        """Raise BadOption where what is pinned does not fit the cluster."""
        self.options.compress.pinned.check_fits(self.site.cluster)

    def choose(self, workload: Workload, costs: CostTable, terms: Terms) -> tuple[Choice, Sequence[str]]:
        """Choose a plan here; with what a report must say of how it was searched for."""
        return choose(workload, costs, self.site.cluster, terms), search_notes()

    def name(self, plan: GivenPlan, workload: Workload, costs: CostTable) -> Plan:
        """Make the plan that the user named. Raises BadPlan."""
        return plan_as_given(plan, workload, costs, self.site.cluster, self.options.compress.point)

    def with_momenta(self, decision: Decision) -> Decision:
        """Add what exchanging momenta costs, where a given plan does that. Raises Unsupported."""
        moved, costs = decision.plan.moved, decision.costs
        if not moved or decision.choice is not None:
            return decision
        topic = "reading what momenta cost"
        workload = self.site.ranks.attempt(topic, lambda: self.compiler.analyze(self.graph, costs, moved))
        return replace(decision, workload=workload)

    def again(self, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision:
        """Measure the links again, and decide by them and by errors of this job's gradients.

        Ranks meet for a topic of its own.
        """
        ranks = self.site.ranks
        costs = with_links_of_now(costs, self.site)
        workload = ranks.attempt(f"{topic}: reading the costs", lambda: self.compiler.analyze(self.graph, costs))
        return self._best(workload, costs, topic, errors)

    def measure_next_time(self) -> None:
        """Keep the next job from taking over what this one has found to be wrong."""
        self.earlier.forget()

    @property
    def terms(self) -> Terms:
        """Return the terms of this job's plans, by errors of Gaussian values."""
        return Terms.of(self.options.compress, self.bursts)

    def _best(self, workload: Workload, costs: CostTable, topic: str, errors: ErrorTable = ASSUMED) -> Decision:
        """Choose on rank 0 and follow on all; of several groups beside each other, the first one chooses for all."""
        cluster, terms = self.site.cluster, self.terms.by(errors)

        def decide() -> dict[str, Any]:
            chosen, notes = self.choose(workload, costs, terms)
            chooser = PointChooser(self.options, self.kinds, costs, cluster, terms)
            chosen, known, more = chooser.choose(chosen, workload, partial(self.compiler.analyze, self.graph, costs))
            chosen_by = {"costs": costs.to_json(), "workload": known.to_json(), "notes": [*notes, *more]}
            return {"choice": chosen.to_json(), **chosen_by}

        beside = self.site.beside
        data = self.site.ranks.from_rank_0(topic, lambda: beside.from_first(topic, decide))
        agreed, work = CostTable.from_json(data["costs"]), Workload.from_json(data["workload"])
        choice = self.site.ranks.attempt(f"{topic}: reading the choice", lambda: Choice.from_json(data["choice"]))
        notes = (*data["notes"], *terms.notes(work, cluster), *foreign_note(agreed.hardware, self.site.device))
        return Decision(choice.plan, agreed, work, choice, notes=notes)

    def _as_told(self, plan: GivenPlan | None, workload: Workload, costs: CostTable) -> Decision:
        """Follow the plan that all ranks were given. A saved one may lie on rank 0's machine alone."""
        ranks, cluster = self.site.ranks, self.site.cluster
        if plan is None or cluster.world_size == 1:
            notes = ("one rank: nothing to communicate", *foreign_note(costs.hardware, self.site.device))
            return Decision(Plan(()), costs, workload, notes=notes)
        data = ranks.from_rank_0("the plan", lambda: self.name(plan, workload, costs).to_json())
        followed = Plan.from_json(data)

        def mine() -> Plan:
            # A text is the same on all ranks by now. What it stands for follows from costs, which are each rank's own.
            if isinstance(plan, Plan):
                return plan
            return Plan.load(plan) if is_path(plan) and Path(plan).exists() else followed

        ranks.check_same("comparing plans", ranks.attempt("reading the plan", lambda: facts_of_plan(mine())))
        followed.check_covers(workload.sizes, workload.types)
        followed.check_fits(cluster)
        notes = ("the plan was given, not chosen", *foreign_note(costs.hardware, self.site.device))
        return Decision(followed, costs, workload, notes=notes)


def plan_as_given(
    plan: GivenPlan,
    workload: Workload,
    costs: CostTable,
    cluster: Cluster,
    at: ExchangePoint = ExchangePoint.GRADIENT,
) -> Plan:
    """Make the plan that the user named, whose gradients end whole. Raises BadPlan."""
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
    """Read the costs that the user gave, if any. A saved table may lie on rank 0's machine alone."""
    if isinstance(costs, str | Path):
        path = costs
        costs = CostTable.from_json(ranks.from_rank_0("the costs", lambda: CostTable.read(path).to_json()))
    return costs and replace(costs, threads=torch.get_num_threads())


def foreign_note(measured_on: str, device: torch.device) -> tuple[str, ...]:
    """Say that a table was measured on other hardware than this; another number of threads makes none."""
    here = hardware(device)
    if _machine_of(measured_on) in (_machine_of(here), CostTable().hardware):
        return ()
    return (f"The costs were measured on another machine: {measured_on}. This one is {here}.",)


def _machine_of(hardware: str) -> str:
    """The hardware without its threads: under torchrun a process has one, asked about by itself it has more."""
    return re.sub(r", \d+ threads?$", "", hardware)
