"""Every node has its predicted time, measured ones before estimated ones."""

from dataclasses import replace

from helpers.before_after import before_after
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, linear_step, node_named, one_bucket
from helpers.stages import lowered

from fxcomp.cluster.cluster import Level
from fxcomp.cost.roofline import Measured
from fxcomp.graph.edit import is_collective
from fxcomp.graph.info import info
from fxcomp.graph.work import work_key
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.plan.kinds import CollectiveKind


def test_operators_cost_by_the_roofline(golden):
    text, _ = before_after(annotate_costs, linear_step(), COSTS, TWO)
    golden("annotate_costs/linear.txt", text)


def test_compression_and_collectives_cost_by_bytes_and_links(golden):
    plan = one_bucket("compress(topk(0.01))@cpu > all_gather@world > decompress@cpu")
    text, _ = before_after(annotate_costs, lowered(plan, TWO), COSTS, TWO)
    golden("annotate_costs/topk_on_cpu.txt", text)


def test_collectives_of_uneven_parts_cost_by_what_the_largest_owner_has():
    two_shots = (
        "compress(int8)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world"
        " > decompress@gpu"
    )
    rooted = "reduce@intra > all_reduce@inter > broadcast@intra"
    kind = CollectiveKind
    expected = {
        two_shots: [(kind.ALL_TO_ALL, Level.WORLD, 20), (kind.ALL_GATHER, Level.WORLD, 12)],
        rooted: [(kind.REDUCE, Level.INTRA, 48), (kind.ALL_REDUCE, Level.INTER, 48), (kind.BROADCAST, Level.INTRA, 48)],
    }
    for strategy, sizes in expected.items():
        gm = annotate_costs(lowered(one_bucket(strategy), TWO_BY_TWO), COSTS, TWO_BY_TWO)
        costs = [info(n).cost_us for n in gm.graph.nodes if is_collective(n)]
        assert costs == [COSTS.collective(*size, TWO_BY_TWO).us for size in sizes], strategy


def test_what_was_measured_wins():
    gm = linear_step()
    measured = {work_key(node_named(gm, "mm")): Measured(123.0)}
    annotated = annotate_costs(gm, replace(COSTS, compute=measured), TWO)
    assert info(node_named(annotated, "mm")).cost_us == 123.0
