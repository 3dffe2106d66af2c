"""Decide how the modules of a fully_shard model scatter their gradients, by when each is ready, and keep what is
followed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxcomp.compressors import Compressor
from fxcomp.frontends.hook_program import Layout, arriving
from fxcomp.frontends.scattered_modules import ScatteredModule
from fxcomp.frontends.start import BURSTS
from fxcomp.options import StepOptions
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import costs_as_given
from fxcomp.planning.measure_machine import gathered_costs
from fxcomp.report.scatter_report import ScatterFacts
from fxcomp.search.by_module import ScatterChoice, choose_by_module
from fxcomp.search.question import Terms
from fxcomp.site import Site


class Scattering:
    """The plan that modules follow: a plan that was given, or dense until one is chosen."""

    def __init__(self, options: StepOptions, modules: Sequence[ScatteredModule], given: Plan | None) -> None:
        self.options, self._modules = options, modules
        self.plan = given
        self.choice: ScatterChoice | None = None
        """The arithmetic of a plan; None for one that was given."""
        self.notes: tuple[str, ...] = () if given is None else ("the plan was given, not chosen",)
        self._compressors: dict[int, Compressor | None] = {}
        if given is not None:
            self.follow(given)

    @property
    def is_decided(self) -> bool:
        return self.plan is not None

    @property
    def keeps_something(self) -> bool:
        """Something is left out, and fed back."""
        found = (each for each in self._compressors.values() if each is not None)
        return any(map(self.options.compress.feedback.surrounds, found))

    def follow(self, plan: Plan) -> None:
        """Follow a plan whose buckets are the modules."""
        strategies = {frozenset(bucket.names): bucket.strategy for bucket in plan.buckets}
        self.plan = plan
        self._compressors = {
            number: strategies[frozenset(module.module.names)].compressor
            for number, module in enumerate(self._modules)
            if frozenset(module.module.names) in strategies  # one without gradients while it was timed stays dense
        }

    def compressor(self, number: int) -> Compressor | None:
        """Return what a module's gradients are compressed by; None if they stay dense."""
        return self._compressors.get(number)

    def decide(self, site: Site, order: Sequence[int], layout: Layout, compute_us: Sequence[float]) -> None:
        """Choose for modules that are ready in this order, after so much compute each; every rank calls it."""
        ranks, options = site.ranks, self.options
        facts = {f"the gradients that are ready as number {k}": bucket.facts for k, bucket in enumerate(layout)}
        ranks.check_same("comparing modules", facts)
        everyone = site.gather_numbers("ready times", compute_us)
        graph = arriving(layout, [statistics.median(each) for each in zip(*everyone, strict=True)], site.device)
        costs = costs_as_given(options.costs, ranks) or gathered_costs(site, options.compress.pinned.compressors)
        workload = Compiler(site.cluster, site.rank, options.compress.feedback).analyze(graph, costs)
        buckets = [self._modules[number].planned() for number in order]
        terms = Terms.of(options.compress, BURSTS)
        overlaps = site.device.type != "cpu"

        def choose() -> dict[str, Any]:
            return choose_by_module(workload, buckets, costs, site.cluster, terms, overlaps=overlaps).to_json()

        self.choice = ScatterChoice.from_json(ranks.from_rank_0("the plan", choose))
        self.follow(self.choice.plan)

    def tell(self, note: str, *, follows_dense: bool) -> None:
        """Take over what taking turns has shown."""
        self.notes = (*self.notes, note)
        if follows_dense and self.choice is not None:
            self.plan = self.choice.dense
            self.choice = replace(self.choice, plan=self.plan, step_us=self.choice.dense_us, loss=0.0)

    def facts(self, site: Site, measured_ms: float | None) -> ScatterFacts:
        """Gather what a report is made of; there is a plan."""
        assert self.plan is not None, "a report is of a plan"
        names = {frozenset(module.module.names): module.module.name for module in self._modules}
        called = [names.get(frozenset(bucket.names), "") or "the outermost" for bucket in self.plan.buckets]
        kept = sum(self._modules[k].elements for k, each in self._compressors.items() if self._is_fed_back(each))
        notes = (*self.notes, *site.ranks.notes)
        mode = self.options.compress.mode.value
        return ScatterFacts(self.plan, called, self.choice, site.cluster, mode, 4 * kept, notes, measured_ms)

    def _is_fed_back(self, compressor: Compressor | None) -> bool:
        return compressor is not None and self.options.compress.feedback.surrounds(compressor)
