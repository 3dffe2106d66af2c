"""A final graph follows a plan with other parameters as if it had been made for it."""

from __future__ import annotations

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
from helpers.before_after import before_after
from helpers.graphs import COSTS, TWO, TWO_BY_TWO, linear_step, one_bucket
from helpers.stages import lowered

from fxcomp.cluster.cluster import Cluster
from fxcomp.graph.dump import dump
from fxcomp.passes.retune_strategies import retune_strategies
from fxcomp.passes.thread_state import thread_state
from fxcomp.pipeline import Compiler

ONE_SHOT = "compress({0})@gpu > all_gather@world > decompress@gpu"
TWO_SHOTS = "compress({0}) > all_to_all@world > decompress > compress({0}) > all_gather@world > decompress"
DEALT = (
    "compress({0}) > all_to_all@intra > all_to_all@inter > decompress > compress({0}) > all_gather@inter"
    " > all_gather@intra > decompress"
)
SUMMED = "compress({0}) > all_reduce@world > decompress"


def test_other_parameters_of_the_same_compressor(golden):
    gm = thread_state(lowered(one_bucket(ONE_SHOT.format("topk(0.3)")), TWO))
    text, _ = before_after(retune_strategies, gm, one_bucket(ONE_SHOT.format("topk(0.1)")), TWO, 0)
    golden("retune_strategies/topk.txt", text)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize(
    ("text", "cluster", "before", "after"),
    [
        (ONE_SHOT, TWO, "topk(0.3)", "topk(0.8)"),
        (TWO_SHOTS, TWO, "topk(0.3)", "topk(0.8)"),
        (DEALT, TWO_BY_TWO, "topk(0.3)", "topk(0.8)"),
        (SUMMED, TWO, "randomk(0.3)", "randomk(0.9)"),
    ],
)
def test_the_graph_is_what_the_passes_make_for_that_plan(
    text: str, cluster: Cluster, before: str, after: str, commits: bool
):
    for rank in range(cluster.world_size):
        compiler = Compiler(cluster, rank, skip_nonfinite=commits)
        plans = [one_bucket(text.format(each)) for each in (before, after)]
        gm, expected = (compiler.rewrite(linear_step(), plan, COSTS) for plan in plans)
        assert dump(gm) != dump(expected)
        assert dump(retune_strategies(gm, plans[1], cluster, rank), costs=False) == dump(expected, costs=False)
