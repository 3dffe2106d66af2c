"""Describe the gradients of modules that fully_shard scatters: what a plan calls them, and how their parts lie.

    gradients of a module     part of rank 0              part of rank 1
                              0.weight 0.bias + padding   0.weight 0.bias + padding

Every part has the same number of elements: a parameter is cut along its rows, and zeros fill the last part up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.errors import BadPlan, Unsupported
from fxcomp.frontends.hook_program import DdpBucket
from fxcomp.frontends.sharded_modules import called, checked_modules
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.legs import row_shards
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.search.by_module import SCATTERED, scattered_by


@dataclass(frozen=True, slots=True)
class ScatteredModule:
    """The gradients of one module, of which each rank gets a part."""

    module: compat.ShardedModule
    ranks: int

    @property
    def elements(self) -> int:
        """The elements of all parts, with the padding."""
        return self.ranks * self.module.elements

    @property
    def bucket(self) -> DdpBucket:
        """The gradients as a communication hook is given them: whole, without padding."""
        shapes = self.module.whole_shapes
        return DdpBucket(self.module.names, shapes, tuple(map(prod, shapes)), self.module.reduced_as)

    @property
    def parts(self) -> DdpBucket:
        """The gradients as fully_shard hands them over: the parts of each rank in turn."""
        names = self.module.names
        found = row_shards(self.module.whole_shapes, self.ranks)
        sizes = tuple(len(extent) for _, extent in found)
        labels = tuple(f"{names[k]}[{extent.start}:{extent.stop}]" for k, extent in found)
        return DdpBucket(labels, tuple((size,) for size in sizes), sizes, self.module.reduced_as)

    def planned(self, strategy: Strategy = SCATTERED) -> Bucket:
        """Make its bucket of a plan."""
        bucket = self.bucket
        return Bucket(bucket.names, bucket.sizes, strategy, element_type=ElementType.of(bucket.dtype))

    def in_parts(self, parameters: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Lay flat parameters out in parts; zeros stand for those that are not there."""
        found = torch.zeros(self.elements, device=device)
        sizes = self.parts.sizes
        for (k, extent), part in zip(
            row_shards(self.module.whole_shapes, self.ranks), found.split_with_sizes(sizes), strict=True
        ):
            if (whole := parameters.get(self.module.names[k])) is not None:
                mine = whole[extent.start : extent.stop]
                part[: mine.numel()] = mine
        return found

    @property
    def has_only_vectors(self) -> bool:
        return all(len(shape) <= 1 for shape in self.module.whole_shapes)


def scattered_modules(model: nn.Module) -> list[ScatteredModule]:
    """Find the modules of a model that fully_shard scatters the gradients of. Raises what says why one cannot be."""
    modules = checked_modules(model, "compress_reduce_scatter")
    for module in modules:
        _check(module)
    return [ScatteredModule(module, compat.group_size(module.shard_group)) for module in modules]


def _check(module: compat.ShardedModule) -> None:
    if not module.scatters_by_default:
        raise Unsupported(
            f"{called(module)} scatters its gradients by a collective of somebody else's: set_custom_reduce_scatter,"
            " symmetric memory, or an earlier compress_reduce_scatter.\n  Keep one of them; call it once a model."
        )
    if any(module.cut_dimensions):
        name = next(name for name, d in zip(module.names, module.cut_dimensions, strict=True) if d)
        raise Unsupported(
            f"the parameter {name!r} is cut along another dimension than its first.\n"
            "  Leave shard_placement_fn out, or keep the module's gradients dense by not calling this."
        )


def told_plan(plan: Plan | str, modules: Sequence[ScatteredModule]) -> Plan:
    """Follow what the user said for every module: the same way for all, or a plan's. Raises BadPlan.

    Modules of vectors alone, such as a norm's, stay dense where a compressor is named, as elsewhere.
    """
    dense = Plan(tuple(each.planned() for each in modules))
    if isinstance(plan, str):
        way = scattered_by(plan)
        return dense.with_strategies([SCATTERED if each.has_only_vectors else way for each in modules])
    known = {frozenset(bucket.names): bucket for bucket in plan.buckets}
    wrong = next((each for each in dense.buckets if frozenset(each.names) not in known), None)
    if wrong is not None or len(known) != len(modules):
        what = f"{wrong.names[0]!r} and what is scattered with it" if wrong else "every module once"
        raise BadPlan(
            f"the plan has no bucket of {what}: fully_shard scatters the gradients of a module together.\n"
            "  Save a plan with compress_reduce_scatter(model, ...).plan.save(path), or name one compressor."
        )
    plan.check_covers(dense.sizes, dense.types)
    return plan.with_strategies([scattered_by(str(bucket.strategy)) for bucket in plan.buckets])
