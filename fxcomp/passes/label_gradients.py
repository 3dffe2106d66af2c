"""Give every node a role, and the lines of one gradient its parameter's name.

      %mul          gradient    f32[4]  aten.mul.Tensor(%x, 1.0)      fc.weight
    - %all_reduce   ?           f32[4]  all_reduce(%mul, avg, world)
    - %wait_tensor  ?           f32[4]  wait(%all_reduce)
    + %all_reduce   collective  f32[4]  all_reduce(%mul, avg, world)  fc.weight
    + %wait_tensor  wait        f32[4]  wait(%all_reduce)             fc.weight

Capture has labelled inputs, gradients and updates.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import NodeInfo, Role, has_info, info, set_info
from fxcomp.graph.ops import WAIT


def label_gradients(gm: GraphModule) -> GraphModule:
    for node in gm.graph.nodes:
        if not has_info(node):
            set_info(node, NodeInfo(_role(node), parameter=_parameter(node)))
    return gm


def _role(node: Node) -> Role:
    if node.op == "output":
        return Role.OUTPUT
    if node.op == "placeholder":
        return Role.INPUT
    if is_collective(node):
        return Role.COLLECTIVE
    return Role.WAIT if node.target is WAIT else Role.COMPUTE


def _parameter(node: Node) -> str | None:
    source = node.args[0] if is_collective(node) or node.target is WAIT else None
    if isinstance(source, Node) and info(source).role in (Role.GRADIENT, Role.COLLECTIVE):
        return info(source).parameter
    return None
