"""Put a step that was captured on the CPU on a device that is not here: the step that an accelerator would be given.

Tracing with fake tensors of a device ends in an abort where torch was built without it, so a graph that is whole is
changed: fakes lie on the device, and so does what operators make there. Operators that torch chooses by the device stay
those of the CPU, but for attention: libraries' convolutions and batch norms, layouts that these prefer. Forward and
backward are only counted, so they need not run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxcomp import compat
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import clone
from fxcomp.graph.info import InputKind, info

IMAGINED = torch.device("cuda", 0)


def on_accelerator(captured: Captured, host_counters: Collection[str] = ()) -> Captured:
    """Put everything on an accelerator, but counters of steps of parameters whose optimizer keeps them on the host."""
    gm, there = clone(captured.graph), partial(compat.fake_on, device=IMAGINED)
    on_host: set[Node] = set()
    for node in gm.graph.nodes:
        source = info(node).source
        if source is not None and source.kind is InputKind.STATE:
            is_counter = isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 0
            if is_counter and source.name in host_counters:
                on_host.add(node)
        tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
        if tensors and on_host.issuperset(tensors):
            on_host.add(node)
        if node in on_host or node.op == "output":
            continue
        node.meta["val"] = pytree.tree_map_only(Tensor, there, node.meta.get("val"))
        node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: IMAGINED, (node.args, node.kwargs))
    return replace(captured, graph=gm, is_imagined=True)
