"""A step on a GPU that is not here: its kernels, memory and advice, beside what was measured on one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_predicted
import pytest
import torch
from records import read
from torch import Tensor, nn
from torch.nn import functional as F

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.frontends.job import Job
from fxcomp.frontends.what_if import WhatIf, imagining, what_if
from fxcomp.plan.compress import Compress
from fxcomp.report.device import DeviceUse
from fxcomp.report.terminal import to_text

WHERE = Cluster.parse("2x1", intra=Link.parse("100gbit"), inter=Link.parse("10gbit"))


def perceptron(dtype: torch.dtype | None, width: int = 2048) -> Job:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)]).to(device="meta")

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return model(batch[0]).float().square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Job(model, loss, optimizer, (torch.empty(4096, width, device="meta"),))


def use_of(make: Callable[[], Job], device: str, plan: str = "dense") -> tuple[DeviceUse, str]:
    with imagining(device):
        found = what_if(make(), WHERE, WhatIf(compress=Compress.parse(plan), device=device))
    assert found.device is not None
    return found.device, " ".join(to_text(found).split())


@pytest.mark.parametrize(
    ("dtype", "device", "products", "advised"),
    [
        (None, "h100", "f32", ["set_float32_matmul_precision", "torch.bfloat16"]),
        (torch.bfloat16, "h100", "bf16 under autocast", []),
        (torch.float16, "v100", "f16 under autocast", []),
        (torch.bfloat16, "v100", "bf16 under autocast", ["torch.float16"]),
        (None, "v100", "f32", ["torch.float16"]),
    ],
)
def test_the_report_names_precision_and_better_settings(
    dtype: torch.dtype | None, device: str, products: str, advised: list[str]
):
    use, shown = use_of(lambda: perceptron(dtype), device)
    assert use.products == {products: pytest.approx(1.0)}
    assert f"Products run in {products}: 100%" in shown
    assert len(use.advice) == len(advised)
    for sentence, setting in zip(use.advice, advised, strict=True):
        assert setting in sentence
        assert sentence.split()[-1] in shown


def test_a_compressed_plan_stands_beside_dense_and_eager_ddp():
    use, shown = use_of(lambda: perceptron(torch.bfloat16), "h100", "int8")
    plan, dense, eager = use.steps
    assert [step.name for step in use.steps] == ["the plan", "dense", "DDP, eager"]
    assert plan.launches["encode"] > 0
    assert "encode" not in dense.launches
    assert dense.kernels < eager.kernels
    assert dense.kernels_us < eager.kernels_us
    assert plan.memory["payloads"] > 0 == dense.memory["payloads"]
    values = 3 * (2048 * 2048 + 2048)
    for step in use.steps:
        assert step.memory["parameters"] == 4 * values
        assert step.memory["optimizer"] >= 8 * values
        assert step.memory["buckets"] >= 4 * values
    assert "ms of the host" in shown


def test_a_step_that_does_not_fit_is_named():
    def large() -> Job:
        model = nn.Linear(60_000, 60_000, bias=False, device="meta")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return Job(model, lambda m, b: m(b[0]).square().mean(), optimizer, (torch.empty(8, 60_000, device="meta"),))

    small, shown_on_small = use_of(large, "l4")
    _, shown_on_large = use_of(large, "h200")
    assert re.search(r"the plan does not fit: 432\d\d MB of 24000\.", shown_on_small)
    assert "does not fit" not in shown_on_large
    assert small.memory_bytes == 24_000_000_000
    assert small.steps[0].memory["gradients"] == 4 * 60_000**2


def test_attention_is_named_by_its_kernel():
    def attending(dtype: torch.dtype) -> Job:
        model = nn.Linear(256, 3 * 256).cuda()

        def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
            with torch.autocast("cuda", dtype):
                q, k, v = model(batch[0]).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()

        return Job(model, loss, torch.optim.SGD(model.parameters(), 0.1), (torch.zeros(2, 128, 256).cuda(),))

    for device, dtype, kernel in (("a100", torch.bfloat16, "flash"), ("v100", torch.float16, "efficient")):
        use, shown = use_of(partial(attending, dtype), device)
        assert use.attention == {f"{kernel}_attention": 1}
        assert f"Attention runs in {kernel}_attention (1)" in shown


@pytest.mark.slow
def test_a_gpt_is_predicted_near_what_an_h100_measured():
    measured = {
        r["contestant"]: r for r in read(gpu_predicted.MEASURED / gpu_predicted.RECORDS["h100"]) if "kernel_ms" in r
    }
    found: dict[str, dict[str, Any]] = {r["contestant"]: r for r in gpu_predicted.predicted("h100")}
    dense, eager = found["step_dense"], found["ddp_eager"]
    assert dense["kernel_ms"] == pytest.approx(measured["step_dense"]["kernel_ms"], rel=0.15)
    assert eager["kernel_ms"] == pytest.approx(measured["ddp_eager"]["kernel_ms"], rel=0.2)
    assert dense["peak_mb"] == pytest.approx(measured["step_dense"]["peak_mb"], rel=0.1)
    assert eager["peak_mb"] == pytest.approx(measured["ddp_eager"]["peak_mb"], rel=0.15)
    for name in ("step_int8", "step_powersgd(4)"):
        assert found[name]["kernel_ms"] == pytest.approx(measured[name]["kernel_ms"], rel=0.15)
        assert found[name]["peak_mb"] == pytest.approx(measured[name]["peak_mb"], rel=0.1)
