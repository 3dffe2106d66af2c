"""Measure a job before anything is compressed: its dense step on the real network, all ranks running."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, replace

from fxcomp.cost.contention import FittedContention
from fxcomp.cost.table import CostTable
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.planning.earlier_jobs import EarlierJobs, facts_of_step, with_step_of
from fxcomp.planning.measure_contention import as_slowest, contention_of, networks
from fxcomp.planning.measure_step import apportion, feed_us, measure_step
from fxcomp.search.choose import uniform
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
    facts = facts_of_step(example.captured.graph, compiler, site, costs)
    known = ranks.from_rank_0(
        "what an earlier job measured", lambda: earlier.find(facts, costs, cluster, workload.dense_bytes)
    )
    if known is not None:
        return with_step_of(costs, CostTable.from_json(known))
    data = ranks.from_rank_0("the dense plan", lambda: uniform("dense", workload, costs, cluster).to_json())
    measured = _measured_now(compiler, site, example, costs, Plan.from_json(data))
    if site.rank == 0:
        earlier.keep(measured)
    return measured


def _measured_now(compiler: Compiler, site: Site, example: Example, costs: CostTable, plan: Plan) -> CostTable:
    """Run the dense step over and without the network."""
    ranks, cluster = site.ranks, site.cluster
    program = compiler.emit(example.captured, plan, costs)
    state = GradientState.fresh(plan, example.inputs.shapes, site, compiler.feedback)
    arguments = example.arguments(program, state)
    predicted_us = program.timeline.step_time_us
    mine = next(repeats for limit_us, repeats in MEASURED_STEPS if predicted_us < limit_us)
    repeats = int(ranks.from_rank_0("how many steps are timed", lambda: mine))  # a rank that times one more would wait
    here = measure_step(program, arguments, networks(program.graph, site.transport, costs, cluster), repeats)
    around_us = ranks.gather("timing what feeds a step", feed_us(here[0], lambda: example.feed(program, state)))
    everyone = ranks.gather("timing the dense step", [[on.step_us, on.compute_us] for on in here])
    alone, *others = as_slowest(here, everyone)
    compute = apportion(program, alone, "measured in the emitted step, all ranks running")
    starts = [on.launch_us for on in others if on.launch_us is not None]
    costs = replace(
        costs,
        compute={**costs.compute, **compute},
        pack_gb_per_s=alone.pack_gb_per_s or costs.pack_gb_per_s,
        launch_us=statistics.fmean(starts) if starts else costs.launch_us,
    )

    def fitted() -> dict[str, float]:
        gm = compiler.rewrite(example.captured.graph, plan, costs)
        return asdict(contention_of(costs, gm, cluster, [alone, *others]))

    # By rank 0's tasks, like the plan; meanwhile the others leave it the processors.
    found = FittedContention(**ranks.from_rank_0("fitting contention", fitted))
    error = min(max(SMALLEST_ERROR, found.error), LARGEST_ERROR)
    return replace(costs, contention=found.factor, error=error, feed_us=max(around_us))
