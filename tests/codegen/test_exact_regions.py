"""Regions that Inductor compiles return exact gradients as 16-bit values, so that no rounding is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drifting import table
from helpers.region_jobs import mirrored
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link

Made = Callable[[], nn.Module]
HOSTS = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.001))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(images)))).mean((2, 3)))


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))


CASES: dict[str, tuple[Made, tuple[int, ...]]] = {
    "bias gradients of 4 rows": (linears, (4, 16)),
    "bias gradients of 16 rows": (linears, (16, 16)),
    "bias gradients of 1,024 rows": (linears, (1024, 16)),
    "an outer product of one row": (linears, (1, 16)),
    "convolutions": (Convolutions, (4, 3, 8, 8)),
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return nn.functional.cross_entropy(logits.float(), batch[1])


def packed(name: str, compress: str, verify: Any = "never") -> tuple[dict[str, Tensor], set[str]]:
    """The local gradients as regions return them, and the parameters whose gradients are sent in 16 bits."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, batch = make(), (torch.randn(shape), torch.randint(5, shape[:1]))

    found: dict[str, Tensor] = {}
    with mirrored(HOSTS, ("cpu",)):
        step = fxcomp.compile_step(
            model,
            loss_fn,
            torch.optim.SGD(model.parameters(), lr=0.1),
            batch,
            costs=table(2.0),
            compress=compress,
            checks=fxcomp.Checks(race="off", replan="off", verify=verify),
        )
        step.in_force.runtime.gradients.on_gradient = lambda name, value, _: found.update({name: value.clone()})
        step(batch)
    return found, {n for bucket in step.plan.buckets if not bucket.strategy.is_dense for n in bucket.names}


@pytest.mark.parametrize("name", CASES)
def test_compiled_regions_return_16_bit_values(name: str):
    found, exact = packed(name, "lossless")
    assert exact == set(found)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["bias gradients of 4 rows", "convolutions"])
def test_a_verified_step_allows_the_roundings_of_compiled_regions(name: str):
    packed(name, "lossless", verify=1)


def test_without_it_inductor_drops_roundings():
    found, exact = packed("bias gradients of 4 rows", "dense")
    assert not exact
    biases = [value for name, value in found.items() if name.endswith("bias")]
    assert any(not torch.equal(bias.bfloat16().float(), bias) for bias in biases)
