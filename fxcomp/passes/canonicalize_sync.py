"""Bring every gradient's reduction into one form: gradient, collective, wait.

      %mm                     gradient    f32[4,2]  aten.mm(%t_1, %x)                                     fc.weight
    - %sub_                   update      f32[4,2]  aten.sub_.Tensor(%fc_weight, %mm)                     fc.weight
    + %all_reduce_default_1   collective  f32[4,2]  all_reduce(%mm, avg, world)                           fc.weight
    + %wait_tensor_default_1  wait        f32[4,2]  wait(%all_reduce_default_1)                           fc.weight
    + %sub_                   update      f32[4,2]  aten.sub_.Tensor(%fc_weight, %wait_tensor_default_1)  fc.weight

A mean over all ranks is inserted where the user reduces nothing. A reduction by the user is kept: a sum divided by the
number of ranks becomes a mean. A single rank needs no reduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp.errors import Unsupported
from fxcomp.graph.edit import call, collective_of, gradients, last_result, result_of, wait_of
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.ops import ALL_REDUCE, WAIT

WORLD = "world"


def canonicalize_sync(gm: GraphModule, world_size: int) -> GraphModule:
    if world_size == 1:
        return gm
    last: dict[Node, Node] = {}  # collectives follow all results of an operator
    for name, gradient in gradients(gm).items():
        reduction = collective_of(gradient)
        if reduction is None:
            source = result_of(gradient) or gradient
            last[source] = _insert_mean(gm, gradient, name, last.get(source) or last_result(gradient))
        else:
            _adopt(gm, reduction, name, world_size)
    return gm


def _insert_mean(gm: GraphModule, gradient: Node, name: str, after: Node) -> Node:
    users, value = list(gradient.users), gradient.meta["val"]
    with gm.graph.inserting_after(after):
        reduction = call(gm.graph, ALL_REDUCE, (gradient, "avg", WORLD), NodeInfo(Role.COLLECTIVE, name), value=value)
    with gm.graph.inserting_after(reduction):
        wait = call(gm.graph, WAIT, (reduction,), NodeInfo(Role.WAIT, name), value=value)
    for user in users:
        user.replace_input_with(gradient, wait)
    return wait


def _adopt(gm: GraphModule, reduction: Node, name: str, world_size: int) -> None:
    operation = str(reduction.args[1])
    if reduction.target is not ALL_REDUCE or operation not in ("sum", "avg"):
        raise Unsupported(
            f"the gradient of {name!r} goes through {reduction.target} ({operation}); only an all_reduce with sum or"
            " avg over all ranks can be rewritten.\n  Leave the reduction out: fxcomp inserts it."
        )
    reduction.args = (reduction.args[0], "avg", WORLD)
    if operation == "sum":
        _drop_division(gm, wait_of(reduction), name, world_size)


def _drop_division(gm: GraphModule, wait: Node, name: str, world_size: int) -> None:
    users = list(wait.users)
    division = users[0] if len(users) == 1 else None
    factor: dict[Any, float] = {torch.ops.aten.div.Tensor: 1 / world_size, torch.ops.aten.mul.Tensor: world_size}
    arguments: Any = division.args if division is not None else ()
    if division is None or division.target not in factor or arguments[1] * factor[division.target] != 1:
        raise Unsupported(
            f"the gradient of {name!r} is summed over the ranks and not divided by their number, {world_size}.\n"
            "  Reduce with 'avg', or divide the sum right after its wait."
        )
    division.replace_all_uses_with(wait)
    gm.graph.erase_node(division)
