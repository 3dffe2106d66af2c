"""Start of every frontend: meet the other ranks, share initial values, and choose a plan.

ModelHere      the model on this rank
Start.of       compare ─► cluster and transport ─► rank 0's values ─► the plan of a loaded state ─► the seed
Start.decide   costs ─► a plan that all ranks follow ─► its process groups
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp.graph.exact_type import exact_types
from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import UpdateKind, burst_share, check_plan
from fxcomp.plan.given import GivenPlan, is_named, is_path
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.modes import Mode
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
"""Maximum fraction of elements whose errors may be fed back in bursts (rare and large, as by top-k), for an unknown
optimizer.
"""


NOTHING_EXACT: Mapping[str, ElementType] = MappingProxyType({})


def exact_of(compress: Compress, graph: GraphModule) -> Mapping[str, ElementType]:
    """Return the gradients to send as 16-bit values: as a given Plan lists, or in mode `lossless` all proved casts."""
    if isinstance(compress.plan, Plan):
        return {name: kind for name, kind in compress.plan.types.items() if kind.narrow is not None}
    if compress.within != Mode.LOSSLESS.value or compress.plan is not None:
        return NOTHING_EXACT
    return {name: ElementType.of(narrow, torch.float32) for name, narrow in exact_types(graph).items()}


def types_of(plan: GivenPlan) -> dict[str, str]:
    """Return the element type of each gradient of a Plan, or of a saved plan."""
    whole = plan if isinstance(plan, Plan) else Plan.load(plan)
    return {name: str(kind) for name, kind in whole.types.items()}


def ends_whole(plan: Plan) -> bool:
    """Return True if the plan leaves every rank with whole gradients, not shards."""
    return not any(bucket.strategy.ends_as_shards for bucket in plan.buckets)


@dataclass(frozen=True, slots=True)
class ModelHere:
    """Model on this rank."""

    shapes: Shapes
    """Shapes of the parameters, or of this rank's shards."""
    device: torch.device
    facts: Mapping[str, Any]
    """Facts that must be equal on all ranks, like the options."""
    shared: Iterable[Tensor] = ()
    """Tensors that all ranks take from rank 0."""
    trained: Collection[str] | None = None
    """Parameters that get a gradient; None for all."""
    beside: Any = None
    """Process group of ranks that average other shards over the same links."""


@dataclass(frozen=True, slots=True)
class Start:
    """Agreement of all ranks before they choose a plan."""

    site: Site
    options: StepOptions
    trained: Trained
    loads: bool = False
    """True if any rank has loaded a state. Then a plan is followed from the first pass, because residuals need one."""

    @classmethod
    def of(cls, what: str, ranks: Ranks, options: StepOptions, model: ModelHere, given: Given = None) -> Start:
        """Agree with the other ranks on everything except the plan. Must run on every rank. Raises ReplicasDiffer."""
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
        return self.loads or has_whole_plan(self.options)

    @property
    def terms(self) -> Terms:
        return Terms.of(self.options.compress, BURSTS)

    def follow(self, given: Given, fits: Callable[[Plan], bool] = ends_whole) -> Start:
        """Follow the plan of a loaded state if it fits and the options name no plan. Must run on every rank."""
        options, loads = following(self.options, given, self.site.ranks, fits)
        return replace(self, options=options, loads=loads)

    def compiler(
        self, *, skip_nonfinite: bool = False, micro_batches: int = 1, exact: Mapping[str, ElementType] = NOTHING_EXACT
    ) -> Compiler:
        site = self.site
        keeps_order = self.options.compress.sums == "ranks"
        return Compiler(
            site.cluster, site.rank, self.trained.feedback, skip_nonfinite, micro_batches, exact, keeps_order
        )

    def exact_gradients(self, graph: GraphModule) -> Mapping[str, ElementType]:
        """Return the gradients to send in 16 bits, because they are casts. Must run on every rank.

        A given plan lists these gradients. In mode `lossless`, every rank must have proved them.
        """
        compress, ranks = self.options.compress, self.site.ranks
        plan = compress.plan
        if self.site.cluster.world_size == 1 or self.options.accumulate > 1:
            return NOTHING_EXACT  # sums over micro-batches are fp32
        if plan is not None:
            if not has_whole_plan(self.options):
                return NOTHING_EXACT
            told = ranks.from_rank_0("the plan's types", lambda: types_of(plan))
            return {name: kind for name, text in told.items() if (kind := ElementType(text)).narrow is not None}
        mine = exact_of(compress, graph)
        everyone = ranks.gather("gradients that are casts", {name: str(kind) for name, kind in mine.items()})
        return {name: kind for name, kind in mine.items() if all(each.get(name) == str(kind) for each in everyone)}

    def planner(self, compiler: Compiler, graph: GraphModule, kinds: Collection[UpdateKind] | None = None) -> Planner:
        """Return a planner; `kinds` is None for an unknown optimizer."""
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
        """Choose a plan, and make its process groups. Must run on every rank. Raises BadPlan and BadOption.

        With `is_whole` (the step includes the optimizer), the first plan may be dense, until costs are measured.
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
    """Apply the plan of a loaded state, unless options name another plan. Must run on every rank.

    Return the options, and True if any rank has a state.
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
    """Return True if the options contain a plan with buckets."""
    named = options.compress.plan
    return isinstance(named, Plan) or (named is not None and is_path(named))
