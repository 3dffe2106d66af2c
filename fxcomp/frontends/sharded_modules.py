"""Find and check the modules of a model under fully_shard, and describe their gradients.

    gradients of a module     part of rank 0              part of rank 1
                              0.weight 0.bias + padding   0.weight 0.bias + padding

All parts have equal size: parameters are cut along rows, and the last part is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.errors import BadOption, Unsupported
from fxcomp.frontends.hook_program import DdpBucket
from fxcomp.plan.kinds import ElementType, check_is_trainable
from fxcomp.plan.legs import row_shards
from fxcomp.plan.plan import Bucket
from fxcomp.plan.strategy import Strategy
from fxcomp.search.by_module import SCATTERED


def checked_modules(model: nn.Module, caller: str) -> list[compat.ShardedModule]:
    """Return the modules under fully_shard. `caller` appears in messages. Raises BadOption and Unsupported."""
    modules = compat.sharded_modules(model)
    if not modules:
        raise BadOption(
            f"{caller} has found nothing that is sharded and trained in this model.\n"
            "  Call fully_shard for it first; models that are not sharded take fxcomp.ddp_hook or fxcomp.compile_step."
        )
    for module in modules:
        _check(module, caller)
    first = compat.group_ranks(modules[0].shard_group)
    if any(compat.group_ranks(module.shard_group) != first for module in modules):
        raise Unsupported(
            "modules of this model are sharded over different ranks.\n  Pass one mesh to every fully_shard."
        )
    return modules


def called(module: compat.ShardedModule) -> str:
    return f"module {module.name!r}" if module.name else "the outermost module"


def _check(module: compat.ShardedModule, caller: str) -> None:
    if module.is_replicated:
        raise Unsupported(
            f"{called(module)} is sharded over a mesh of two dimensions: fully_shard sums over its replicas, dense,"
            " before anything can be compressed.\n"
            '  Call fully_shard(..., mesh=mesh["shard"]), and fxcomp.average_replicas(model, mesh["replicate"]).'
        )
    for name, parameter, shape in zip(module.names, module.parameters, module.whole_shapes, strict=True):
        if 0 in shape:
            raise Unsupported(
                f"the parameter {name!r} has no elements, {list(shape)}: fully_shard raises an error when it reduces"
                f" its gradient.\n  Call .requires_grad_(False) for it before fully_shard and {caller}."
            )
        if parameter.is_meta:
            raise Unsupported(
                f"the parameter {name!r} has no values yet (device meta).\n"
                f"  Call model.to_empty(device=...) and initialise it before {caller}."
            )
        check_is_trainable(name, parameter.dtype)


# Gradients that are scattered


@dataclass(frozen=True, slots=True)
class ScatteredModule:
    """Gradients of one module, reduce-scattered over the ranks."""

    module: compat.ShardedModule
    ranks: int

    @property
    def elements(self) -> int:
        """Number of elements of all parts, including padding."""
        return self.ranks * self.module.elements

    @property
    def bucket(self) -> DdpBucket:
        """Unsharded gradients, without padding."""
        shapes = self.module.whole_shapes
        return DdpBucket(self.module.names, shapes, tuple(map(prod, shapes)), self.module.reduced_as)

    @property
    def parts(self) -> DdpBucket:
        """Parts in rank order, as fully_shard lays them out."""
        names = self.module.names
        found = row_shards(self.module.whole_shapes, self.ranks)
        sizes = tuple(len(extent) for _, extent in found)
        labels = tuple(f"{names[k]}[{extent.start}:{extent.stop}]" for k, extent in found)
        return DdpBucket(labels, tuple((size,) for size in sizes), sizes, self.module.reduced_as)

    def planned(self, strategy: Strategy = SCATTERED) -> Bucket:
        bucket = self.bucket
        return Bucket(bucket.names, bucket.sizes, strategy, element_type=ElementType.of(bucket.dtype))

    def in_parts(self, parameters: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Copy flat values by parameter name into parts. Missing parameters are zero."""
        found = torch.zeros(self.elements, device=device)
        sizes = self.parts.sizes
        for (k, extent), part in zip(
            row_shards(self.module.whole_shapes, self.ranks), found.split_with_sizes(sizes), strict=True
        ):
            if (whole := parameters.get(self.module.names[k])) is not None:
                mine = whole[extent.start : extent.stop]
                part[: mine.numel()] = mine
        return found


def scattered_modules(model: nn.Module) -> list[ScatteredModule]:
    """Return the modules whose gradients fully_shard scatters. Raises Unsupported and BadOption."""
    modules = checked_modules(model, "compress_reduce_scatter")
    for module in modules:
        _check_is_scattered(module)
    return [ScatteredModule(module, module.shard_group.size()) for module in modules]


def _check_is_scattered(module: compat.ShardedModule) -> None:
    if not module.scatters_by_default:
        raise Unsupported(
            f"{called(module)} scatters its gradients by another custom collective: set_custom_reduce_scatter,"
            " symmetric memory, or an earlier compress_reduce_scatter.\n  Keep one of them; call it once a model."
        )
    if any(module.cut_dimensions):
        name = next(name for name, d in zip(module.names, module.cut_dimensions, strict=True) if d)
        raise Unsupported(
            f"the parameter {name!r} is cut along another dimension than its first.\n"
            "  Leave shard_placement_fn out, or keep the module's gradients dense by not calling this."
        )
