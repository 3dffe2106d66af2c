"""Compress the gradients of a model that fully_shard shards over all ranks: plain FSDP over a slow network.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    scatter = fxcomp.compress_reduce_scatter(model, compress="balanced")

fully_shard still gathers parameters uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.frontends.planned_average import PlannedAverage
from fxcomp.frontends.scatter_job import ScatterJob
from fxcomp.frontends.scatter_plan import told_plan
from fxcomp.frontends.sharded_modules import ScatteredModule, scattered_modules
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.given import GivenPlan, is_path
from fxcomp.plan.plan import Plan
from fxcomp.ranks import Ranks


def compress_reduce_scatter(
    model: nn.Module,
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ShardScatter:
    """Compress the reduce-scatter of a sharded model's gradients.

    `model` went through `fully_shard` on a mesh of one dimension. Every rank of the mesh calls this, with the same
    options, before the first backward pass. `compress`, `cluster`, `costs` and `scaler` are as in `ddp_hook`. The
    gradients of a module form one bucket, so a pin applies to all of them. Low-rank compressors are not offered,
    because they need whole matrices.

    Raises Unsupported, BadOption, BadPlan and ReplicasDiffer.
    """
    options = StepOptions.of_gradients(
        compress, "which fully_shard leaves yours", cluster=cluster, costs=costs, scaler=scaler
    )
    options.compress.pinned.check_model(model)
    modules = scattered_modules(model)
    buckets = {f"the gradients of module {each.module.name!r}": each.bucket for each in modules}
    shapes = {name: shape for each in buckets.values() for name, shape in zip(each.names, each.shapes, strict=True)}
    facts = {what: bucket.facts for what, bucket in buckets.items()}
    with Ranks.meeting(cluster, "compress_reduce_scatter", modules[0].module.shard_group) as ranks:
        here = ModelHere(shapes, modules[0].module.device, facts)
        start = Start.of("compress_reduce_scatter", ranks, options, here)
        ranks.attempt("reading the plan", lambda: _check_plan(options.compress.plan, modules))
    job = ScatterJob(start, modules)
    if ranks.world_size > 1:
        if options.compress.plan is not None:
            job.decide(job.layout)
        job.install()
    return ShardScatter(job)


def _check_plan(given: GivenPlan | None, modules: Sequence[ScatteredModule]) -> None:
    """Raise if a plan does not fit. A plan's path is not checked, because only rank 0 must have the file."""
    if given is not None and (isinstance(given, Plan) or not is_path(given)):
        told_plan(given if isinstance(given, Plan) else str(given), modules)


class ShardScatter(PlannedAverage):
    """Result of `compress_reduce_scatter`: a plan with one bucket per module, and its state.

    Loading a state restores its plan, unless the options name a plan. The next pass adds loaded residuals of
    uncompressed modules to the modules' gradients.
    """
