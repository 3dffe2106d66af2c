"""Move a step captured on the CPU to an absent accelerator, to emit and price it.

The finished graph is changed, because tracing aborts if torch was built without the device. Convolutions and batch
norms stay the CPU's operators. Attention is captured as the GPU's operator.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxcomp import compat
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import clone
from fxcomp.graph.info import InputKind, info

IMAGINED = torch.device("cuda", 0)


@compat.outside_function_modes()
def on_accelerator(captured: Captured, host_counters: Collection[str] = ()) -> Captured:
    """Move all tensors except the step counters of parameters in `host_counters`."""
    gm = clone(captured.graph)
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
        node.meta["val"] = map_aggregate(node.meta.get("val"), _there)
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _there)
    return replace(captured, graph=gm, is_imagined=True)


def _there(value: Any) -> Any:
    if isinstance(value, torch.device):
        return IMAGINED
    return compat.fake_on(value, IMAGINED) if isinstance(value, Tensor) else value
