"""Every node has its predicted time, measured ones before estimated ones."""

from dataclasses import replace

from before_after import before_after
from graphs import COSTS, TWO, linear_step, node_named, one_bucket
from stages import compressed

from fxcomp.cost.roofline import Measured
from fxcomp.graph.info import info
from fxcomp.graph.work import work_key
from fxcomp.passes.annotate_costs import annotate_costs


def test_operators_cost_by_the_roofline(golden):
    text, _ = before_after(annotate_costs, linear_step(), COSTS, TWO)
    golden("annotate_costs/linear.txt", text)


def test_compression_and_collectives_cost_by_bytes_and_links(golden):
    plan = one_bucket("compress(topk(0.01))@cpu > all_gather@world > decompress@cpu")
    text, _ = before_after(annotate_costs, compressed(plan, TWO), COSTS, TWO)
    golden("annotate_costs/topk_on_cpu.txt", text)


def test_what_was_measured_wins():
    gm = linear_step()
    measured = {work_key(node_named(gm, "mm")): Measured(123.0)}
    annotated = annotate_costs(gm, replace(COSTS, compute=measured), TWO)
    assert info(node_named(annotated, "mm")).cost_us == 123.0
