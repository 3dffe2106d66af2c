"""The section of an error budget: what is lost by layer, and why."""

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.error_tables.columns import STANDARD
from fxcomp.error_tables.table import Row
from fxcomp.plan.budget import Budget, ErrorBudget
from fxcomp.plan.error_budget import plan_error
from fxcomp.plan.modes import Mode
from fxcomp.report.as_json import to_json
from fxcomp.report.explanation import Explanation
from fxcomp.report.terminal import to_text
from fxcomp.search.choose import choose
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.terms import Terms
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
    """A table in which the head has most of the squares, and every compressor loses a tenth of it."""
    rows = {
        name: Row(shape, 90.0 if name == "head.weight" else 1.0, (0.1,) * STANDARD.count, samples)
        for name, shape in WORKLOAD.shapes.items()
    }
    return ErrorTable(STANDARD, rows, ("head.weight: a note of the table",))


def words(explanation: Explanation) -> str:
    return " ".join(to_text(explanation).split())


def test_a_budget_stands_in_the_place_of_the_mode_and_of_its_bound():
    text = words(explained("topk(0.01)"))
    assert "error budget topk(0.01)" in text
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
    assert "Errors are assumed to be those of Gaussian values" in words(explained("int4"))
    text = words(explained("0.2", measured()))
    assert "Errors of every gradient were measured in training, in 3 looks." in text
    assert "head.weight: a note of the table" in text


def test_a_mode_has_no_section_of_errors():
    choice = choose(WORKLOAD, COSTS, WHERE, Mode.BALANCED)
    timeline = simulate(plan_tasks(WORKLOAD, choice.plan, COSTS, WHERE))
    explanation = Explanation(choice.plan, timeline, WORKLOAD, COSTS, WHERE, choice, "balanced")
    assert "\nError\n" not in to_text(explanation)
    assert to_json(explanation)["budget"] is None
