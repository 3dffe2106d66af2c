"""Start what follows a plan: meet the other ranks, begin with the same values, and decide.

    ModelHere      the model as a frontend has found it on this rank
    Start.of       compare ─► cluster and transport ─► rank 0's values ─► the plan of a loaded state ─► the seed
    Start.decide   costs ─► a plan that all ranks follow ─► its process groups

Every frontend begins like that; they differ in what they compare, share and plan for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.error_feedback import UpdateKind, burst_share, check_plan
from fxcomp.plan.given import is_named, is_path
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import Planner, costs_as_given
from fxcomp.ranks import Ranks
from fxcomp.search.decision import Decision
from fxcomp.search.question import Terms
from fxcomp.site import Beside, Site
from fxcomp.state.gradient_state import Shapes
from fxcomp.state.saved_state import Given, plan_of, states_given
from fxcomp.step.follower import Trained

BURSTS = burst_share(list(UpdateKind))
"""The part of all elements that may come in bursts where the optimizer is not known: it may be Adam."""


def ends_whole(plan: Plan) -> bool:
    """Tell a plan that leaves every rank whole gradients."""
    return not any(bucket.strategy.ends_as_shards for bucket in plan.buckets)


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model on this rank."""

    shapes: Shapes
    """Of its parameters; where they are sharded, of what this rank averages."""
    device: torch.device
    facts: Mapping[str, Any]
    """Facts that must be the same on all ranks, beside the options."""
    shared: Iterable[Tensor] = ()
    """Tensors that all ranks take from rank 0."""
    trained: Collection[str] | None = None
    """The parameters that get a gradient, if not all do."""
    beside: Any = None
    """The process group of ranks that average other shards over the same links, if there are any."""


@dataclass(frozen=True, slots=True)
class Start:
    """The agreement of all ranks before they decide."""

    site: Site
    options: StepOptions
    trained: Trained
    loads: bool = False
    """A state was loaded: its plan, or what the options name, is followed at once, so that nothing owed waits."""

    @classmethod
    def of(cls, what: str, ranks: Ranks, options: StepOptions, model: ModelHere, given: Given = None) -> Start:
        """Agree with ranks that have met for `what`; every rank calls it. Raises ReplicasDiffer."""
        ranks.check_same("comparing models", {**model.facts, **options.facts()})
        beside = () if model.beside is None else (Beside.of(model.beside, what),)
        site = Site.of(ranks, options.cluster, model.device, *beside)
        ranks.share(model.shared)
        options, loads = following(options, given, ranks)
        seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)
        names = sorted(model.shapes if model.trained is None else model.trained)
        return cls(site, options, Trained(site, model.shapes, names, options.compress.feedback, seed), loads)

    @property
    def is_planned(self) -> bool:
        """Return whether nothing has to be timed before there is a plan."""
        return self.loads or has_whole_plan(self.options)

    @property
    def terms(self) -> Terms:
        """Return the limits of plans where the optimizer is not known."""
        return Terms.of(self.options.compress, BURSTS)

    def follow(self, given: Given, fits: Callable[[Plan], bool] = ends_whole) -> Start:
        """Follow the plan of a loaded state if it fits, unless another one was named; every rank calls it."""
        options, loads = following(self.options, given, self.site.ranks, fits)
        return replace(self, options=options, loads=loads)

    def compiler(self, *, skip_nonfinite: bool = False, micro_batches: int = 1) -> Compiler:
        """Make the compiler of this rank's programs."""
        site = self.site
        return Compiler(site.cluster, site.rank, self.trained.feedback, skip_nonfinite, micro_batches)

    def planner(self, compiler: Compiler, graph: GraphModule, kinds: Collection[UpdateKind] | None = None) -> Planner:
        """Make what decides for a graph. Where the optimizer is known, `kinds` are those of all updates."""
        bursts = BURSTS if kinds is None else burst_share(kinds)
        return Planner(self.site, self.options, compiler, graph, bursts, kinds or ())

    def decide(
        self,
        planner: Planner,
        kinds: Collection[UpdateKind] = (),
        fitted: Callable[[Decision], Decision] = lambda decision: decision,
        *,
        is_whole: bool = False,
    ) -> Decision:
        """Decide on a plan, and make its process groups; every rank calls it. Raises BadPlan and BadOption.

        A whole step that no one has timed yet may begin with the dense plan.
        """
        site = self.site
        decision = fitted(planner.first(costs_as_given(self.options.costs, site.ranks), is_whole=is_whole))
        self.options.check_moves(decision.plan, kinds)
        decision = planner.with_momenta(decision)
        check_plan(self.trained.feedback, decision.plan, self.trained.shapes, site.cluster, kinds)
        site.make_groups_for(decision.plan)
        return decision


def following(
    options: StepOptions, given: Given, ranks: Ranks, fits: Callable[[Plan], bool] = ends_whole
) -> tuple[StepOptions, bool]:
    """Let options follow the plan of a loaded state, unless they name another; tell whether any rank has a state.

    Every rank calls it.
    """
    loads = any(ranks.gather("who has a loaded state", bool(states_given(given))))
    plans = ranks.gather("the plans of loaded states", plan_of(given))
    saved = next((Plan.from_json(plan) for plan in plans if plan is not None), None)
    if saved is None or has_whole_plan(options):
        return options, loads
    named = options.compress.plan
    if (named is not None and not is_named(saved, str(named))) or not fits(saved):
        return options, loads
    return replace(options, compress=options.compress.following(saved)), loads


def has_whole_plan(options: StepOptions) -> bool:
    """Tell options that say which gradients travel together, and not only how all of them do."""
    named = options.compress.plan
    return isinstance(named, Plan) or (named is not None and is_path(named))
