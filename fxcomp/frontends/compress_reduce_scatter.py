"""Compress the gradients of a model that fully_shard shards over all ranks: plain FSDP over a slow network.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    scatter = fxcomp.compress_reduce_scatter(model, compress="balanced")

fully_shard gathers parameters, dense, and calls here with the gradients of each module, of which every rank gets a
part. The loop, the optimizer and clipping stay the user's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.frontends.scatter_job import ScatterJob
from fxcomp.frontends.scatter_plan import Scattering
from fxcomp.frontends.scattered_modules import ScatteredModule, scattered_modules, told_plan
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.given import is_path
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks
from fxcomp.report import scatter_report
from fxcomp.report.terminal import sections_to_text
from fxcomp.state.checkpoint import PLAN, SCALE, states_of, to_tensors
from fxcomp.state.handover import Exchange
from fxcomp.state.saved_state import VERSION, Given, Here, Saved, plan_of, read_together, scale_of, tell_what_is_lost


def compress_reduce_scatter(
    model: nn.Module,
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ShardScatter:
    """Compress the gradients of a sharded model on their way to the ranks that hold the parameters.

    `model` went through `fully_shard` on a mesh of one dimension. Every rank of that mesh calls this, with the same
    options, before the first backward pass. The options are `ddp_hook`'s; a module's gradients travel together, so a
    pin decides for all that is scattered with the parameter. Compressors work on parts of
    gradients: low rank, which needs whole matrices, is not offered.

    Raises UnsupportedFeature, UnsupportedParameter, BadOption, BadPlan, and ModelsDiffer where ranks have other models.
    """
    options = StepOptions.of_gradients(
        compress, "which fully_shard leaves yours", cluster=cluster, costs=costs, scaler=scaler
    )
    options.compress.pinned.check_model(model)
    modules = scattered_modules(model)
    with Ranks.meeting(cluster, "compress_reduce_scatter", modules[0].module.shard_group) as ranks:
        facts = {f"the gradients of module {each.module.name!r}": each.bucket.facts for each in modules}
        shapes = {n: shape for each in modules for n, shape in zip(each.bucket.names, each.bucket.shapes, strict=True)}
        start = Start.of("compress_reduce_scatter", ranks, options, ModelHere(shapes, modules[0].module.device, facts))
        told = _told(options, modules, ranks)
    job = ScatterJob(start.site, modules, Scattering(options, modules, told))
    if ranks.world_size > 1:
        job.install()
    return ShardScatter(job, has_plan=told is not None)


def _told(options: StepOptions, modules: list[ScatteredModule], ranks: Ranks) -> Plan | None:
    """Read the plan that the user named, if any. A saved one may lie on rank 0's machine alone."""
    given = options.compress.plan
    if given is None:
        return None
    if isinstance(given, Plan) or not is_path(given):
        named = given if isinstance(given, Plan) else str(given)
        return ranks.attempt("reading the plan", lambda: told_plan(named, modules))
    data = ranks.from_rank_0("the plan", lambda: Plan.load(given).to_json())
    return ranks.attempt("reading the plan", lambda: told_plan(Plan.from_json(data), modules))


