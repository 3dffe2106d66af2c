"""Buckets are filled by one operator on a device, and by what an accelerator's wire makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_counter import LaunchCounter
from torch import Tensor

from fxcomp.runtime.group import Group
from fxcomp.runtime.packing import LARGE, copy_at_once, copy_scaled
from fxcomp.runtime.transport import Groups


def places_of(values: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.zeros(value.shape, dtype=dtype or value.dtype) for value in values]


def test_values_of_any_type_and_layout_arrive():
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(3, 2, generator=generator),
        torch.randn(2, 3, generator=generator).t(),
        torch.randn(4, generator=generator).bfloat16(),
        torch.empty(0),
        torch.tensor(5.0),
    ]
    places = places_of(values, torch.float32)
    copy_at_once(values, places)
    for value, place in zip(values, places, strict=True):
        assert torch.equal(place, value.float())


def launches(scale: float, factor: float | None = None) -> int:
    values = [torch.empty(8, 8, device="meta") for _ in range(20)]
    flat = torch.empty(20 * 64, device="meta")
    places = [part.view(8, 8) for part in flat.split(64)]
    live = None if factor is None else torch.empty((), device="meta")
    counter = LaunchCounter(lambda tensor: tensor.is_meta)
    with counter:
        copy_scaled(values, scale, places, flat, live)
    return counter.found["step"].launches


def test_a_device_is_handed_one_copy_and_at_most_one_product():
    assert launches(1.0) == 1
    assert launches(0.5) == 2
    assert launches(1.0, 3.0) == 3, "the two factors are multiplied with each other"


@pytest.mark.parametrize(("scale", "started", "passes"), [(1.0, 1, 2), (0.5, 3, 2)])
def test_a_large_value_is_multiplied_into_its_place(scale: float, started: int, passes: int):
    sizes = (LARGE, 4, 4)
    values = [torch.empty(size, device="meta") for size in sizes]
    flat = torch.empty(sum(sizes), device="meta")
    counter = LaunchCounter(lambda tensor: tensor.is_meta)
    with counter:
        copy_scaled(values, scale, flat.split(sizes), flat)
    tally = counter.found["step"]
    assert tally.launches == started
    assert tally.touched_bytes == pytest.approx(4 * passes * sum(sizes), rel=1e-4)


class Sent:
    """Stands in for a process group's all_reduce."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[float], Any]] = []
        monkeypatch.setattr("fxcomp.runtime.transport._dist.all_reduce", self._all_reduce)

    def _all_reduce(self, value: Tensor, op: Any, **_: object) -> object:
        self.calls.append((value.tolist(), op))
        return object()


@pytest.mark.parametrize(("backend", "sent", "op"), [("nccl", 6.0, "AVG"), ("gloo", 2.0, "SUM")])
def test_a_backend_without_means_gets_shares(backend: str, sent: float, op: str, monkeypatch: pytest.MonkeyPatch):
    seen = Sent(monkeypatch)
    group = Group(object(), (0, 1, 2), 0, is_direct=False, backends={"cpu": backend})
    Groups({("world", "main"): group}).all_reduce(torch.tensor([6.0]), "world", "main", "avg")
    assert seen.calls == [([sent], getattr(torch.distributed.ReduceOp, op))]
