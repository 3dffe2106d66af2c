"""The report: texts on hand-built workloads, and arithmetic that adds up."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.explained import COSTS, by_hand, cluster, explanation, workload

from fxcomp.compressors import kernels, parse_compressor
from fxcomp.cost.measured import MeasuredCollective
from fxcomp.cost.timeline import Task, simulate
from fxcomp.plan.kinds import CollectiveKind, Stream
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket
from fxcomp.plan.strategy import DENSE, Device, Strategy
from fxcomp.report.accumulation import accumulated
from fxcomp.report.as_json import to_json
from fxcomp.report.document import short
from fxcomp.report.draw_timeline import draw_timelines
from fxcomp.report.explanation import exposed_by_bucket, parts_us
from fxcomp.report.terminal import encodable, to_text
from fxcomp.search.choose import Alternative, choose, uniform
from fxcomp.search.decision import Raced
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.runners import Runner
from fxcomp.search.workload import Gradient, Workload


@pytest.fixture(autouse=True)
def same_kernels_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "describe", lambda: "compression on the CPU: C++ kernels (_kernels.so)")


def test_a_compressed_plan_is_explained(golden: Callable[[str, str], None]):
    golden("report/compress.txt", to_text(by_hand()))


def test_a_plan_that_stays_dense_names_the_faster_one(golden: Callable[[str, str], None]):
    known = by_hand().choice
    assert known is not None
    tasks = [Task("region 0", Stream.COMPUTE, 200_000.0), Task("all_reduce 0", Stream.INTER, 9_000.0, ("region 0",))]
    others = tuple((Alternative(Strategy.hierarchical(None), us),) for us in (208_500.0, 209_000.0, 209_000.0))
    dense = replace(
        known, plan=known.dense, dense_us=209_000.0, fastest_us=205_000.0, bf16_us=207_000.0, alternatives=others,
        runners=(replace(known.runners[0], step_us=205_000.0, wins=0.4), replace(known.runners[1], step_us=209_000.0)),
    )  # fmt: skip
    golden(
        "report/dense.txt", to_text(by_hand(choice=dense, plan=known.dense, timeline=simulate(tasks), flip_gbit=None))
    )


def measured(runner: Runner, ms: float, steps: int) -> Runner:
    return replace(runner, measured_ms=ms, steps=steps)


def test_a_race_shows_what_each_runner_was_predicted_and_measured_at_and_what_it_cost():
    choice = by_hand().choice
    assert choice is not None
    fastest, dense = choice.runners
    idle = replace(dense, name="bf16")
    runners = (measured(fastest, 21.5, 12), measured(dense, 40.5, 1), idle)
    explained = by_hand(raced=Raced(runners, 0, 2, 17, 43.0))
    text = " ".join(to_text(explained).split())
    assert "predicted best 19.96 ms 21.50 ms 12 stays" in text
    assert "dense 40.00 ms 40.50 ms 1" in text
    assert "bf16 40.00 ms not timed 0" in text
    assert "The plans took turns in steps 2 to 16, which cost 43.00 ms: 0.2% of the first 1,000 steps." in text
    data = to_json(explained)
    assert [each["measured_ms"] for each in data["race"]["runners"]] == [21.5, 40.5, None]
    assert data["race"]["winner"] == "predicted best"
    assert [each["wins"] for each in data["runners"]] == [0.95, 0.0]


def test_a_plan_that_the_race_measured_best_is_no_plan_that_somebody_gave():
    choice = by_hand().choice
    assert choice is not None
    fastest, dense = choice.runners
    runners = (measured(fastest, 50.0, 12), measured(dense, 40.5, 12))
    explained = by_hand(plan=choice.dense, raced=Raced(runners, 1, 2, 17, 43.0))
    text = " ".join(to_text(explained).split())
    assert "Do not compress Measured in a race of 2 plans: dense stays with 40.5 ms a step; predicted best 50." in text
    assert "chosen by prediction 19.96 ms" in text
    assert "would choose another" not in text
    turn = " ".join(to_text(replace(explained, is_racing=True)).split())
    assert "The plan in use is dense; plans are racing, and this is its turn" in turn


def test_a_race_says_why_the_lowest_time_lost():
    choice = by_hand().choice
    assert choice is not None
    best, dense = choice.runners
    noise = str(Raced((measured(best, 40.0, 12), measured(dense, 40.4, 12)), 1, 2, 17, 43.0))
    assert (
        "dense stays with 40.4 ms a step; predicted best 40. predicted best is lower by 1.0%, less than the steps vary:"
        " of plans that the clock cannot distinguish, the plan that loses least of the gradient stays." in noise
    )
    allocating = str(Raced((measured(best, 40.0, 0), measured(dense, 40.4, 12)), 1, 2, 17, 43.0))
    assert "predicted best ran only the first step of a turn, which allocates and does not count." in allocating
    clear = Raced((measured(best, 41.0, 12), measured(dense, 40.4, 12)), 1, 2, 17, 43.0)
    assert clear.rule_that_decided == ""


def test_a_race_without_a_timed_step_says_so():
    choice = by_hand().choice
    assert choice is not None
    raced = Raced(choice.runners, 0, 2, 102, 0.0)
    assert "predicted best stays, because no step was timed by all ranks" in str(raced)


def test_a_measured_step_stands_beside_its_prediction():
    text = to_text(explanation(cluster("1gbit"), measured_ms=40.0, exposed_ms=11.0))
    assert "measured" in text
    assert "exposed: 11.00 ms measured" in text


def test_a_plan_that_was_given_is_told_from_the_choice():
    where = cluster("1gbit")
    plan = uniform("dense", workload(), COSTS, where)
    text = to_text(explanation(where, plan=plan, timeline=simulate(plan_tasks(workload(), plan, COSTS, where))))
    assert "The plan in use is dense; fxcomp would choose another" in text
    assert "Not taken" not in text


def test_a_shorter_step_that_was_not_taken_is_called_shorter_and_says_why():
    dense_first = by_hand()
    choice = dense_first.choice
    assert choice is not None
    others = ((Alternative(DENSE, choice.step_us - 180.0),), (Alternative(DENSE, choice.step_us),), ())
    text = " ".join(to_text(replace(dense_first, choice=replace(choice, alternatives=others))).split())
    assert "0.18 ms shorter" in text
    assert "19.96 ms none" in text
    assert "by exact prices, this plan was the best of those compared" in text
    int8 = Alternative(choice.plan.buckets[0].strategy, choice.step_us - 180.0)
    unsure = replace(choice, alternatives=((int8,), (), ()), fastest=choice.dense)
    text = " ".join(to_text(replace(dense_first, choice=unsure)).split())
    assert "must save 1% of the step in 75% of the draws, and the best one does so in 0%." in text
    assert "-0." not in text.partition("Not taken")[2].partition("Collectives")[0]


def test_a_report_without_a_comparison_says_what_it_knows():
    explained = explanation(cluster("1gbit"), choice=None)
    assert "against dense" in to_text(explained)
    assert to_json(explained)["step_ms"]["dense"] is None


def test_links_that_were_measured_are_listed_and_the_cluster_is_not_believed():
    kind = CollectiveKind.ALL_REDUCE
    fits = {(kind, "2x1"): MeasuredCollective.line(kind, 2, 30.0, 0.125, 0.02, "measured, 12 samples")}
    text = to_text(explanation(cluster("1gbit"), costs=replace(COSTS, collectives=fits)))
    assert "links as measured" in text
    assert "30 us a step, 1gbit a rank; off by 2.0 % (measured, 12 samples)" in text


def test_one_rank_has_nothing_to_explain_but_its_compute():
    text = to_text(explanation(cluster("1gbit", 1, 1)))
    assert "Do not compress" in text
    assert "Break-even bandwidth" not in text


def test_buffers_that_are_broadcast_have_a_line_of_their_own():
    where = cluster("1mbit")
    shared = replace(workload(), broadcast_bytes=400_000, broadcast_ready_us=100.0)
    choice = choose(shared, COSTS, where, Mode.BALANCED)
    timeline = simulate(plan_tasks(shared, choice.plan, COSTS, where))
    assert exposed_by_bucket(timeline)[None] > 0
    assert "buffers" in to_text(explanation(where, workload=shared, choice=choice, plan=choice.plan, timeline=timeline))


def test_the_parts_of_a_step_add_up():
    for where in (cluster("100mbit"), cluster("3gbit", 4, 2), cluster("1tbit")):
        explained = explanation(where)
        assert sum(parts_us(explained.timeline).values()) == pytest.approx(explained.step_us)
        line = next(line for line in to_text(explained).splitlines() if line.startswith("  compute ") and "=" in line)
        left, right = line.removesuffix(" ms").split(" = ")
        assert sum(float(part.split()[-1]) for part in left.split(" + ")) == pytest.approx(float(right), abs=1e-9)


def test_a_host_that_takes_longer_is_a_part_of_its_own():
    where, slow = cluster("1gbit"), replace(workload(), host_us=1e6)
    choice = choose(slow, COSTS, where, Mode.BALANCED)
    timeline = simulate(plan_tasks(slow, choice.plan, COSTS, where))
    assert timeline.step_time_us == slow.free_us == 1e6
    assert None not in exposed_by_bucket(timeline)
    parts = parts_us(timeline)
    assert parts["host"] == pytest.approx(1e6 - timeline.done_us)
    assert sum(parts.values()) == pytest.approx(1e6)
    text = to_text(explanation(where, workload=slow, choice=choice, plan=choice.plan, timeline=timeline))
    assert "host " in next(line for line in text.splitlines() if line.startswith("  compute ") and "=" in line)


def test_a_host_hands_out_each_micro_batch_of_a_group():
    where, slow = cluster("1gbit"), replace(workload(), host_us=1e7)
    choice = choose(slow, COSTS, where, Mode.BALANCED)
    timeline = simulate(plan_tasks(slow, choice.plan, COSTS, where))
    told = explanation(where, workload=slow, choice=choice, plan=choice.plan, timeline=timeline, micro_batches=4)
    assert [plan_us for _, _, plan_us in accumulated(told)] == pytest.approx([1e7 / 4] * 5)


def test_the_waits_of_all_buckets_add_up_to_the_exposed_time():
    for seed in range(50):
        timeline = simulate(random_tasks(random.Random(seed)))
        assert sum(exposed_by_bucket(timeline).values()) == pytest.approx(timeline.exposed_us), seed


def random_tasks(chance: random.Random) -> list[Task]:
    tasks: list[Task] = []
    for k in range(chance.randint(1, 12)):
        stream = chance.choice(list(Stream))
        known = [task.name for task in tasks]
        after = tuple(chance.sample(known, min(len(known), chance.randint(0, 2))))
        name = chance.choice(("region", "all_reduce", "compress", "d2h"))
        tasks.append(Task(f"{name}_{k}", stream, chance.choice((0.0, 1.0, 2.5, 7.0)), after))
    return tasks


def test_a_wait_belongs_to_the_bucket_on_the_wire_at_that_moment():
    tasks = [
        Task("region 0", Stream.COMPUTE, 10.0),
        Task("all_reduce 0", Stream.INTER, 20.0, ("region 0",)),
        Task("all_reduce 1", Stream.INTER, 5.0, ("region 0",)),
        Task("update 1", Stream.COMPUTE, 1.0, ("all_reduce 1",)),
    ]
    assert exposed_by_bucket(simulate(tasks)) == {0: 20.0, 1: 5.0}


def test_names_of_the_graph_and_of_the_search_lead_to_their_bucket():
    for name in ("all_gather@intra 3", "start all_reduce_3_bf16", "d2h_3", "all_gather_3_intra", "h2d 3"):
        tasks = [Task(name, Stream.INTER, 4.0), Task("update", Stream.COMPUTE, 1.0, (name,))]
        assert exposed_by_bucket(simulate(tasks)) == {3: 4.0}, name


def test_sent_bytes_are_those_between_hosts():
    int8, where = parse_compressor("int8"), cluster("1gbit", 4, 2)
    work = Workload((Gradient("w", (1000, 8), 1.0, 0.0),), 1.0)
    explained = explanation(where, workload=work)
    dense = Bucket(("w",), (8000,), Strategy.flat(None))
    assert explained.sent_bytes(dense) == 2 * 7 / 8 * 32_000
    levels = Bucket(("w",), (8000,), Strategy.hierarchical(int8))
    assert explained.sent_bytes(levels) == 3 * int8.payload_bytes((4000,))
    thin = Bucket(("w",), (8000,), Strategy.flat(parse_compressor("powersgd(1)")))
    assert explained.sent_bytes(thin) == 2 * 7 / 8 * 4 * (1000 + 8)


def test_strategies_have_short_names():
    topk = parse_compressor("topk(0.01)")
    assert short(Strategy.flat(None)) == "dense"
    assert short(Strategy.hierarchical(topk, Device.CPU)) == f"{topk} by level on cpu"


def test_every_width_is_readable_and_never_exceeded():
    explained = explanation(cluster("1gbit", 4, 2), measured_ms=40.0, exposed_ms=11.0)
    for width in (20, 40, 63, 64, 80, 100, 200):
        assert all(len(line) <= width for line in to_text(explained, width=width).splitlines()), width


def test_a_narrow_report_keeps_its_numbers(golden: Callable[[str, str], None]):
    golden("report/narrow.txt", to_text(by_hand(), width=40))


def test_only_colors_bring_escape_codes():
    explained = explanation(cluster("1gbit"))
    assert "\x1b" not in to_text(explained)
    assert "\x1b[" in to_text(explained, colors=True)


def test_letters_that_the_terminal_lacks_become_ascii():
    text = encodable(to_text(explanation(cluster("1gbit"))), "ascii")
    assert text.isascii()
    assert "# compute" in text
    assert encodable("█", "utf-8") == "█"
    assert encodable("█ ☃", None) == "# ?"


def test_the_report_goes_to_json():
    data = json.loads(json.dumps(to_json(explanation(cluster("1gbit")))))
    assert data["verdict"] == "compress"
    assert set(data["step_ms"]) == {"chosen", "dense", "bf16", "free", "bound"}
    assert data["step_ms"]["free"] < data["step_ms"]["bound"] <= data["step_ms"]["chosen"]
    assert sum(bucket["elements"] for bucket in data["plan"]["buckets"]) == 2_401_000
    assert data["plan"]["buckets"][0].keys() >= {"names", "elements", "bytes", "strategy"}
    assert data["flip_gbit"] > 1
    assert data["error"] == 0.1
    assert data["measured_ms"] is None
    assert data["cluster"]["hosts"] == 2
    assert not any(isinstance(ms, float) and math.isnan(ms) for ms in data["step_ms"].values())


def test_a_slow_link_is_compared_with_accumulating_more():
    asked = explanation(cluster("300mbit"))
    rows = accumulated(asked)
    assert [number for number, _, _ in rows] == [1, 2, 4, 8, 16]
    assert rows[0][1:] == pytest.approx((asked.choice.dense_us if asked.choice else 0.0, asked.step_us))
    times = [dense_us for _, dense_us, _ in rows]
    assert times == sorted(times, reverse=True), "what is sent once counts less and less"
    assert "Accumulation" in to_text(asked)
    assert to_json(asked)["accumulation"][0]["micro_batches"] == 1


def test_a_fast_link_is_not():
    asked = explanation(cluster("400gbit"))
    assert not accumulated(asked)
    assert "Accumulation" not in to_text(asked)


def test_a_step_of_many_micro_batches_says_so():
    where, many = cluster("300mbit"), workload().after_compute(3 * workload().backward_us)
    choice = choose(many, COSTS, where, Mode.BALANCED)
    timeline = simulate(plan_tasks(many, choice.plan, COSTS, where))
    asked = explanation(where, workload=many, choice=choice, plan=choice.plan, timeline=timeline, micro_batches=4)
    assert "4 micro-batches a step" in to_text(asked)
    by_number = {number: us for number, *us in accumulated(asked)}
    assert by_number[4][1] == pytest.approx(asked.step_us / 4)
    assert by_number[1][0] == pytest.approx(accumulated(explanation(where))[0][1], rel=0.05)


def one_task(us: float):
    return simulate([Task("region 0", Stream.COMPUTE, us)])


@pytest.mark.parametrize(("dense_us", "chosen_us", "drawn"), [(900.0, 600.0, [88, 59]), (900.0, 300.0, [88, 29, 88])])
def test_timelines_share_a_scale_and_a_short_one_is_enlarged(dense_us: float, chosen_us: float, drawn: list[int]):
    lines = draw_timelines([("dense", one_task(dense_us)), ("chosen", one_task(chosen_us))], width=100)
    assert [line.count("█") for line in lines if "█" in line] == drawn


def test_one_timeline_is_drawn_once():
    lines = draw_timelines([("this plan", one_task(0.0))], width=100)
    assert [line.split(",")[0].split()[0] for line in lines] == ["this", "0"]
