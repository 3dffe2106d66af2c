"""Replace a parameter's update by the optimizer's fused operator, on an accelerator.

    - %add_         update  f32[]     aten.add_.Tensor(%weight_step, 1)                  weight
    - %mul_2        update  float     mul(%lr, %weight_decay)                            weight
    ...
    - %neg          update  float     neg(%truediv)                                      weight
    - %addcdiv_     update  f32[2,3]  aten.addcdiv_(%mul_, %lerp_, %add__1, value=%neg)  weight
    ...
    + %add__tensor  update  f32[]     aten.add_.Tensor(%weight_step, 1)                  weight

and aten._fused_adamw_([%weight], [%gradient], [%weight_exp_avg], [%weight_exp_avg_sq], [], [%add__tensor], ...).

The operator passes over memory once; `codegen/region_source.py` joins the parameters of a region. A step counter on
the host is incremented there and copied. Updates stay if they exchange momenta, if gradient and parameter differ in
layout, or if the parameter is fp16: small squares underflow in the traced operators but not in the fused operator, so
results would differ from the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.edit import call
from fxcomp.graph.info import FusedUpdate, InputKind, NodeInfo, Role, info, set_info
from fxcomp.graph.moments import NoMoment, Update, updates_of
from fxcomp.graph.ops import COUNTERS_ON

_aten = torch.ops.aten


def fuse_updates(gm: GraphModule) -> GraphModule:
    numbers = _live_numbers(gm)
    for name, update in updates_of(gm).items():
        parameter = update.parameter
        rule = info(parameter).fused if parameter is not None else None
        if parameter is None or rule is None or not compat.is_accelerator(parameter.meta["val"].device):
            continue
        fusion = _Fusion(gm, name, update, parameter, rule)
        if fusion.fits():
            fusion.run(numbers)
    return gm


def _live_numbers(gm: GraphModule) -> dict[tuple[int, str], Node]:
    sources = ((node, info(node).source) for node in gm.graph.find_nodes(op="placeholder"))
    return {(s.index, s.key): node for node, s in sources if s is not None and s.kind is InputKind.HYPER}


class _Fusion:
    def __init__(self, gm: GraphModule, name: str, update: Update, parameter: Node, rule: FusedUpdate) -> None:
        self._graph, self._rule = gm.graph, rule
        self._label = NodeInfo(Role.UPDATE, name)
        self._parameter = parameter
        self._nodes = list(update.nodes)
        self._states = {source.key: node for node in update.states if (source := info(node).source) is not None}
        if self._nodes[0].target is _aten.clamp.default:  # clipping by value stays and computes the gradient
            self._gradient: Node | None = self._nodes.pop(0)
        else:
            self._gradient = _gradient_of(update)

    def fits(self) -> bool:
        """Return False if the update is fused already, is in fp16, lacks a tensor, or mixes layouts."""
        if any(node.target is self._rule.operator for node in self._nodes):
            return False
        if self._parameter.meta["val"].dtype is torch.float16:
            return False
        wanted = [key for key in (*self._rule.states, self._rule.counter) if key]
        if self._gradient is None or any(key not in self._states for key in wanted):
            return False
        return _lie_alike([self._parameter, self._gradient, *(self._states[key] for key in self._rule.states if key)])

    def run(self, numbers: Mapping[tuple[int, str], Node]) -> None:
        rule, after = self._rule, self._nodes[-1].next
        for node in reversed(self._nodes):
            self._graph.erase_node(node)
        states: list[list[Any]] = [[self._states[key]] if key else [] for key in rule.states]
        with self._graph.inserting_before(after):
            counted = [self._counted(self._states[rule.counter])] if rule.counter else []
            arguments = ([self._parameter], [self._gradient], *states, *counted)
            keywords: dict[str, Any] = {
                name: numbers[rule.group, key] if isinstance(key, str) else key for name, key in rule.numbers
            }
            fused = self._graph.create_node("call_function", rule.operator, arguments, keywords)
        fused.meta["val"] = None
        set_info(fused, self._label)

    def _counted(self, counter: Node) -> Any:
        """Increment the counter. Return it in a list, on the parameter's device."""
        value, device = counter.meta["val"], self._parameter.meta["val"].device
        counted = call(self._graph, _aten.add_.Tensor, (counter, 1), self._label, value=value)
        if value.device == device:
            return [counted]
        given = [counted], [self._parameter]
        return call(self._graph, COUNTERS_ON, given, self._label, value=[compat.fake_on(value, device)])


def _gradient_of(update: Update) -> Node | None:
    try:
        return update.gradient()
    except NoMoment:
        return None


def _lie_alike(nodes: list[Node]) -> bool:
    """Return whether tensors share type, device and a contiguous layout."""
    values: list[Tensor] = [node.meta["val"] for node in nodes]
    first = values[0]
    alike = (v.dtype is first.dtype and v.stride() == first.stride() and v.device == first.device for v in values)
    return first.is_contiguous() and all(alike)
