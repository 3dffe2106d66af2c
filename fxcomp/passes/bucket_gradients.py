"""Send the gradients of a bucket as one.

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

One rank alone has no collectives, and keeps its gradients as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from fxcomp.errors import UnsynchronizedGradient
from fxcomp.graph.edit import call, collective_of, gradients, wait_of
from fxcomp.graph.info import NodeInfo, Role, info, update_info
from fxcomp.graph.ops import ALL_REDUCE, PACK, WAIT
from fxcomp.plan.plan import Bucket, Plan


def bucket_gradients(gm: GraphModule, plan: Plan) -> GraphModule:
    local = gradients(gm)
    if not any(collective_of(gradient) for gradient in local.values()):
        return gm
    plan.check_covers({name: node.meta["val"].numel() for name, node in local.items()})
    order = {node: place for place, node in enumerate(gm.graph.nodes)}  # what one bucket adds is nothing to the next
    for number, bucket in enumerate(plan.buckets):
        _gather_bucket(gm.graph, number, bucket, local, order)
    return gm


def _gather_bucket(
    graph: Graph, number: int, bucket: Bucket, local: Mapping[str, Node], order: Mapping[Node, int]
) -> None:
    own = [local[name] for name in bucket.names]
    old = {name: _reduction(name, local[name]) for name in bucket.names}
    waits = {name: wait_of(reduction) for name, reduction in old.items()}

    with graph.inserting_after(max(own, key=order.__getitem__)):
        pack = call(graph, PACK, (own, 1.0), NodeInfo(Role.PACK, bucket=number), name=f"pack_{number}")
    with graph.inserting_after(pack):
        label = NodeInfo(Role.COLLECTIVE, bucket=number)
        reduction = call(graph, ALL_REDUCE, (pack, "avg", "world"), label, name=f"all_reduce_{number}")
    with graph.inserting_before(min((user for wait in waits.values() for user in wait.users), key=order.__getitem__)):
        wait = call(graph, WAIT, (reduction,), NodeInfo(Role.WAIT, bucket=number, stage=1), name=f"wait_{number}")
        unpack = NodeInfo(Role.UNPACK, bucket=number)
        pieces = call(graph, torch.ops.aten.split_with_sizes.default, (wait, list(bucket.sizes)), unpack)
        for index, (name, gradient) in enumerate(zip(bucket.names, own, strict=True)):
            label = NodeInfo(Role.UNPACK, name, bucket=number)
            piece = call(graph, operator.getitem, (pieces, index), label)
            value = gradient.meta["val"]
            known = value if value.is_contiguous() else None
            shaped = call(graph, torch.ops.aten.view.default, (piece, list(value.shape)), label, value=known)
            waits[name].replace_all_uses_with(shaped)
            _scale_in_place(shaped)
    for name in bucket.names:
        graph.erase_node(waits[name])
        graph.erase_node(old[name])


def _scale_in_place(gradient: Node) -> None:
    """Clip where the gradient lies: the bucket is ours, and the unscaled gradient has no other user."""
    for user in gradient.users:
        if info(user).role is Role.CLIP and user.target is torch.ops.aten.mul.Tensor:
            user.target = torch.ops.aten.mul_.Tensor
            update_info(user, work=None)


def _reduction(name: str, gradient: Node) -> Node:
    reduction = collective_of(gradient)
    if reduction is None:
        raise UnsynchronizedGradient(
            f"the gradient of {name!r} never reaches a collective: replicas would drift apart.\n"
            "  Reduce it in the step, or let fxcomp insert the reduction."
        )
    return reduction
