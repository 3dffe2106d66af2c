"""Find the operators of updates that run over lists, so that parameters of one rule share what starting one takes.

    %mul_    update  f32[4,2]  mul_(%fc_weight_exp_avg, %beta)   fc.weight  ┐ one operator over a list of two
    %mul__1  update  f32[4]    mul_(%fc_bias_exp_avg, %beta)     fc.bias    ┘

The source is written by `codegen/foreach_source.py`, bucket by bucket. Here a rule's parameters are one list: what a
bucket more starts again is short beside a bucket's bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxcomp import compat
from fxcomp.graph.info import InputKind, Role, has_info, info

LISTED_ON_CPU = 2048
"""Elements of parameters that are updated at once on the CPU, where lists only save starting operators.

Measured, one core, torch 2.13, 2026-11, AdamW on 200 tensors: 3.3 instead of 5.3 ms at 256 elements in the larger ones,
9.3 instead of 10.2 at 4096, but 17.6 instead of 15.2 at 9216, where values between operators leave the cache.
"""


def update_lists(gm: GraphModule, most_elements: float) -> list[list[Node]]:
    """List the nodes that are one operator over a list; updates of tensors with more elements run alone."""
    updates: defaultdict[str | None, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if has_info(node) and info(node).role is Role.UPDATE and node.op == "call_function":
            updates[info(node).parameter].append(node)
    rules: defaultdict[Hashable, list[list[Node]]] = defaultdict(list)
    for nodes in updates.values():
        if _elements(nodes) <= most_elements:
            rules[_rule(nodes)].append(nodes)
    alike = (members for members in rules.values() if len(members) > 1)
    rows = (list(row) for members in alike for row in zip(*members, strict=True))
    return [row for row in rows if _has_list_form(row[0].target)]


def _elements(nodes: Sequence[Node]) -> float:
    """Count the elements of the largest tensor; endless for numbers of 16 bits on the CPU, which run alone there."""
    inputs = (each for node in nodes for each in (node, *node.all_input_nodes))
    tensors = [value for each in inputs if isinstance(value := each.meta.get("val"), Tensor)]
    is_narrow = any(v.is_floating_point() and v.itemsize < 4 and v.device.type == "cpu" for v in tensors)
    return math.inf if is_narrow else max((v.numel() for v in tensors), default=0)


def _rule(nodes: Sequence[Node]) -> Hashable:
    """Describe one parameter's update without its names and shapes."""
    places = {node: place for place, node in enumerate(nodes)}

    def described(node: Node) -> Any:
        if node in places:
            return f"value {places[node]}"
        source = info(node).source if has_info(node) else None
        if source is not None and source.kind is InputKind.HYPER:
            return f"number {node.name}"
        value = node.meta.get("val")
        kind = "gradient" if source is None else f"{source.kind} {source.key if source.kind is InputKind.STATE else ''}"
        return f"{kind} {value.dtype if isinstance(value, Tensor) else type(value)}"

    return tuple((str(node.target), repr(map_arg((node.args, node.kwargs), described))) for node in nodes)


def _has_list_form(target: Any) -> bool:
    return compat.is_operator(target) and hasattr(torch.ops.aten, f"_foreach_{compat.bare_name(target)}")


def shared_starts(lists: Sequence[Sequence[Node]], us: Mapping[Node, float], launch_us: float) -> dict[Node, float]:
    """Time the nodes of lists, by what each takes beside starting it: a list takes its sum, at least one start."""
    found: dict[Node, float] = {}
    for row in lists:
        total_us = sum(us[node] for node in row)
        more_us = max(0.0, launch_us - total_us) / len(row)
        found.update((node, us[node] + more_us) for node in row)
    return found
