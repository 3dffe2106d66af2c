"""Average the replicas of a sharded model by a plan: HSDP whose slow link is compressed.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    outer = fxcomp.average_replicas(model, mesh["replicate"], compress="balanced")

fully_shard gathers parameters and reduces gradients within a replica, dense. What it has reduced, a shard of each
module's gradients, is averaged over the replicas by the hook's plans (`hook_job.py`), shard by shard. The loop, the
optimizer and clipping stay the user's own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.beside import Beside
from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import BadOption, BadState, FxcompError, UnsupportedFeature, UnsupportedParameter
from fxcomp.frontends.hook_job import HookJob
from fxcomp.frontends.hook_start import Start, Wrapped
from fxcomp.frontends.shard_feed import ShardFeed
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.element_type import TRAINED_DTYPES
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks
from fxcomp.report.terminal import to_text
from fxcomp.site import Site
from fxcomp.state.checkpoint import states_of, to_tensors
from fxcomp.state.saved_state import Given

SHARD = "shard"
"""The key of a saved state that says which shard it is of, and of how many."""


def average_replicas(
    model: nn.Module,
    replicas: Any,
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ReplicaAverage:
    """Average the gradients of a model that is sharded over one dimension of a mesh over the other one.

    `model` went through `fully_shard(..., mesh=mesh["shard"])`, and `replicas` is `mesh["replicate"]` or its process
    group: the ranks that hold the same shard. Every rank of the job calls this, with the same options, before the first
    backward pass and when parameters have their values: all replicas then start from those of the first one. The other
    options are `ddp_hook`'s; sizes are those of shards.

    Raises UnsupportedFeature for a mesh of two dimensions, for which fully_shard has averaged, dense, before anybody
    else can; UnsupportedParameter, BadOption, BadPlan, and ModelsDiffer where replicas are not the same.
    """
    options = StepOptions.of_gradients(
        compress, "which fully_shard leaves yours", cluster=cluster, costs=costs, scaler=scaler, process_group=replicas
    )
    with Ranks.meeting(cluster, "average_replicas", replicas) as ranks:
        shards = ranks.attempt("looking at the model", lambda: _Shards.of(model, options, ranks))
        ranks.check_same("comparing shards", shards.facts | options.facts())
        beside = Beside.of(shards.modules[0].shard_group, "average_replicas")
        site = Site.of(ranks, cluster, shards.device, beside)
        ranks.share(part for part in shards.values(model) if part.numel())
        seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)
    job = HookJob(Start(shards.wrapped, site, options, seed), None)
    feed = ShardFeed(shards.modules, shards.stand_ins, job)
    if ranks.world_size > 1:
        feed.install()
    return ReplicaAverage(job, feed, ranks, shards.place)


@dataclass(frozen=True, slots=True)
class _Shards:
    """What this rank holds of a model."""

    modules: list[compat.ShardedModule]
    stand_ins: list[list[Tensor]]
    """For each parameter of each module, a tensor of the shape of this rank's part, without memory."""
    wrapped: Wrapped
    device: torch.device
    place: tuple[int, int]
    """The number of this rank's shard, and how many there are."""

    @classmethod
    def of(cls, model: nn.Module, options: StepOptions, ranks: Ranks) -> _Shards:
        """Find the sharded modules, and check that their shards can be averaged over the replicas."""
        modules = compat.sharded_modules(model)
        if not modules:
            raise BadOption(
                "average_replicas has found nothing that is sharded and trained in this model.\n"
                '  Call fully_shard(model, mesh=mesh["shard"]) before it; models that are not sharded take'
                " fxcomp.ddp_hook."
            )
        for module in modules:
            _check_module(module)
        _check_all_are_sharded(model, modules)
        options.compress.pinned.check_model(model)
        first = compat.group_ranks(modules[0].shard_group)
        if any(compat.group_ranks(module.shard_group) != first for module in modules):
            raise UnsupportedFeature(
                "modules of this model are sharded over different ranks.\n  Pass one mesh to every fully_shard."
            )
        both = [] if ranks.members is None else sorted(set(first) & set(ranks.members.numbers))
        if len(both) > 1:
            raise BadOption(
                f"ranks {', '.join(map(str, both))} hold different shards, and average_replicas was told that they are"
                ' replicas.\n  Pass the other dimension of the mesh: mesh["replicate"]. A model that is sharded over'
                " all ranks has no replicas: make a mesh of two dimensions."
            )
        stand_ins = [[torch.empty(shape, device="meta") for shape in module.shapes] for module in modules]
        named = [
            (name, stand_in)
            for module, mine in zip(modules, stand_ins, strict=True)
            for name, stand_in in zip(module.names, mine, strict=True)
        ]
        shapes: dict[str, tuple[int, ...]] = {name: tuple(stand_in.shape) for name, stand_in in named}
        wrapped = Wrapped({id(stand_in): name for name, stand_in in named}, shapes, finds_unused=False)
        device = compat.local_part(modules[0].parameters[0]).device
        place = (compat.group_rank(modules[0].shard_group), len(first))
        return cls(modules, stand_ins, wrapped, device, place)

    @property
    def facts(self) -> dict[str, Any]:
        """What replicas have in common."""
        shapes = {f"the shard of {name!r}": list(shape) for name, shape in self.wrapped.shapes.items()}
        return {"the number of this rank's shard": list(self.place), **shapes}

    def values(self, model: nn.Module) -> list[Tensor]:
        """List what replicas start from: this rank's parts of the parameters, and the buffers."""
        return [compat.local_part(each) for each in (*model.parameters(), *model.buffers())]


