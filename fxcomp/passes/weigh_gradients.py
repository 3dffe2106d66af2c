"""Divide gradients by the number of elements that the losses of all ranks and micro-batches sum over.

      %counted             compute     f64[1]    aten.add_.Tensor(%count, %count_nonzero)
    + %all_reduce_count    count       f64[1]    all_reduce(%counted, sum, world)
    + %wait_count          count       f64[1]    wait(%all_reduce_count)
    + %reciprocal_default  compute     f64[1]    aten.reciprocal(%wait_count)
    + %mul_tensor          compute     f64[1]    aten.mul.Tensor(%reciprocal_default, 2)
    + %share               compute     f32[]     aten.view(%_to_copy_default, [])
      %mul                 gradient    f32[4]    aten.mul.Tensor(%x, 1.0)             w
    - %pack_0              pack        f32[4]    pack([%mul], 1.0)
    + %pack_0              pack        f32[4]    pack([%mul], 1.0, factor=%share)

%share is ranks / count, because the mean over ranks follows. It is applied before compression, so
residuals are in units of the mean gradient. A count of zero makes gradients zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp.graph.edit import SHARE, call, count_of, gradients, multiply_gradients
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.ops import ALL_REDUCE, WAIT

_aten = torch.ops.aten


def weigh_gradients(gm: GraphModule, world_size: int) -> GraphModule:
    counted, local = count_of(gm), gradients(gm)
    if counted is None or not local:
        return gm
    everywhere = counted if world_size == 1 else _sum_over_ranks(gm, counted, next(iter(local.values())))
    multiply_gradients(gm, _share(gm, everywhere, world_size), "weighed")
    return gm


def _sum_over_ranks(gm: GraphModule, counted: Node, first: Node) -> Node:
    label, value = NodeInfo(Role.COUNT), counted.meta["val"]
    with gm.graph.inserting_after(counted):
        what = (counted, "sum", "world")
        collective = call(gm.graph, ALL_REDUCE, what, label, name="all_reduce_count", value=value)
    with gm.graph.inserting_before(first):
        return call(gm.graph, WAIT, (collective,), label, name="wait_count", value=value)


def _share(gm: GraphModule, count: Node, world_size: int) -> Node:
    """Compute the factor of all gradients, in fp32; 0 for a count of 0."""
    last = count

    def then(target: Any, *arguments: Any, name: str | None = None, **keywords: Any) -> Node:
        nonlocal last
        with gm.graph.inserting_after(last):
            last = call(gm.graph, target, arguments, NodeInfo(Role.COMPUTE), name=name, kwargs=keywords)
        return last

    share = then(_aten.mul.Tensor, then(_aten.reciprocal.default, count), world_size)
    share = then(_aten.where.ScalarOther, then(_aten.gt.Scalar, count, 0), share, 0.0)
    return then(_aten.view.default, then(_aten._to_copy.default, share, dtype=torch.float32), [], name=SHARE)
