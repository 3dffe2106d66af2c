"""Start a communication hook: find its model, meet the other ranks, and decide on a plan by when buckets are ready."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.beside import NOBODY
from fxcomp.errors import UnsupportedFeature, UnsupportedParameter
from fxcomp.frontends.hook_plan import fitted
from fxcomp.frontends.hook_program import DdpBucket, Layout, arriving
from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.check_feedback import check_plan
from fxcomp.plan.element_type import TRAINED_DTYPES
from fxcomp.plan.given import is_named, is_path
from fxcomp.plan.plan import Plan
from fxcomp.plan.update_kind import UpdateKind, burst_share
from fxcomp.planning.decide import Planner, costs_as_given
from fxcomp.ranks import Ranks
from fxcomp.runtime.clock import clock_of
from fxcomp.search.decision import Decision
from fxcomp.search.terms import Terms
from fxcomp.site import Site
from fxcomp.state.saved_state import Given, plan_of, states_given
from fxcomp.step.follower import Trained

TIMED = 3
"""So many passes tell when buckets are ready."""

BURSTS = burst_share(list(UpdateKind))


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The model that a hook serves."""

    names: dict[int, str]
    """Of its trainable parameters, by identity."""
    shapes: dict[str, tuple[int, ...]]
    finds_unused: bool
    """Some parameters may get no gradient in some passes."""

    @classmethod
    def around(cls, wrapper: compat.Wrapper | None, options: StepOptions) -> Wrapped:
        """Look at the model in a wrapper.

        Raises UnsupportedFeature, UnsupportedParameter, and BadOption for pins that decide nothing in it.
        """
        if wrapper is None:
            raise UnsupportedFeature(
                "the hook cannot find the model that it was registered with.\n"
                "  Hand it over: model.register_comm_hook(model, hook)."
            )
        options.compress.pinned.check_model(wrapper.module)
        named = [(name, each) for name, each in wrapper.module.named_parameters() if each.requires_grad]
        other = next(((name, each) for name, each in named if each.dtype not in TRAINED_DTYPES), None)
        if other is not None:
            raise UnsupportedParameter(
                f"the parameter {other[0]!r} is {other[1].dtype}; only real floating-point numbers of 16 bits or more"
                " can be trained.\n  Keep it in float32, or set requires_grad=False."
            )
        shapes: dict[str, tuple[int, ...]] = {name: tuple(each.shape) for name, each in named}
        return cls({id(each): name for name, each in named}, shapes, wrapper.finds_unused)

    def bucket(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> DdpBucket:
        """Describe a bucket of these parameters. Raises UnsupportedFeature if they are another model's."""
        if any(id(each) not in self.names for each in parameters):
            raise UnsupportedFeature(
                "this hook serves another model already.\n  Make one for each: model.register_comm_hook(None,"
                " fxcomp.ddp_hook(...))."
            )
        names = tuple(self.names[id(each)] for each in parameters)
        sizes = tuple(each.numel() for each in parameters)
        return DdpBucket(names, tuple(self.shapes[name] for name in names), sizes, dtype)


class ReadyTimes:
    """Times the compute before each bucket of the last passes, without what the hook itself takes."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._last: Any = None
        self._pass: list[tuple[Any, Any]] = []
        self._passes: deque[tuple[Layout, list[tuple[Any, Any]]]] = deque(maxlen=TIMED)

    def enter(self) -> None:
        """A bucket has come."""
        now = self._clock.look()
        self._pass.append((now if self._last is None else self._last, now))

    def leave(self) -> None:
        """Compute goes on."""
        self._last = self._clock.look()

    def end_pass(self, layout: Layout) -> None:
        """Every bucket has come, and these were they."""
        self._passes.append((layout, self._pass))
        self._pass = []

    def medians_us(self, layout: Layout, device: torch.device) -> list[float]:
        """The compute before each bucket; zeros where no pass had these buckets. Waits for the device."""
        compat.synchronize(device)
        passes = [looks for known, looks in self._passes if known == layout]
        if not passes:
            return [0.0] * len(layout)
        return [
            statistics.median(self._clock.us(*looks) or 0.0 for looks in each) for each in zip(*passes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Start:
    """What a hook begins with, agreed by all ranks."""

    wrapped: Wrapped
    site: Site
    options: StepOptions
    seed: int
    loads: bool = False
    """A state was loaded: its plan, or what the options name, is followed at once, so that nothing owed waits."""

    @property
    def is_planned(self) -> bool:
        """Tell that nothing has to be timed before there is a plan."""
        return self.loads or has_whole_plan(self.options)

    @property
    def trained(self) -> Trained:
        """What gradients are of."""
        shapes = self.wrapped.shapes
        return Trained(self.site, shapes, sorted(shapes), self.options.compress.feedback, self.seed)

    @property
    def facts(self) -> dict[str, Any]:
        """What groups beside each other have in common that decide together."""
        here = {"this rank's place": self.site.rank, "the hosts of ranks": list(self.site.cluster.placement)}
        return here | self.options.facts()

    @property
    def terms(self) -> Terms:
        """What plans may be. The optimizer is not known and may be Adam, so little may come in bursts."""
        return Terms.of(self.options.compress, BURSTS)


def meet(options: StepOptions, parameter: Tensor, state: object, given: Given) -> Start:
    """Meet the ranks that a wrapper averages over, in the first bucket of the first pass; each of them calls it there.

    `state` is what the hook was registered with.
    """
    wrapper = compat.wrapper_of(parameter, state)
    group = None if wrapper is None else wrapper.group
    with Ranks.meeting(options.cluster, "ddp_hook", group) as ranks:
        wrapped = ranks.attempt("looking at the model", lambda: Wrapped.around(wrapper, options))
        facts = {f"the shape of {name!r}": list(shape) for name, shape in wrapped.shapes.items()}
        ranks.check_same("comparing models", facts | options.facts())
        site = Site.of(ranks, options.cluster, parameter.device)
        options, loads = following(options, given, ranks)
        seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)
    return Start(wrapped, site, options, seed, loads)


def following(options: StepOptions, given: Given, ranks: Ranks) -> tuple[StepOptions, bool]:
    """Let options follow the plan of a loaded state, unless they name another; tell whether any rank has a state.

    Every rank calls it.
    """
    loads = any(ranks.gather("who has a loaded state", bool(states_given(given))))
    plans = ranks.gather("the plans of loaded states", plan_of(given))
    saved = next((Plan.from_json(plan) for plan in plans if plan is not None), None)
    if saved is None or has_whole_plan(options):
        return options, loads
    named = options.compress.plan
    if named is not None and not is_named(saved, str(named)):
        return options, loads
    return replace(options, compress=options.compress.following(saved)), loads


def has_whole_plan(options: StepOptions) -> bool:
    """Tell options that say which gradients travel together, and not only how all of them do."""
    named = options.compress.plan
    return isinstance(named, Plan) or (named is not None and is_path(named))


def decide(start: Start, compiler: Compiler, layout: Layout, compute_us: Sequence[float]) -> Decision:
    """Decide on a plan for buckets that are ready after so much compute each; every rank calls it.

    Groups beside each other that have the same to send decide together.
    """
    site, options, ranks = start.site, start.options, start.site.ranks
    buckets = {f"bucket {k}": bucket.facts for k, bucket in enumerate(layout)}
    ranks.check_same("comparing buckets", buckets)
    with site.beside.together("deciding"):
        facts = buckets | start.facts | {"sizes": [bucket.sizes for bucket in layout]}
        if not site.beside.do_the_same("comparing groups", facts):
            site = replace(site, beside=NOBODY)
        everyone = site.beside.gather("ready times", site.gather_numbers("ready times", compute_us))
        times = [mine for group in everyone for mine in group]
        agreed = [statistics.median(each) for each in zip(*times, strict=True)]
        graph = arriving(layout, agreed, site.device)
        planner = Planner(site, options, compiler, graph, BURSTS)
        decision = planner.first(costs_as_given(options.costs, ranks))
    if not has_whole_plan(options):
        decision = fitted(decision, layout)
    check_plan(options.compress.feedback, decision.plan, start.wrapped.shapes, site.cluster)
    site.make_groups_for(decision.plan)
    return decision
