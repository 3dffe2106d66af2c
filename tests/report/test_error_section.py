"""The section of an error budget: the error of each layer."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.error_tables import ASSUMED, ErrorRow, ErrorTable
from fxcomp.error_tables.table import COLUMNS
from fxcomp.graph.info import alike
from fxcomp.plan.budget import Budget, ErrorBudget, plan_error
from fxcomp.plan.modes import Mode
from fxcomp.plan.pins import Pins
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.report.as_json import to_json
from fxcomp.report.by_layer import gradients_of, layers_of
from fxcomp.report.explanation import Explanation
from fxcomp.report.terminal import to_text
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.choose import choose
from fxcomp.search.decision import PlanMove
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload

COSTS = CostTable()
WHERE = Cluster(4, 1, intra=Link(5.0, 12.0), inter=Link.parse("1gbit"))
WORKLOAD = Workload(
    (
        Gradient("head.weight", (1000, 400), 6_000.0, 100.0),
        Gradient("blocks.1.weight", (1000, 800), 9_000.0, 300.0),
        Gradient("blocks.1.bias", (1000,), 9_000.0, 2.0),
        Gradient("blocks.0.weight", (1000, 800), 12_000.0, 300.0),
        Gradient("blocks.0.bias", (1000,), 12_000.0, 2.0),
    ),
    backward_us=12_500.0,
)


def explained(asked: str, table: ErrorTable = ASSUMED) -> Explanation:
    budget = Budget(ErrorBudget.parse(asked), table)
    choice = choose(WORKLOAD, COSTS, WHERE, Terms(Mode.BALANCED, budget=budget))
    timeline = simulate(plan_tasks(WORKLOAD, choice.plan, COSTS, WHERE))
    return Explanation(choice.plan, timeline, WORKLOAD, COSTS, WHERE, choice, "balanced", budget=budget)


def measured(samples: int = 3) -> ErrorTable:
    """A table in which the head has most of the squares and is easily compressed."""
    gaussian = [gaussian_error(compressor, 1) for compressor in COLUMNS]
    rows = {
        name: ErrorRow(shape, 90.0, tuple(0.2 * error for error in gaussian), samples)
        if name == "head.weight"
        else ErrorRow(shape, 1.0, tuple(gaussian), samples)
        for name, shape in WORKLOAD.shapes.items()
    }
    return ErrorTable(rows)


def words(explanation: Explanation) -> str:
    return " ".join(to_text(explanation).split())


def test_a_budget_stands_in_the_place_of_the_mode_and_of_its_bound():
    text = words(explained("topk(0.01)"))
    assert "error budget like(topk(0.01))" in text
    assert "mode balanced" not in text
    assert "no plan of this mode" not in text


def test_what_is_lost_is_compared_with_what_may_be():
    explanation = explained("topk(0.01)")
    allowed = explanation.allowed
    assert allowed is not None
    assert explanation.spent == plan_error(explanation.plan, WHERE) <= allowed
    assert f"A plan may lose {allowed:.3g} of the gradient's square, as topk(0.01) everywhere;" in words(explanation)
    assert to_json(explanation)["budget"]["allowed"] == allowed
    assert "as asked by 0.05;" in words(explained("0.05"))


def test_a_report_says_whether_errors_were_measured():
    assert "Errors are assumed as for Gaussian values" in words(explained("int4"))
    text = words(explained("0.2", measured()))
    assert "Errors of every gradient were measured in training, in 3 looks." in text
    rows = {**measured().rows, "blocks.0.bias": ErrorRow((1000,), 0.0, (), 0)}
    text = words(explained("0.2", ErrorTable(rows)))
    assert "Errors of 4 of 5 gradients were measured in training, in 3 looks;" in text
    assert "for the others, Gaussian values are assumed (blocks.0.bias)." in text


def test_a_mode_has_no_section_of_errors():
    choice = choose(WORKLOAD, COSTS, WHERE, Mode.BALANCED)
    timeline = simulate(plan_tasks(WORKLOAD, choice.plan, COSTS, WHERE))
    explanation = Explanation(choice.plan, timeline, WORKLOAD, COSTS, WHERE, choice, "balanced")
    assert "\nError\n" not in to_text(explanation)
    assert to_json(explanation)["budget"] is None


def test_what_layers_spend_and_weigh_adds_up_to_the_plan():
    for explanation in (explained("topk(0.01)"), explained("0.05", measured()), explained("int4")):
        layers = layers_of(explanation)
        assert sum(layer.spent for layer in layers) == pytest.approx(explanation.spent)
        assert sum(layer.squares for layer in layers) == pytest.approx(1.0)
        assert sum(layer.dense_bytes for layer in layers) == 4 * sum(WORKLOAD.sizes.values())
        gradients = to_json(explanation)["budget"]["gradients"]
        assert [each["name"] for each in gradients] == list(explanation.plan.names)
        assert sum(each["spent"] for each in gradients) == pytest.approx(explanation.spent)
        assert [layer.spent for layer in layers] == sorted((layer.spent for layer in layers), reverse=True)


def test_a_layer_saves_the_wire_time_of_its_part_of_each_bucket():
    plan = by_hand(measured()).plan
    explanation = by_hand(measured(), plan=plan.with_strategies([Strategy.flat(parse_compressor("int4"))] * 3))
    dense = explanation.plan.with_strategies([DENSE] * 3)
    saved = [before - after for before, after in zip(wire_us(dense), wire_us(explanation.plan), strict=True)]
    assert min(saved) > 0
    found = {row.name: row.saved_us for row in gradients_of(explanation)}
    assert found["head.weight"] == pytest.approx(saved[0])
    assert found["blocks.0.weight"] == pytest.approx(saved[2] * 800_000 / 802_000)
    assert sum(layer.saved_us for layer in layers_of(explanation)) == pytest.approx(sum(saved))
    assert all(layer.saved_us == 0.0 for layer in layers_of(by_hand(measured(), plan=dense)))


def test_a_gradient_in_two_buckets_is_one_row_with_both_strategies():
    int4 = Strategy.flat(parse_compressor("int4"))
    first, rest = 100_000, WORKLOAD.sizes["blocks.1.weight"] - 100_000
    others = tuple(name for name in WORKLOAD.sizes if name != "blocks.1.weight")
    plan = Plan(
        (
            Bucket(("blocks.1.weight",), (first,), int4, starts=(0,)),
            Bucket(("blocks.1.weight",), (rest,), DENSE, starts=(first,)),
            Bucket(others, tuple(WORKLOAD.sizes[name] for name in others), DENSE),
        )
    )
    timeline = simulate(plan_tasks(WORKLOAD, plan, COSTS, WHERE))
    budget = Budget(ErrorBudget.parse("0.2"))
    explanation = Explanation(plan, timeline, WORKLOAD, COSTS, WHERE, budget=budget)
    row = next(each for each in gradients_of(explanation) if each.name == "blocks.1.weight")
    assert row.strategies == (int4, DENSE)
    assert row.buckets == (0, 1)
    assert row.dense_bytes == 4 * (first + rest)
    assert row.spent == pytest.approx(explanation.spent)
    layers = {(layer.name, layer.strategies): layer for layer in layers_of(explanation)}
    assert layers["blocks.1.weight", (int4,)].buckets == (0,)
    both = layers["blocks.*.weight", (DENSE,)]
    assert both.buckets == (1, 2)
    assert both.names == ("blocks.1.weight", "blocks.0.weight")


def test_names_that_differ_in_a_number_are_alike():
    assert alike("blocks.11.up.weight") == "blocks.*.up.weight"
    assert alike("0.weight") == "*.weight"
    assert alike("layer1.0.conv1.weight") == "layer1.*.conv1.weight"
    assert alike("stack.3") == "stack.*"


def by_hand(table: ErrorTable, **changes: object) -> Explanation:
    """A plan that no search made: the head by top-k, one block by int4, the other dense."""
    topk, int4 = (Strategy.flat(parse_compressor(name)) for name in ("topk(0.01)", "int4"))
    plan = Plan(
        (
            Bucket(("head.weight",), (400_000,), topk),
            Bucket(("blocks.1.weight",), (800_000,), int4),
            Bucket(("blocks.1.bias", "blocks.0.weight", "blocks.0.bias"), (1000, 800_000, 1000), DENSE),
        )
    )
    timeline = simulate(plan_tasks(WORKLOAD, plan, COSTS, WHERE))
    budget = Budget(ErrorBudget.parse("0.2"), table)
    return replace(Explanation(plan, timeline, WORKLOAD, COSTS, WHERE, budget=budget), **changes)


def wire_us(plan: Plan) -> list[float]:
    """Time of each bucket's collectives."""
    sent = [sent_by(bucket, WHERE, WORKLOAD.shapes) for bucket in plan.buckets]
    return [sum(COSTS.collective(p.send.kind, p.send.level, p.size, WHERE).us for p in parts) for parts in sent]


