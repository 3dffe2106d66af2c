"""Describe the gradients of modules that fully_shard scatters: what a plan calls them, and how their parts lie.

    gradients of a module     part of rank 0              part of rank 1
                              0.weight 0.bias + padding   0.weight 0.bias + padding

Every part has the same number of elements: a parameter is cut along its rows, and zeros fill the last part up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.errors import BadPlan, UnsupportedFeature
from fxcomp.frontends.hook_program import DdpBucket
from fxcomp.frontends.sharded_modules import called, checked_modules
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.search.by_module import SCATTERED, scattered_by


@dataclass(frozen=True, slots=True)
class ScatteredModule:
    """The gradients of one module, of which each rank gets a part."""

    module: compat.ShardedModule
    ranks: int

    @property
    def segments(self) -> tuple[int, ...]:
        """The elements of each parameter in a rank's part, padding included; an empty one has none."""
        return tuple(size for size in self._parts if size)

    @property
    def part(self) -> int:
        """The elements of a rank's part."""
        return self.module.elements

    @property
    def elements(self) -> int:
        """The elements of all parts."""
        return self.ranks * self.part

    @property
    def bucket(self) -> DdpBucket:
        """The same gradients as a communication hook is given them: whole, without padding."""
        shapes = self.module.whole_shapes
        return DdpBucket(self.module.names, shapes, tuple(map(prod, shapes)), self.module.reduced_as)

    def planned(self) -> Bucket:
        """Make its bucket of a dense plan."""
        bucket = self.bucket
        return Bucket(bucket.names, bucket.sizes, SCATTERED, element_type=ElementType.of(bucket.dtype))

    def by_parameter(self, values: Tensor) -> dict[str, Tensor]:
        """Copy what lies in parts as flat parameters, without padding."""
        rows = values.view(self.ranks, self.part).split_with_sizes(self._parts, dim=1)
        sizes = map(prod, self.module.whole_shapes)
        names = self.module.names
        return {name: row.reshape(-1)[:size].clone() for name, row, size in zip(names, rows, sizes, strict=True)}

    def in_parts(self, parameters: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Lay flat parameters out in parts; zeros stand for those that are not there."""
        found = torch.zeros(self.ranks, self.part, device=device)
        for name, columns in zip(self.module.names, found.split_with_sizes(self._parts, dim=1), strict=True):
            if name in parameters:
                whole = found.new_zeros(columns.numel())
                whole[: parameters[name].numel()] = parameters[name]
                columns.copy_(whole.view(columns.shape))
        return found.view(-1)

    @property
    def _parts(self) -> list[int]:
        return [prod(shape) for shape in self.module.shapes]


def scattered_modules(model: nn.Module) -> list[ScatteredModule]:
    """Find the modules of a model that fully_shard scatters the gradients of. Raises what says why one cannot be."""
    modules = checked_modules(model, "compress_reduce_scatter")
    for module in modules:
        _check(module)
    return [ScatteredModule(module, compat.group_size(module.shard_group)) for module in modules]


def _check(module: compat.ShardedModule) -> None:
    if not module.scatters_by_default:
        raise UnsupportedFeature(
            f"{called(module)} scatters its gradients by a collective of somebody else's: set_custom_reduce_scatter,"
            " symmetric memory, or an earlier compress_reduce_scatter.\n  Keep one of them; call it once a model."
        )
    if any(module.cut_dimensions):
        name = next(name for name, d in zip(module.names, module.cut_dimensions, strict=True) if d)
        raise UnsupportedFeature(
            f"the parameter {name!r} is cut along another dimension than its first.\n"
            "  Leave shard_placement_fn out, or keep the module's gradients dense by not calling this."
        )


def told_plan(plan: Plan | str, modules: Sequence[ScatteredModule]) -> Plan:
    """Follow what the user said for every module: the same way for all, or a plan's. Raises BadPlan.

    Modules of vectors alone, such as a norm's, stay dense where a compressor is named, as elsewhere.
    """
    dense = [each.planned() for each in modules]
    if isinstance(plan, str):
        way = scattered_by(plan)
        chosen = [SCATTERED if _has_only_vectors(each) else way for each in modules]
        return Plan(tuple(dense)).with_strategies(chosen)
    known = {frozenset(bucket.names): bucket for bucket in plan.buckets}
    wrong = next((each for each in dense if frozenset(each.names) not in known), None)
    if wrong is not None or len(known) != len(dense):
        what = f"{wrong.names[0]!r} and what is scattered with it" if wrong else "every module once"
        raise BadPlan(
            f"the plan has no bucket of {what}: fully_shard scatters the gradients of a module together.\n"
            "  Save a plan with compress_reduce_scatter(model, ...).plan.save(path), or name one compressor."
        )
    for bucket in plan.buckets:
        scattered_by(str(bucket.strategy))
    plan.check_covers(*_facts(dense))
    return plan


def _has_only_vectors(module: ScatteredModule) -> bool:
    return all(len(shape) <= 1 for shape in module.module.whole_shapes)


def _facts(buckets: Sequence[Bucket]) -> tuple[dict[str, int], dict[str, Any]]:
    whole = Plan(tuple(buckets))
    return whole.sizes, whole.types
