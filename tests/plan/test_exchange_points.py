"""Buckets have an exchange point; parts of one parameter share it, and a saved plan keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxcomp.compressors import BF16, Sign, parse_compressor
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.compress import Warmup, with_gradients_in_int8
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE, Strategy

SIGN = Strategy.flat(Sign())
PLAN = Plan((Bucket(("a",), (8,), SIGN), Bucket(("b", "c"), (4, 4), DENSE)))


def points(plan: Plan) -> list[str]:
    return [bucket.at.value for bucket in plan.buckets]


def test_what_is_compressed_moves_and_dense_buckets_stay():
    moved = PLAN.at_momenta()
    assert points(moved) == ["momentum", "gradient"]
    assert moved.moved == ("a",)
    assert points(moved.at_gradients()) == ["gradient", "gradient"]
    assert moved.at_gradients() == PLAN


def test_parts_of_a_parameter_move_together_and_so_does_what_travels_with_them():
    plan = Plan(
        (
            Bucket(("a",), (8,), SIGN),
            Bucket(("a", "b"), (8, 4), DENSE, (8, 0)),
            Bucket(("b", "c"), (4, 4), DENSE, (4, 0)),
            Bucket(("d",), (4,), DENSE),
        )
    )
    assert points(plan.at_momenta()) == ["momentum", "momentum", "momentum", "gradient"]


def test_parts_of_a_parameter_at_different_points_are_refused():
    buckets = (Bucket(("a",), (8,), SIGN, at=ExchangePoint.MOMENTUM), Bucket(("a",), (8,), SIGN, (8,)))
    with pytest.raises(BadPlan, match="a part of a at the gradient, and another one at the momentum"):
        Plan(buckets)


def test_a_saved_plan_keeps_its_points_and_others_are_written_as_before(tmp_path):
    moved = PLAN.at_momenta()
    moved.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == moved
    assert moved.digest != PLAN.digest
    assert not any("at" in bucket for bucket in PLAN.to_json()["buckets"])
    assert not moved.differs_in_parameters_only(PLAN)
    assert "at the momentum" in str(moved)


def test_a_bad_point_in_a_file_is_told():
    data = PLAN.to_json()
    data["buckets"][0]["at"] = "update"
    with pytest.raises(BadPlan, match="'update'"):
        Plan.from_json(data)


def test_warm_up_stages_exchange_gradients():
    moved = PLAN.at_momenta()
    stages = Warmup(dense_steps=2, int8_steps=3).stages(moved)
    assert list(stages) == [0, 2, 5]
    assert [points(plan)[0] for plan in stages.values()] == ["gradient", "gradient", "momentum"]
    assert [str(plan.buckets[0].strategy.compressor) for plan in stages.values()] == ["None", "int8", "sign"]
    assert stages[2].buckets[1].strategy == DENSE, "vectors stay as they are"


def test_dense_momenta_begin_at_the_gradient_too():
    dense = Plan((replace(PLAN.buckets[1], at=ExchangePoint.MOMENTUM),))
    assert [points(plan) for plan in Warmup(dense_steps=1).stages(dense).values()] == [["gradient"], ["momentum"]]


def test_a_cast_stays_as_it_is_in_a_warm_up():
    plan = Plan((Bucket(("a",), (8,), Strategy.flat(BF16())), Bucket(("b",), (8,), SIGN)))
    warm = Warmup(int8_steps=2).stages(plan)[0]
    assert [str(bucket.strategy.compressor) for bucket in warm.buckets] == ["bf16", "int8"]


def test_int8_cannot_take_the_place_of_what_ranks_agree_on():
    plan = Plan((Bucket(("a",), (8,), Strategy.flat(parse_compressor("powersgd(2)"))),))
    with pytest.raises(BadOption, match=r"int8_steps puts int8 in the place .*, which int8 cannot.\n  Use dense_steps"):
        Warmup(int8_steps=1).stages(plan)
    (bucket,) = with_gradients_in_int8(plan).buckets
    assert bucket.strategy == Strategy.flat(None)
