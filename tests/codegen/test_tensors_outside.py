"""Compiled regions read and write tensors outside the model where they are, as the step without Inductor does."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from helpers.drifting import table
from helpers.plans import plan_in_turns
from helpers.region_jobs import Mirror
from helpers.torch_compiled import QUICK
from torch import Tensor, nn
from torch._inductor import config

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen import program
from fxcomp.plan.strategy import DENSE
from fxcomp.ranks import ALONE
from fxcomp.site import Site

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own

HOSTS = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))
FACTOR = torch.tensor(2.0)


class Criterion(nn.Module):
    """Counts its calls in a buffer, which no step of a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, y: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return (y * self.calls.sum()).square().mean() * FACTOR


def trained(devices: Sequence[str]) -> tuple[list[float], list[float], int]:
    """Return losses, what the criterion has counted and the number of regions; the factor changes on the way."""
    torch.manual_seed(0)
    FACTOR.fill_(2.0)
    criterion = Criterion()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with (
        patch.object(program, "INDUCTOR_DEVICES", devices),
        patch.object(Site, "of", lambda _, __, device, *___: Site(ALONE, HOSTS, Mirror(2), device)),
        config.patch(QUICK),
    ):
        step = fxcomp.compile_step(
            model,
            lambda model, batch: criterion(model(batch)),
            optimizer,
            torch.ones(2, 4),
            costs=table(2.0),
            compress=plan_in_turns(model, [DENSE], 2),
            checks=fxcomp.Checks(race="off", replan="off", verify="never"),
        )
        losses: list[float] = []
        for number in range(4):
            FACTOR.fill_(10.0 if number == 2 else 2.0)
            losses.append(float(step(torch.ones(2, 4))))
    return losses, criterion.calls.tolist(), step.source.count("def region_")


def test_what_is_written_outside_is_seen_and_what_a_region_writes_there_is_not_lost():
    plain, calls, regions = trained(())
    assert regions > 1
    assert calls == [4.0] * 3
    compiled, *others = trained(("cpu",))
    assert others == [calls, regions]
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)