def test_layers_stand_in_one_table(golden: Callable[[str, str], None]):
    text = to_text(by_hand(measured()))
    golden("report/layers.txt", text[text.index("Error\n") : text.index("Collectives\n")])


def test_a_pinned_layer_is_marked_in_the_json():
    pins = Pins.read({"head.*": "int8"})
    budget = Budget(ErrorBudget.parse("topk(0.01)"))
    choice = choose(WORKLOAD, COSTS, WHERE, Terms(Mode.BALANCED, pins=pins, budget=budget))
    timeline = simulate(plan_tasks(WORKLOAD, choice.plan, COSTS, WHERE))
    explanation = Explanation(choice.plan, timeline, WORKLOAD, COSTS, WHERE, choice, "balanced", budget=budget)
    pinned = {each["layer"]: each["pinned"] for each in to_json(explanation)["budget"]["layers"]}
    assert pinned.pop("head.weight") is True
    assert not any(pinned.values())


def test_many_layers_are_cut_short_and_all_of_them_are_in_the_json():
    gradients = tuple(Gradient(f"{chr(97 + k)}x.weight", (40, 40), 10.0, 1.0) for k in range(26))
    work = Workload(gradients, 20.0)
    plan = Plan((Bucket(tuple(work.sizes), (1600,) * 26, Strategy.flat(parse_compressor("int4"))),))
    timeline = simulate(plan_tasks(work, plan, COSTS, WHERE))
    budget = Budget(ErrorBudget.parse("0.2"))
    explanation = Explanation(plan, timeline, work, COSTS, WHERE, budget=budget)
    assert "2 other layers" in words(explanation)
    assert len(to_json(explanation)["budget"]["layers"]) == 26


