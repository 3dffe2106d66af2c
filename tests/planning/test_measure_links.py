"""Live links are timed up to sizes that suit the device."""

from typing import Any

import pytest
import torch

from fxcomp.cluster.cluster import UNSHARED, Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.table import CostTable
from fxcomp.planning import measure_links
from fxcomp.runtime.transport import NullTransport

PAIR = Cluster(2, 1, intra=Link(1.0, 100.0), inter=Link(10.0, 1.0))


@pytest.mark.parametrize(("device", "mebibytes"), [("cpu", 16), ("cuda", 64)])
def test_accelerators_are_timed_by_larger_collectives(
    device: str, mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(*_: object, largest: int, **__: object) -> dict[Any, Any]:
        asked.append(largest)
        return {}

    monkeypatch.setattr(measure_links, "measure_collectives", measured)
    transport: Any = NullTransport(None)  # pyright: ignore[reportArgumentType] nothing is sent
    measure_links.live_links(CostTable(), UNSHARED, transport, PAIR, torch.device(device))
    assert asked == [mebibytes << 20]
