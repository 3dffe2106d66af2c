"""`fxcomp diff`: what two plans do differently, from saved plans and from reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from fxcomp.__main__ import main
from fxcomp.plan.given import strategy_named
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.report.document import Table
from fxcomp.report.plan_diff import PlanFile, diff_plans, headline, sections_of

INT8, POWERSGD = strategy_named("int8"), strategy_named("powersgd(4)")
BY_LEVEL = Strategy.hierarchical(INT8.compressor)


def plan(*buckets: tuple[str, Strategy], size: int = 1000) -> Plan:
    """Buckets of gradients named by letters."""
    return Plan(tuple(Bucket(tuple(names), (size,) * len(names), strategy) for names, strategy in buckets))


def diff(before: Plan, after: Plan) -> Any:
    return diff_plans(PlanFile(before), PlanFile(after))


def rows(found: Any, **options: bool) -> list[tuple[str, ...]]:
    tables = [
        block for section in sections_of(found, **options) for block in section.blocks if isinstance(block, Table)
    ]
    return [tuple(row) for table in tables for row in table.rows]


def test_equal_plans_have_no_difference():
    same = diff(plan(("ab", INT8), ("c", DENSE)), plan(("ab", INT8), ("c", DENSE)))
    assert same.is_empty
    assert sections_of(same) == []
    assert headline(same) == "The plans are the same: 3 gradients in 2 buckets."


def test_gradients_are_grouped_by_what_happens_to_their_strategy():
    found = diff(plan(("abc", INT8), ("d", DENSE)), plan(("abc", POWERSGD), ("d", INT8)))
    assert rows(found) == [
        ("3", "0.012", "int8 -> powersgd(4)", "a, b and 1 more"),
        ("1", "0.004", "dense -> int8", "d"),
    ]
    assert rows(found, all_names=True)[0][-1] == "a, b, c"
    assert found.moved is None
    assert headline(found) == "The plans differ: 2 buckets before, 2 buckets after."


@pytest.mark.parametrize(
    ("after", "words", "kinds"),
    [
        (BY_LEVEL, "int8 -> int8 by level", ("levels",)),
        (Strategy.flat(INT8.compressor, Device.CPU), "int8 -> int8 on cpu", ("device",)),
        (strategy_named("int4"), "int8 -> int4", ("compressors",)),
        (Strategy.two_shots(INT8.compressor, INT8.compressor), "int8 -> int8 twice", ("compressors",)),
    ],
)
def test_a_change_says_what_of_the_strategy_differs(after: Strategy, words: str, kinds: tuple[str, ...]):
    (change,) = diff(plan(("ab", INT8)), plan(("ab", after))).strategies
    assert (change.what, change.kinds) == (words, kinds)


def test_gradients_that_travel_with_others_are_counted_and_not_those_that_stay():
    found = diff(plan(("abc", INT8), ("de", INT8)), plan(("ab", INT8), ("cde", INT8)))
    assert found.strategies == ()
    assert found.moved.names == ("c",)
    assert rows(found) == [("1", "0.004", "in another bucket", "c")]
    joined = diff(plan(("abc", INT8), ("de", INT8)), plan(("abcde", INT8)))
    assert joined.moved.names == ("d", "e")


def test_another_order_of_buckets_is_a_difference():
    found = diff(plan(("ab", INT8), ("c", DENSE)), plan(("c", DENSE), ("ab", INT8)))
    assert found.reordered
    assert not found.is_empty


def test_another_order_within_a_bucket_is_a_difference_and_so_is_an_empty_gradient_elsewhere():
    assert diff(plan(("ab", INT8)), plan(("ba", INT8))).reordered
    first, second = Bucket(("e", "b"), (0, 20), INT8), Bucket(("b",), (20,), INT8)
    found = diff(Plan((first, Bucket(("c",), (5,), DENSE))), Plan((second, Bucket(("e", "c"), (0, 5), DENSE))))
    assert not found.is_empty
    assert sections_of(found)[0].blocks == ["Buckets leave, or gradients lie in them, in another order."]


def test_parts_of_a_gradient_are_compared_where_either_plan_cuts_it():
    whole = Plan((Bucket(("w",), (1000,), INT8),))
    cut = Plan((Bucket(("w",), (600,), INT8), Bucket(("w",), (400,), DENSE, (600,))))
    found = diff(whole, cut)
    assert [(change.what, change.elements) for change in found.strategies] == [("int8 -> dense", 400)]
    assert found.moved.elements == 400
    assert diff(cut, cut).is_empty


def test_gradients_of_one_plan_alone_are_named():
    found = diff(plan(("ab", INT8)), Plan((Bucket(("b", "c"), (999, 1000), INT8),)))
    assert [(change.what, change.names) for change in found.missing] == [
        ("only in the first plan", ("a",)),
        ("only in the second plan", ("c",)),
        ("another size", ("b",)),
    ]


def test_gradients_of_another_type_are_named():
    wide, narrow = (
        Plan((Bucket(("b",), (1000,), INT8, element_type=each),)) for each in (ElementType.F32, ElementType.BF16)
    )
    found = diff(wide, narrow)
    assert [(change.what, change.bytes) for change in found.missing] == [("another type", 2000)]


def test_few_lines_tell_many_changes_unless_all_are_asked_for():
    names = "abcdefghijklmnop"
    before = plan(*((name, DENSE) for name in names))
    after = plan(*((name, strategy_named(f"topk({k + 1}e-3)")) for k, name in enumerate(names)))
    found = diff(before, after)
    assert len(rows(found)) == 8
    assert sections_of(found)[0].blocks[-1] == "... and 8 other changes of 0.032 MB (--all)"
    assert len(rows(found, all_names=True)) == 16


def reported(saved: Plan, step_ms: float, sent: int) -> dict[str, Any]:
    """Make the parts of `explain --json` that a program needs."""
    buckets = [
        {"names": saved.labels(b), "sizes": b.sizes, "wire_bytes": sent, "strategy": str(b.strategy)}
        for b in saved.buckets
    ]
    return {"step_ms": {"chosen": step_ms}, "plan": {"buckets": buckets, "loss": 0.01}}


def written(path: Path, data: object) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def test_the_command_compares_saved_plans_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cut = Plan((Bucket(("w", "v"), (600, 5), INT8), Bucket(("w",), (400,), DENSE, (600,))))
    saved = written(tmp_path / "a.json", cut.to_json())
    first = written(tmp_path / "b.json", reported(cut, 20.0, 100))
    second = written(tmp_path / "c.json", reported(cut.with_strategies([INT8, INT8]), 15.0, 50))
    assert main(["diff", saved, first]) == 0
    assert "The plans are the same: 2 gradients in 2 buckets." in capsys.readouterr().out
    assert main(["diff", first, second]) == 1
    text = capsys.readouterr().out
    assert "dense -> int8" in text
    assert "predicted step, ms" in text
    assert "-25.0%" in text
    assert main(["diff", first, second, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["numbers"] == {"step_ms": [20.0, 15.0], "wire_bytes": [200.0, 100.0], "loss": [0.01, 0.01]}
    assert data["strategies"][0]["bytes"] == 1600


def test_what_gradients_lose_stands_side_by_side_where_both_files_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    both = plan(("ab", INT8), ("c", DENSE))
    reports = [
        {**reported(both, 20.0, 100), "budget": {"gradients": [{"name": n, "spent": s} for n, s in lost.items()]}}
        for lost in ({"a": 0.01, "b": 0.02, "c": 0.0}, {"a": 0.015, "b": 0.005, "c": 0.0, "d": 1.0})
    ]
    files = [written(tmp_path / f"{k}.json", report) for k, report in enumerate(reports)]
    assert main(["diff", *files]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Lost of the gradient's square before after change b 0.02 0.005 -0.015 a 0.01 0.015 +0.005" in text
    main(["diff", *files, "--json"])
    assert json.loads(capsys.readouterr().out)["spent"] == {"b": [0.02, 0.005], "a": [0.01, 0.015]}
    main(["diff", files[0], written(tmp_path / "plain.json", {**reported(both, 20.0, 100), "budget": None})])
    assert "Lost of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read {path}: No such file"),
        ("pack_0 = ...", "cannot read {path} as a plan: it is not JSON: Expecting value"),
        ("[1]", "this is a list, and no plan"),
        ("{}", "this has neither buckets nor a plan"),
        ('{"version": 1, "buckets": [{"names": ["a"]}]}', "this is not a plan: KeyError: 'sizes'"),
        ('{"version": 1, "buckets": [{"names": ["a"], "sizes": [1], "strategy": "x"}]}', "as a plan: "),
        ('{"plan": {"buckets": [{"names": ["a"]}]}}', "not the output of explain --json: KeyError: 'sizes'"),
    ],
)
def test_a_file_without_a_plan_is_an_error(
    content: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["diff", str(path), str(path)]) == 2
    assert text.format(path=path) in capsys.readouterr().err


def test_another_exchange_point_is_told_and_nothing_else():
    before = plan(("ab", INT8), ("c", DENSE))
    found = diff(before, before.at_momenta())
    assert rows(found) == [("2", "0.008", "int8: at the gradient -> at the momentum", "a, b")]
    assert found.strategies[0].kinds == ("exchange point",)
    assert not found.reordered
    assert found.moved is None
    other = diff(before, plan(("ab", POWERSGD), ("c", DENSE)).at_momenta())
    assert rows(other)[0][2] == "int8 at the gradient -> powersgd(4) at the momentum"


def test_the_exchange_point_is_read_from_a_report():
    moved = plan(("ab", INT8)).at_momenta()
    bucket = {"names": ["a", "b"], "sizes": [1000, 1000], "strategy": str(INT8), "at": "momentum", "wire_bytes": 1}
    found = PlanFile.from_json({"plan": {"buckets": [bucket]}, "step_ms": {"chosen": 1.0}})
    assert diff_plans(found, PlanFile(moved)).is_empty
