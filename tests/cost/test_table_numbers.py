"""Numbers that no cost table, cluster or workload may hold: each is refused where it comes in, by name."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.workloads import COSTS, cluster

from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.piecewise import Fit
from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.search.workload import Gradient, Workload

BAD = (math.nan, math.inf, -math.inf, -1.0)
SUM = CollectiveKind.ALL_REDUCE

TABLES: dict[str, Callable[[float], CostTable]] = {
    "launch_us": lambda x: replace(COSTS, launch_us=x),
    "feed_us": lambda x: replace(COSTS, feed_us=x),
    "host_us": lambda x: replace(COSTS, host_us=x),
    "error": lambda x: replace(COSTS, error=x),
    "compute_error": lambda x: replace(COSTS, compute_error=x),
    "pack_gb_per_s": lambda x: replace(COSTS, pack_gb_per_s=x),
    "copy_gb_per_s": lambda x: replace(COSTS, copy_gb_per_s=x),
    "contention": lambda x: replace(COSTS, contention=x),
    "roofline.gflops": lambda x: replace(COSTS, roofline=Roofline(x, 10.0)),
    "roofline.gb_per_s": lambda x: replace(COSTS, roofline=Roofline(50.0, x)),
    "roofline.launch_us": lambda x: replace(COSTS, roofline=Roofline(50.0, 10.0, x)),
    "roofline.others['bf16']": lambda x: replace(COSTS, roofline=Roofline(50.0, 10.0, others={"bf16": x})),
    "compute['aten.mm'].us": lambda x: replace(COSTS, compute={"aten.mm": Measured(x)}),
    "compute['aten.mm'].spread": lambda x: replace(COSTS, compute={"aten.mm": Measured(1.0, x)}),
    "transport['all_reduce'].us": lambda x: replace(COSTS, transport={SUM: TransportCost(x, 1.0)}),
    "compressors['int8@gpu'].points[0].encode_us": lambda x: replace(
        COSTS, compressors={"int8@gpu": CompressorCost.of(CompressorPoint(1024, x, 1.0))}
    ),
    "collectives['all_reduce@2x1'].fit.pieces[0].us_per_unit": lambda x: replace(
        COSTS, collectives={(SUM, "2x1"): MeasuredCollective(2, Fit.line(10.0, x))}
    ),
    "processors": lambda x: replace(COSTS, processors=Processors(1.0, x)),
}


@pytest.mark.parametrize("place", TABLES)
def test_no_cost_table_holds_what_is_no_time_or_rate(place: str):
    for value in BAD:
        with pytest.raises(BadOption) as caught:
            TABLES[place](value)
        assert f"the cost table's {place} must be" in str(caught.value)
        assert str(value) in str(caught.value)


@pytest.mark.parametrize("value", BAD)
def test_no_link_has_such_a_latency_or_bandwidth(value: float):
    for fields in ({"alpha_us": value}, {"gb_per_s": value}, {"in_gb_per_s": value}, {"message_us": value}):
        [name] = fields
        with pytest.raises(BadOption, match=f"a link's {name} must be .*, not {value}"):
            Link(**{"alpha_us": 1.0, "gb_per_s": 1.0, **fields})
    with pytest.raises(BadOption, match="a link's alpha_us must be"):
        Cluster.from_json({**cluster(2, 1, "1gbit").to_json(), "inter": {"alpha_us": value, "gb_per_s": 1.0}})


@pytest.mark.parametrize("value", BAD)
def test_no_workload_holds_such_a_time(value: float):
    for name in ("ready_us", "update_us"):
        with pytest.raises(BadOption, match=f"the gradient 'w' has {name} = {value}: write a time"):
            replace(Gradient("w", (4, 4), 1.0, 1.0), **{name: value})
    for name in ("backward_us", "finish_us", "broadcast_ready_us", "buffers_us"):
        with pytest.raises(BadOption, match=f"a workload has {name} = {value}: write a time"):
            replace(Workload((), 1.0), **{name: value})
    with pytest.raises(BadOption, match="broadcast_bytes"):
        replace(Workload((), 1.0), broadcast_bytes=value)
