"""Average gradients over the replicas of a sharded model, by a plan: HSDP with a compressed slow link.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    outer = fxcomp.average_replicas(model, mesh["replicate"], compress="balanced")

fully_shard reduces gradients within a replica, dense. A plan (`hook_job.py`) averages each shard over the replicas.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption, BadState, Unsupported
from fxcomp.frontends.hook_job import HookJob
from fxcomp.frontends.hook_program import Wrapped
from fxcomp.frontends.planned_average import PlannedAverage
from fxcomp.frontends.shard_feed import ShardFeed
from fxcomp.frontends.sharded_modules import called, checked_modules
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.ranks import Ranks
from fxcomp.state.checkpoint import NOTHING_YET, states_of
from fxcomp.state.checksums import sealed
from fxcomp.state.fields import SHARD
from fxcomp.state.saved_state import Given


def average_replicas(
    model: nn.Module,
    replicas: Any,
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ReplicaAverage:
    """Average the gradients of a model over the replicas of its shards.

    `model` went through `fully_shard(..., mesh=mesh["shard"])`. `replicas` is `mesh["replicate"]` or its process group:
    the ranks with the same shard. Every rank calls this with the same options, after parameters have their values and
    before the first backward pass. All replicas start with the first replica's values. `compress`, `cluster`, `costs`
    and `scaler` are as in `ddp_hook`; sizes are per shard.

    Raises BadOption, BadPlan, ReplicasDiffer, and Unsupported, for example if fully_shard got a mesh of two dimensions
    and averages over replicas itself.
    """
    options = StepOptions.of_gradients(
        compress, "which fully_shard leaves yours", cluster=cluster, costs=costs, scaler=scaler, process_group=replicas
    )
    with Ranks.meeting(cluster, "average_replicas", replicas) as ranks:
        modules = ranks.attempt("looking at the model", lambda: _averaged_modules(model, options, ranks))
        beside = modules[0].shard_group
        place = beside.rank(), beside.size()
        # A stand-in is a meta tensor with the shape of this rank's part of a parameter.
        stand_ins = [[torch.empty(shape, device="meta") for shape in module.shapes] for module in modules]
        named = list(zip(chain(*stand_ins), chain(*(module.names for module in modules)), strict=True))
        shapes = {name: tuple(stand_in.shape) for stand_in, name in named}
        facts = {"the number of this rank's shard": list(place)}
        facts |= {f"the shard of {name!r}": list(shape) for name, shape in shapes.items()}
        parts = map(compat.local_part, (*model.parameters(), *model.buffers()))
        values = [part for part in parts if part.numel()]
        device = compat.local_part(modules[0].parameters[0]).device
        here = ModelHere(shapes, device, facts, values, beside=beside)
        start = Start.of("average_replicas", ranks, options, here)
    wrapped = Wrapped({id(stand_in): name for stand_in, name in named}, shapes, finds_unused=False)
    job = HookJob(start, wrapped)
    feed = ShardFeed(modules, stand_ins, job)
    if ranks.world_size > 1:
        feed.install()
    return ReplicaAverage(job, feed, place)


def _averaged_modules(model: nn.Module, options: StepOptions, ranks: Ranks) -> list[compat.ShardedModule]:
    modules = checked_modules(model, "average_replicas")
    for module in modules:
        _check_module(module)
    _check_all_are_sharded(model, modules)
    options.compress.pinned.check_model(model)
    same = compat.group_ranks(modules[0].shard_group)
    both = [] if ranks.members is None else sorted(set(same) & set(ranks.members.numbers))
    if len(both) > 1:
        raise BadOption(
            f"ranks {', '.join(map(str, both))} hold different shards, and average_replicas was given them as"
            ' replicas.\n  Pass the other dimension of the mesh: mesh["replicate"]. A model that is sharded over'
            " all ranks has no replicas: make a mesh of two dimensions."
        )
    return modules


def _check_module(module: compat.ShardedModule) -> None:
    if module.divides_afterwards:
        raise Unsupported(
            f"{called(module)} has a divisor of its own for gradients (set_gradient_divide_factor, or sums that are"
            " forced); the mean over replicas would be divided again.\n  Leave it out, and scale the loss."
        )
    if module.offloads:
        raise Unsupported(
            f"{called(module)} offloads its parameters to the CPU, so gradients leave the device before they are"
            " averaged.\n  Call fully_shard without CPUOffloadPolicy."
        )


def _check_all_are_sharded(model: nn.Module, modules: Sequence[compat.ShardedModule]) -> None:
    sharded = {name for module in modules for name in module.names}
    other = [name for name, each in model.named_parameters() if each.requires_grad and name not in sharded]
    if other:
        raise Unsupported(
            f"the parameter {other[0]!r} is trained and not sharded, so its gradient is not averaged.\n"
            "  Call fully_shard for the whole model last, without ignored_params, or set requires_grad=False."
        )


class ReplicaAverage(PlannedAverage):
    """Result of `average_replicas`: the plan in force and its state."""

    def __init__(self, job: HookJob, feed: ShardFeed, place: tuple[int, int]):
        super().__init__(job)
        self._feed, self._ranks, self._place = feed, job.site.ranks, place

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients inside the context, without averaging. The next pass outside averages the sums.

        The sums are shards, smaller than the whole gradients that `set_requires_gradient_sync(False)` accumulates.
        """
        before, self._feed.is_off = self._feed.is_off, True
        try:
            yield
        finally:
            self._feed.is_off = before

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with the plan and the shard's index."""
        saved = super().state_dict()
        return saved if {SHARD, NOTHING_YET} & saved.keys() else sealed({**saved, SHARD: list(self._place)})

    def load_state_dict(self, state: Given) -> None:
        """Restore a `state` of the same shard. Must run on every rank."""
        with self._ranks.together("comparing shards", after_a_stop=True):
            states = self._ranks.attempt("comparing shards", lambda: self._of_this_shard(state))
        super().load_state_dict(states)

    def _of_this_shard(self, state: Given) -> list[Any]:
        states = states_of(state)
        for each in states:
            saved: Any = each.get(SHARD)
            if saved is None or tuple(saved) != self._place:
                number, count = self._place
                of = "no shard" if saved is None else f"shard {' of '.join(map(str, saved))}"
                raise BadState(
                    f"this state is of {of}; this rank holds shard {number} of {count}.\n"
                    "  Load the state of a rank with the same shard; other numbers of shards begin without a state."
                )
        return states