def _check_module(module: compat.ShardedModule) -> None:
    where = f"module {module.name!r}" if module.name else "the model"
    if module.is_replicated:
        raise UnsupportedFeature(
            f"{where} is sharded over a mesh of two dimensions: fully_shard sums over its replicas, dense, before"
            " anything can be compressed.\n"
            '  Call fully_shard(..., mesh=mesh["shard"]), and average_replicas(model, mesh["replicate"]).'
        )
    if module.divides_afterwards:
        raise UnsupportedFeature(
            f"{where} has a divisor of its own for gradients (set_gradient_divide_factor, or sums that are forced); the"
            " mean over replicas would be divided again.\n  Leave it out, and scale the loss."
        )
    if module.offloads:
        raise UnsupportedFeature(
            f"{where} offloads its parameters to the CPU, so gradients leave the device before they are averaged.\n"
            "  Call fully_shard without CPUOffloadPolicy."
        )
    for name, parameter in zip(module.names, module.parameters, strict=True):
        if parameter.is_meta:
            raise UnsupportedParameter(
                f"the parameter {name!r} has no values yet (device meta).\n"
                "  Call model.to_empty(device=...) and initialise it before average_replicas."
            )
        if parameter.dtype not in TRAINED_DTYPES:
            raise UnsupportedParameter(
                f"the parameter {name!r} is {parameter.dtype}; only real floating-point numbers of 16 bits or more can"
                " be trained.\n  Keep it in float32, or set requires_grad=False."
            )


def _check_all_are_sharded(model: nn.Module, modules: Sequence[compat.ShardedModule]) -> None:
    sharded = {name for module in modules for name in module.names}
    other = [name for name, each in model.named_parameters() if each.requires_grad and name not in sharded]
    if other:
        raise UnsupportedParameter(
            f"the parameter {other[0]!r} is trained and not sharded, so nobody averages its gradient.\n"
            "  Call fully_shard for the whole model last, without ignored_params, or set requires_grad=False."
        )


class ReplicaAverage:
    """What `average_replicas` returns: the plan in force, and what it owes."""

    def __init__(self, job: HookJob, feed: ShardFeed, ranks: Ranks, place: tuple[int, int]):
        self._job, self._feed, self._ranks, self._place = job, feed, ranks, place

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Keep gradients within the replica in the backward passes inside; the next one outside averages their sum.

        Unlike `model.set_requires_gradient_sync(False)` it needs no memory: what is summed up is a shard.
        """
        before, self._feed.is_off = self._feed.is_off, True
        try:
            yield
        finally:
            self._feed.is_off = before

    # Looking

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while the first backward passes send dense."""
        return None if self._job.decision is None else self._job.decision.plan

    @property
    def source(self) -> str:
        """The emitted step as Python source; empty before there is a plan."""
        return "" if self._job.program is None else self._job.program.source

    @property
    def timeline(self) -> Timeline | None:
        """The predicted step; None before there is a plan."""
        return None if self._job.program is None else self._job.program.timeline

    def report(self) -> str:
        """Explain the plan and the predicted step as text. Raises FxcompError before there is a plan."""
        if self._job.decision is None or self._job.program is None:
            raise FxcompError(
                "there is no plan yet: the first backward passes send dense, and tell when shards are ready.\n"
                "  Ask again after some steps, or name a plan."
            )
        return to_text(self._job.explanation())

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state of error feedback and compressors, with the plan; empty before there is one."""
        saved = self._job.state_dict()
        return {**saved, SHARD: list(self._place)} if saved else {}

    def checkpoint(self) -> dict[str, Tensor]:
        """This rank's state as plain tensors under names that no other rank of the job uses; empty without a plan.

        `fxcomp.read_checkpoint` reads it on as many shards, with any number of replicas.
        """
        saved = self.state_dict()
        return to_tensors(saved, compat.rank_in_job()) if saved else {}

    def load_state_dict(self, state: Given) -> None:
        """Take back what `state_dict` or `checkpoint` returned; every rank calls it, with a state of its own shard.

        Before the first backward pass the state waits for it, and its plan is followed from there on.
        """
        with self._ranks.together("comparing shards", after_a_stop=True):
            states = self._ranks.attempt("comparing shards", lambda: self._of_this_shard(state))
        self._job.load_state_dict(states or None)

    def _of_this_shard(self, state: Given) -> list[Any]:
        states = states_of(state)
        for each in states:
            saved: Any = each.get(SHARD) if hasattr(each, "get") else None
            if saved is None or tuple(saved) != self._place:
                number, count = self._place
                of = "no shard" if saved is None else f"shard {saved[0]} of {saved[1]}"
                raise BadState(
                    f"this state is of {of}; this rank holds shard {number} of {count}.\n"
                    "  Load what a rank with the same shard has saved; other numbers of shards begin without a state."
                )
        return states

    def close(self) -> None:
        """Give back the process groups; other ranks need not be there. The model's next backward pass raises."""
        self._job.close()
