"""Reduce the gradients of each bucket with one collective.

      %sum_1                     gradient    f32[4]            aten.sum.dim_IntList(%mul_1, [0])       fc.bias
    - %all_reduce_default        collective  f32[4]            all_reduce(%sum_1, avg, world)          fc.bias
    - %wait_tensor_default       wait        f32[4]            wait(%all_reduce_default)               fc.bias
      %mm                        gradient    f32[4,2]          aten.mm(%t_1, %x)                       fc.weight
    - %all_reduce_default_1      collective  f32[4,2]          all_reduce(%mm, avg, world)             fc.weight
    - %wait_tensor_default_1     wait        f32[4,2]          wait(%all_reduce_default_1)             fc.weight
    + %pack_0                    pack        f32[12]           pack([%sum_1, %mm], 1.0)
    + %all_reduce_0              collective  f32[12]           all_reduce(%pack_0, avg, world)
    + %wait_0                    wait        f32[12]           wait(%all_reduce_0)
    + %split_with_sizes_default  unpack      (f32[4], f32[8])  aten.split_with_sizes(%wait_0, [4, 8])
    + %getitem                   unpack      f32[4]            %split_with_sizes_default[0]            fc.bias
    + %view_default              unpack      f32[4]            aten.view(%getitem, [4])                fc.bias
    + %getitem_1                 unpack      f32[8]            %split_with_sizes_default[1]            fc.weight
    + %view_default_1            unpack      f32[4,2]          aten.view(%getitem_1, [4, 2])           fc.weight

A gradient may be cut into slices for several buckets. A single rank has no collectives.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp.errors import CaptureFailed
from fxcomp.graph.edit import call, collective_of, gradients, last_result, mean_of, wait_of
from fxcomp.graph.info import NodeInfo, Role, info, update_info
from fxcomp.graph.ops import ALL_REDUCE, PACK, WAIT
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, Plan, part_shape


def bucket_gradients(gm: GraphModule, plan: Plan) -> GraphModule:
    local = gradients(gm)
    if not any(collective_of(gradient) for gradient in local.values()):
        return gm
    values = {name: node.meta["val"] for name, node in local.items()}
    types = {name: ElementType.of(node.meta["val"].dtype, mean_of(node).dtype) for name, node in local.items()}
    plan.check_covers({name: value.numel() for name, value in values.items()}, types)
    parts = plan.parts
    found = {name: _PlacedGradient(gm.graph, name, node, parts[name]) for name, node in local.items()}
    order = {node: place for place, node in enumerate(gm.graph.nodes)}  # added nodes are not looked up
    for number, bucket in enumerate(plan.buckets):
        _gather_bucket(gm.graph, number, bucket, found, order)
    for name, gradient in found.items():
        if len(gradient.parts) > 1:
            gradient.join(gm.graph, plan.bucket_of(name), order)
        gm.graph.erase_node(gradient.wait)
        gm.graph.erase_node(gradient.reduction)
    return gm


class _PlacedGradient:
    """A rank's gradient, its parts, and the parts' means."""

    def __init__(self, graph: Graph, name: str, local: Node, extents: Sequence[range]) -> None:
        self.name, self.local = name, local
        self.reduction = _reduction(name, local)
        self.wait = wait_of(self.reduction)
        self.parts = {0: local} if len(extents) == 1 else _cut(graph, name, local, extents)
        self.arrived: dict[int, Node] = {}
        """Flat means of parts, by offset of the first element."""

    @property
    def last(self) -> Node:
        return next(reversed(self.parts.values()))

    def join(self, graph: Graph, number: int, order: Mapping[Node, int]) -> None:
        """Join the means of all parts; `number` is the bucket of the last mean."""
        parts = [self.arrived[start] for start in sorted(self.arrived)]
        label = NodeInfo(Role.UNPACK, self.name, bucket=number)
        with graph.inserting_before(min(self.wait.users, key=order.__getitem__)):
            joined = call(graph, torch.ops.aten.cat.default, (parts,), label)
            self.put_back(graph, joined, label)

    def put_back(self, graph: Graph, mean: Node, label: NodeInfo) -> None:
        value = self.wait.meta["val"]
        known = value if value.is_contiguous() else None
        shaped = call(graph, torch.ops.aten.view.default, (mean, list(value.shape)), label, value=known)
        self.wait.replace_all_uses_with(shaped)
        _scale_in_place(shaped)


def _cut(graph: Graph, name: str, local: Node, extents: Sequence[range]) -> dict[int, Node]:
    """Take parts of a gradient: whole rows if possible, else flat slices."""
    shape = local.meta["val"].shape
    found: dict[int, Node] = {}
    last, flat = last_result(local), None
    for extent in extents:
        label = NodeInfo(Role.PART, name, start=extent.start)
        shaped = part_shape(shape, extent)
        source, start, stop = local, extent.start, extent.stop
        if len(shaped) == len(shape) > 1:
            row = math.prod(shape[1:])
            start, stop = start // row, stop // row
        else:
            if flat is None:
                with graph.inserting_after(last):
                    last = flat = call(graph, torch.ops.aten.reshape.default, (local, [-1]), NodeInfo(Role.PART, name))
            source = flat
        with graph.inserting_after(last):
            last = call(graph, torch.ops.aten.slice.Tensor, (source, 0, start, stop), label)
        found[extent.start] = last
    return found


def _gather_bucket(
    graph: Graph, number: int, bucket: Bucket, found: Mapping[str, _PlacedGradient], order: Mapping[Node, int]
) -> None:
    members = [found[name] for name in bucket.names]
    own = [gradient.parts[start] for gradient, start in zip(members, bucket.starts, strict=True)]

    with graph.inserting_after(max((last_result(each.last) for each in members), key=order.__getitem__)):
        cast = {"dtype": torch.float32} if bucket.element_type.narrow is not None else {}
        label = NodeInfo(Role.PACK, bucket=number)
        pack = call(graph, PACK, (own, 1.0), label, name=f"pack_{number}", kwargs=cast)
    with graph.inserting_after(pack):
        label = NodeInfo(Role.COLLECTIVE, bucket=number)
        reduction = call(graph, ALL_REDUCE, (pack, "avg", "world"), label, name=f"all_reduce_{number}")
    with graph.inserting_before(min((user for each in members for user in each.wait.users), key=order.__getitem__)):
        wait = call(graph, WAIT, (reduction,), NodeInfo(Role.WAIT, bucket=number, stage=1), name=f"wait_{number}")
        unpack = NodeInfo(Role.UNPACK, bucket=number)
        pieces = call(graph, torch.ops.aten.split_with_sizes.default, (wait, list(bucket.sizes)), unpack)
        for index, (gradient, start) in enumerate(zip(members, bucket.starts, strict=True)):
            label = NodeInfo(Role.UNPACK, gradient.name, bucket=number)
            piece = call(graph, operator.getitem, (pieces, index), label)
            if len(gradient.parts) == 1:
                gradient.put_back(graph, piece, label)
            else:
                gradient.arrived[start] = piece


def _scale_in_place(gradient: Node) -> None:
    """Clip in place, because no node reads the unclipped mean later."""
    for user in gradient.users:
        if info(user).role is Role.CLIP and user.target is torch.ops.aten.mul.Tensor:
            user.target = torch.ops.aten.mul_.Tensor
            update_info(user, work=None)


def _reduction(name: str, gradient: Node) -> Node:
    reduction = collective_of(gradient)
    if reduction is None:
        raise CaptureFailed(
            f"the gradient of {name!r} never reaches a collective: replicas would drift apart.\n"
            "  Reduce it in the step, or let fxcomp insert the reduction."
        )
    return reduction