class ShardScatter:
    """The averaging that `compress_reduce_scatter` returns: the plan in force, and what it owes."""

    def __init__(self, job: ScatterJob, *, has_plan: bool):
        self._job, self._has_plan = job, has_plan

    # Looking

    @property
    def plan(self) -> Plan | None:
        """The plan in force, a bucket for each module; None while the first backward passes are dense.

        Its strategies end as if reduced gradients were gathered; fully_shard gathers parameters in their place.
        """
        return self._job.plan.plan

    def report(self) -> str:
        """Explain the plan as text. Raises FxcompError before there is a plan."""
        if self.plan is None:
            raise FxcompError(
                "there is no plan yet: the first backward passes are dense, and tell when gradients are ready.\n"
                "  Ask again after some steps, or name a plan."
            )
        times = self._job.times
        facts = self._job.plan.facts(self._job.site, times.median_ms if times.step_ms else None)
        return sections_to_text(scatter_report.headline(facts), scatter_report.sections(facts))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy what was left out of gradients on this rank, by parameter, with the plan; empty before there is one."""
        job, plan = self._job, self.plan
        if plan is None:
            return {}
        rank, ranks = job.site.rank, job.site.ranks.world_size
        residuals = {
            name: [_whole(value, rank, ranks)]
            for number, owed in job.owed.items()
            for name, value in job.modules[number].by_parameter(owed).items()
        }
        facts = {"version": VERSION, "plan": plan.digest, "rank": rank, "ranks": ranks, "steps": job.passes}
        kept = {"learning_rates": {}, "residuals": residuals, "owed": {}}
        return {**facts, **kept, PLAN: plan.to_json(), SCALE: job.scale}

    def checkpoint(self) -> dict[str, Tensor]:
        """This rank's state as plain tensors under names that no other rank of the job uses; empty without a plan.

        `fxcomp.read_checkpoint` reads it on any number of ranks.
        """
        saved = self.state_dict()
        return to_tensors(saved, compat.rank_in_job()) if saved else {}

    def load_state_dict(self, state: Given) -> None:
        """Take back what `state_dict` or `checkpoint` returned, of any number of ranks; every rank calls it.

        Its plan is followed from the next pass on, unless one was given. What is owed for gradients that stay dense
        goes out with the next ones.
        """
        job = self._job
        job.lockstep.check_open()
        ranks = job.site.ranks
        with ranks.together("load_state_dict", after_a_stop=True):
            states = ranks.attempt("reading states", lambda: states_of(state) or None)
            plans = ranks.gather("the plans of loaded states", plan_of(states))
            saved = next((plan for plan in plans if plan is not None), None)
            if saved is not None and not self._has_plan:
                self._follow(Plan.from_json(saved))
            self._restore(states)

    def _follow(self, saved: Plan) -> None:
        """Follow a saved plan; where modules are others now, choose again."""
        try:
            self._job.follow(told_plan(saved, self._job.modules))
        except BadPlan as error:
            warnings.warn(f"fxcomp: the saved plan is not followed: {error}", stacklevel=4)

    def _restore(self, states: Given) -> None:
        job = self._job
        exchange = Exchange(job.site.ranks, job.site.sum_over_ranks, "load_state_dict", job.site.device)
        sizes = {n: size for each in job.modules for n, size in zip(each.bucket.names, each.bucket.sizes, strict=True)}
        here = Here(sizes, list(sizes), set() if self.plan is None else {self.plan.digest})
        agreed = read_together(states, here, exchange)
        if agreed is None:
            return
        exchange.attempt("telling what is lost", lambda: tell_what_is_lost(agreed, here, job.site.rank))
        owed = owed_of(agreed.states, sizes, job.site.ranks.world_size)
        scales = exchange.gather("the scale of the loss", scale_of(states))
        scale = next((each for each in scales if each is not None), 1.0)
        job.owe({name: value.to(job.site.device) for name, value in owed.items()}, scale)

    def close(self) -> None:
        """Give back the process groups; other ranks need not be there. The model's next backward pass raises."""
        self._job.close()


def owed_of(states: tuple[Saved, ...], sizes: Mapping[str, int], ranks: int) -> dict[str, Tensor]:
    """Add up what saved states owe, as what the next gradient of one of so many ranks must bring."""
    found: dict[str, Tensor] = {}

    def whole(name: str) -> Tensor:
        return found.setdefault(name, torch.zeros(sizes[name]))

    for state in states:
        for name, pieces in state.residuals.items():
            for piece in pieces:
                piece.add_to(whole(name), times=ranks)
        for name, value in state.owed.items():
            whole(name).add_(value.cpu(), alpha=ranks / state.ranks)
    return found


def _whole(values: Tensor, rank: int, ranks: int) -> dict[str, Any]:
    """Describe a whole parameter's residual on one of so many ranks, as saved states do."""
    place = {"start": 0, "size": values.numel(), "slot": 0, "place": rank}
    return {"values": values, **place, "weight": list(Fraction(1, ranks).as_integer_ratio()), "total": [1, 1]}