def test_a_gradient_without_squares_has_no_error_of_its_own():
    table = measured()
    only = ErrorTable({**table.rows, "head.weight": replace(table.rows["head.weight"], squares=0.0)})
    head = next(each for each in to_json(by_hand(only))["budget"]["layers"] if each["layer"] == "head.weight")
    assert head["error"] is None


MOVES = (
    PlanMove(
        120, "the plan's error", (0.31, 0.19), 0.2, (40_000.0, 42_500.0), ("topk(0.003) -> topk(0.01) for 6.4 MB",)
    ),
    PlanMove(1120, "1000 steps have passed", (0.15, 0.19), 0.2, (42_500.0, 38_000.0), ("int8 -> int4 for 1.6 MB",)),
)


def test_a_running_step_shows_how_error_and_time_moved(golden: Callable[[str, str], None]):
    explanation = by_hand(measured(), moves=MOVES)
    text = to_text(explanation)
    golden("report/moves.txt", text[text.index("How the plan moved\n") : text.index("Collectives\n")])
    assert "Follows the gradients since step 1120." in text
    data = to_json(explanation)["moves"]
    assert [each["step"] for each in data] == [120, 1120]
    assert data[1]["step_ms"] == [42.5, 38.0]
    many = words(by_hand(measured(), moves=MOVES * 6))
    assert "12 changes of the plan since training began." in many
    assert "and 4 changes before these" in many


def test_a_plan_that_has_moved_is_no_plan_that_somebody_gave():
    chosen = explained("topk(0.01)")
    plan = by_hand(ASSUMED).plan
    timeline = simulate(plan_tasks(WORKLOAD, plan, COSTS, WHERE))
    moved = replace(chosen, plan=plan, timeline=timeline, moves=MOVES)
    text = words(moved)
    assert moved.has_moved
    assert "would choose another" not in text
    assert "chosen at first" in text
    assert not replace(chosen, moves=MOVES).has_moved
