"""A gradient that is cut: its parts cover it once, whatever buckets they are in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from fxcomp.errors import BadPlan
from fxcomp.plan.given import facts_of_plan
from fxcomp.plan.plan import Bucket, Plan, part_shape
from fxcomp.plan.strategy import DENSE, Strategy

INT8 = Strategy.parse("compress(int8)@gpu > all_gather@world > decompress@gpu")


def plan_of(*extents: tuple[int, int]) -> Plan:
    """A plan of w in so many buckets, and b in the first."""
    first, *others = [(stop - start, start) for start, stop in extents]
    return Plan(
        (
            Bucket(("b", "w"), (3, first[0]), DENSE, (0, first[1])),
            *(Bucket(("w",), (size,), INT8, (start,)) for size, start in others),
        )
    )


def test_a_plan_of_parts_knows_whole_parameters():
    plan = plan_of((4, 7), (0, 4), (7, 10))
    assert plan.names == ("b", "w")
    assert plan.sizes == {"b": 3, "w": 10}
    assert plan.parts["w"] == (range(4), range(4, 7), range(7, 10))
    assert plan.bucket_of("w") == 2
    assert [plan.labels(bucket) for bucket in plan.buckets] == [("b", "w[4:7]"), ("w[0:4]",), ("w[7:10]",)]
    assert "the strategy of 'w[7:10]' in the plan" in facts_of_plan(plan)
    plan.check_covers({"w": 10, "b": 3})


def test_parts_survive_json_and_whole_parameters_are_written_as_before():
    plan = plan_of((0, 4), (4, 10))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    first, second = plan.to_json()["buckets"]
    assert "starts" not in first
    assert second["starts"] == [4]
    assert plan.with_strategies([INT8, INT8]).parts == plan.parts


def test_the_digest_tells_where_a_gradient_is_cut():
    assert len({plan_of(*cut).digest for cut in ([(0, 10)], [(0, 4), (4, 10)], [(0, 6), (6, 10)])}) == 3


@pytest.mark.parametrize(
    ("extents", "text"),
    [
        ([(0, 5), (4, 10)], "the plan names w more than once: its elements from 4 on"),
        ([(0, 5), (0, 5)], "the plan names w more than once"),
        ([(0, 4), (6, 10)], "the plan leaves out elements 4 to 5 of w"),
        ([(2, 10)], "the plan leaves out elements 0 to 1 of w"),
        ([(0, 4), (4, 4)], "the plan names w more than once: its elements from 4 on"),
    ],
)
def test_parts_that_overlap_or_leave_something_out_are_refused(extents: Sequence[tuple[int, int]], text: str):
    with pytest.raises(BadPlan, match=text):
        plan_of(*extents)


def test_a_part_beyond_the_end_is_refused_by_name():
    with pytest.raises(BadPlan, match="it plans 12 elements for 'w', which has 10"):
        plan_of((0, 4), (4, 12)).check_covers({"b": 3, "w": 10})


def test_a_bucket_needs_a_start_for_each_name():
    for starts in ((0,), (0, -1)):
        with pytest.raises(BadPlan, match="as many starts as names, 0 or more each"):
            Bucket(("a", "b"), (1, 2), DENSE, starts)


def test_whole_rows_stay_rows():
    assert part_shape((6, 5), range(30)) == (6, 5)
    assert part_shape((6, 5), range(10, 30)) == (4, 5)
    assert part_shape((6, 5), range(3, 30)) == (27,)
    assert part_shape((4, 3, 2), range(6)) == (1, 3, 2)
    assert part_shape((7,), range(3)) == (3,)
    assert Bucket(("w", "v"), (10, 2), DENSE, (20, 0)).shapes({"w": (6, 5), "v": (2,)}) == [(2, 5), (2,)]
