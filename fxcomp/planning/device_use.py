"""Estimate how a step uses an absent GPU, compared with eager DistributedDataParallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.devices import LAUNCH_US, Preset
from fxcomp.cost.table import CostTable
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import gradients, value_bytes
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.kernels import Kernel, kernels, launches
from fxcomp.graph.peak_memory import peak_memory
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.report.device import DeviceUse, StepOnDevice

_ELSEWHERE = (Role.COLLECTIVE, Role.WAIT, Role.EXCHANGE)

WORTH_SAYING = 0.05
"""A setting is advised if it saves more than this fraction of the kernels' time."""


@compat.outside_function_modes()
def device_use(
    compiler: Compiler,
    captured: Captured,
    plans: Mapping[str, Plan],
    costs: CostTable,
    preset: Preset,
    *,
    is_fused: bool,
) -> DeviceUse:
    """Estimate a step under each plan and in eager DDP, with advice. `is_fused`: DDP's optimizer is fused."""
    graphs = {name: compiler.rewrite(captured.graph, plan, costs) for name, plan in plans.items()}
    listed = {name: kernels(gm) for name, gm in graphs.items()}
    steps = [_compiled(name, gm, listed[name]) for name, gm in graphs.items()]
    name, gm = next(iter(graphs.items()))
    eager = compiler.eager(captured.graph, costs, is_fused=is_fused)
    alone, sent = kernels(eager, joins=False), gradients(eager).values()
    dense_bytes = sum(map(value_bytes, sent))
    memory = peak_memory(eager, alone)
    memory["buckets"] += dense_bytes
    started = {**launches(eager, alone), "pack": len(sent)}  # DDP divides each gradient
    device_us = _device_us(eager) + costs.pack_us(dense_bytes)
    steps.append(_step("DDP, eager", started, device_us, memory))
    products, advice = _products(gm, listed[name]), _advice(listed[name], preset)
    return DeviceUse(preset.facts.memory_bytes, steps, products, _attention(listed[name]), advice)


def _compiled(name: str, gm: GraphModule, listed: Sequence[Kernel]) -> StepOnDevice:
    return _step(name, launches(gm, listed), _device_us(gm), peak_memory(gm, listed))


def _step(name: str, started: Mapping[str, int], device_us: float, memory: Mapping[str, float]) -> StepOnDevice:
    return StepOnDevice(name, started, device_us, sum(started.values()) * LAUNCH_US, memory)


def _device_us(gm: GraphModule) -> float:
    labels = [info(node) for node in gm.graph.nodes]
    return sum(label.cost_us or 0.0 for label in labels if label.role not in _ELSEWHERE)


def _products(gm: GraphModule, listed: Sequence[Kernel]) -> dict[str, float]:
    found = Counter[str]()
    for kernel in listed:
        found[kernel.math_type.split()[0]] += int(kernel.flops)
    inputs = [(node, info(node).source) for node in gm.graph.find_nodes(op="placeholder")]
    parameters = [node for node, source in inputs if source is not None and source.kind is InputKind.PARAMETER]
    is_cast = all(node.meta["val"].dtype is torch.float32 for node in parameters)
    total = sum(found.values())
    named = {name: f"{name} under autocast" if is_cast and name in ("bf16", "f16") else name for name in found}
    return {named[name]: flops / total for name, flops in found.most_common() if flops} if total else {}


def _attention(listed: Sequence[Kernel]) -> dict[str, int]:
    names = [kernel.name.removeprefix("_scaled_dot_product_") for kernel in listed if kernel.is_attention]
    return dict(Counter(name for name in names if not name.endswith("backward")))


def _advice(listed: Sequence[Kernel], preset: Preset) -> list[str]:
    """Return advice on settings that speed up matrix products, estimated from the device's peak rates."""
    roofline = preset.roofline

    def us(instead: Mapping[str, str]) -> float:
        types = ((kernel, instead.get(kernel.math_type.split()[0], kernel.math_type)) for kernel in listed)
        return sum(roofline.us(kernel.flops, kernel.touched_bytes, name) for kernel, name in types)

    now_us, half = us({}), "bf16" if "bf16" in preset.tflops else "f16"
    advice: list[str] = []
    choices = [
        ({"f32": "tf32"}, 'torch.set_float32_matmul_precision("high"), so TF32,'),
        (
            {"f32": half, "tf32": half, "bf16": half},
            f'torch.autocast("cuda", torch.{"bfloat16" if half == "bf16" else "float16"})',
        ),
    ]
    for instead, setting in choices:
        if all(name in preset.tflops for name in instead.values()) and us(instead) < (1 - WORTH_SAYING) * now_us:
            advice.append(
                f"Under {setting} products would run in this device's tensor cores: forward and backward in"
                f" {us(instead) / 1e3:.3g} ms, not {now_us / 1e3:.3g}."
            )
    return advice
