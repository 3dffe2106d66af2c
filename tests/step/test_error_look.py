"""A look at a running step measures what its compressors lose, of gradients and what they have left out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.workloads import cluster

from fxcomp.compressors import parse_compressor
from fxcomp.error_tables import Rows
from fxcomp.error_tables.table import LARGEST
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.runtime.arena import Arena
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport
from fxcomp.state.gradient_state import residual_layout
from fxcomp.step.errors.look import ErrorLook

SHAPES = {"a": (30, 40), "b": (50,), "c": (20, 20)}
TOPK = parse_compressor("topk(0.01)")
CPU = torch.device("cpu")


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime(NullTransport(), CPU)
    yield made
    made.close()


def compress(runtime: Runtime, plan: Plan, residuals: Arena, gradients: dict[str, torch.Tensor]) -> None:
    """Pack and compress each bucket in turn, as an emitted step does."""
    for number, bucket in enumerate(plan.buckets):
        parts = [gradients[n].flatten()[e.start : e.stop] for n, e in zip(bucket.names, bucket.extents, strict=True)]
        flat = runtime.pack(f"pack_{number}", bucket.names, parts, 1.0, bucket.starts)
        runtime.compress(f"payload_{number}", TOPK, flat, residuals.of(number), bucket.sizes)


def looking(shapes: dict[str, tuple[int, ...]], residuals: Arena, ranks: int) -> ErrorLook:
    """A look of one rank, whose sums are those of all."""
    site: Any = SimpleNamespace(
        device=CPU, rank=0, ranks=SimpleNamespace(world_size=ranks), sum_over_ranks=lambda _: None
    )
    return ErrorLook(LARGEST, 0, shapes, residuals, site)


def measured(look: ErrorLook) -> Rows:
    look.measure(torch.zeros(()))
    assert look.rows is not None
    return look.rows


@pytest.mark.parametrize("cut", [0, 400])
def test_a_look_finds_what_is_left_out_of_gradients_and_residuals(runtime: Runtime, cut: int):
    """`a` in two buckets, or in one."""
    flat = Strategy.flat(TOPK)
    first = (Bucket(("a",), (cut,), flat),) if cut else ()
    rest = Bucket(("a", "b", "c"), (1200 - cut, 50, 400), flat, (cut, 0, 0))
    plan, where = Plan((*first, rest)), cluster(4, 1, "1gbit")
    residuals = Arena(residual_layout(plan, where, 0), CPU)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        look = looking(SHAPES, residuals, where.world_size)
        before = residuals.of(len(plan.buckets) - 1).clone()
        runtime.gradients.on_gradient = look.see
        compress(runtime, plan, residuals, gradients)
    found, place = measured(look)["c"], LARGEST.index(TOPK)
    assert found.squares == pytest.approx(gradients["c"].square().sum().item(), rel=1e-5)
    value, left = gradients["c"].flatten() + before[-400:], residuals.of(len(plan.buckets) - 1)[-400:]
    lost = (left.square().sum() / value.square().sum()).item()
    assert found.errors[place] == pytest.approx(lost, rel=1e-5)
    alone = looking({"c": SHAPES["c"]}, Arena({}, CPU), 4)
    alone.see("c", gradients["c"])
    assert measured(alone)["c"].errors[place] != pytest.approx(lost, rel=1e-3)


def test_parts_of_a_gradient_are_put_together(runtime: Runtime):
    gradient = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    whole, parts = (looking({"a": (30, 40)}, Arena({}, CPU), 1) for _ in range(2))
    runtime.gradients.on_gradient = whole.see
    runtime.pack("whole", ("a",), (gradient,), 1.0)
    runtime.gradients.on_gradient = parts.see
    runtime.pack("second", ("a",), (gradient.flatten()[500:],), 1.0, (500,))
    runtime.pack("first", ("a",), (gradient.flatten()[:500],), 1.0)
    assert measured(parts) == measured(whole)
