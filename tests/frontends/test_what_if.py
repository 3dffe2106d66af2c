"""Asking about a cluster that is not here, on one process."""

import math
import re
from dataclasses import replace
from pathlib import Path

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
import torch.distributed as dist

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.compressors.examples import examples
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.errors import BadOption, BadPlan, Unsupported
from fxcomp.frontends import what_if as whatif
from fxcomp.frontends.job import Job, load_job
from fxcomp.frontends.what_if import WhatIf, capture_job, rewritten, scaled, what_if
from fxcomp.pipeline import Compiler
from fxcomp.plan.budget import plan_error, polluting_share
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import BURST_SHARES, UpdateKind
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import plan_as_given
from fxcomp.report.as_json import to_json
from fxcomp.report.explanation import Explanation
from fxcomp.report.terminal import to_text
from fxcomp.search.choose import uniform
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.workload import Gradient, Workload

LIBRARY = torch.library.Library("fxcomp_test_whatif", "DEF")
for name in ("mystery", "mystery_backward"):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp_test_whatif::{name}", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd(
    "fxcomp_test_whatif::mystery", lambda _, g: torch.ops.fxcomp_test_whatif.mystery_backward(g), lib=LIBRARY
)

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "mlp.py")


@pytest.fixture
def job() -> Job:
    return load_job(EXAMPLE)


def cluster(text: str, inter: str) -> Cluster:
    return Cluster.parse(text, intra=Link(5.0, 12.0), inter=Link.parse(inter))


def test_a_slow_link_is_worth_compressing_and_a_fast_one_is_not(job: Job):
    slow = what_if(job, cluster("2x1", "1mbit"))
    assert not slow.plan.is_dense
    assert slow.flip_gbit is None or slow.flip_gbit > 1e-3
    assert slow.timeline.step_time_us == pytest.approx(slow.choice.step_us)
    assert not dist.is_initialized()
    assert what_if(job, cluster("2x1", "1000gbit"), WhatIf(step_ms=1e6)).plan.is_dense


def test_the_prediction_changes_neither_parameters_nor_random_numbers(job: Job):
    before = [parameter.clone() for parameter in job.model.parameters()]
    state = torch.get_rng_state()
    what_if(job, cluster("2x2", "1gbit"))
    assert all(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_the_step_that_the_user_names_is_the_step_without_communication(job: Job):
    answer = what_if(job, cluster("4x2", "10gbit"), WhatIf(step_ms=250.0))
    assert answer.workload.free_us == pytest.approx(250e3)
    assert any("250 ms" in note for note in answer.notes)


def test_without_it_the_answer_says_whose_compute_it_is(job: Job):
    answer = what_if(job, cluster("2x1", "10gbit"))
    assert any("--step-ms" in note for note in answer.notes)


def test_the_optimizer_limits_what_may_come_in_bursts(job: Job):
    where, question = cluster("2x1", "1mbit"), WhatIf(compress=Compress.of("lossy"), device="h100")
    linear, adam = (make(job.model.parameters(), lr=0.1) for make in (torch.optim.SGD, torch.optim.AdamW))
    shares = [polluting_share(what_if(replace(job, optimizer=o), where, question).plan, where) for o in (linear, adam)]
    assert shares[0] > BURST_SHARES[UpdateKind.SECOND_MOMENT] >= shares[1]


def test_one_rank_needs_no_plan(job: Job):
    answer = what_if(job, cluster("1x1", "10gbit"))
    assert answer.flip_gbit is None
    assert answer.timeline.exposed_us == 0.0


def test_a_plan_that_is_asked_about_is_compared_with_the_choice(job: Job):
    where = cluster("2x1", "1mbit")
    answer = what_if(job, where, WhatIf(compress=Compress.of("dense")))
    assert answer.plan.is_dense
    assert answer.timeline.step_time_us >= answer.choice.step_us


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", [str(each) for each in examples() if each.name not in ("exact_bf16", "exact_fp16")])
def test_any_compressor_may_be_asked_about(text: str, job: Job):
    """On assumed costs here, which is quick; machine_costs measures every one in test_cost_measure.py."""
    where = cluster("3x1", "100mbit")
    _, captured = capture_job(job)
    costs = CostTable(error=0.0)
    workload = Compiler(where).analyze(captured.graph, costs)
    assert text in map(str, WhatIf(compress=Compress.of(text)).compressors)
    plan = plan_as_given(text, workload, costs, where)
    timeline = simulate(plan_tasks(workload, plan, costs, where))
    shown = to_text(Explanation(plan, timeline, workload, costs, where))
    assert f"{text}@main" in shown
    assert "assumed, by memory bandwidth" in shown
    assert math.isfinite(plan_error(plan, where))


def test_what_a_plan_needs_is_measured(job: Job):
    where = cluster("2x1", "100mbit")
    shown = to_text(what_if(job, where, WhatIf(compress=Compress.of("powersgd(2)"))))
    assert re.search(r"powersgd\(2\)@gpu +measured\n", shown)


def test_more_ranks_than_a_compressor_can_sum_are_refused(job: Job):
    where = cluster("64x2", "100mbit")
    with pytest.raises(BadOption, match="cannot sum the codes of 128 ranks"):
        what_if(job, where, WhatIf(compress=Compress.of("shared_int8")))


def test_a_step_of_no_time_is_refused(job: Job):
    with pytest.raises(BadOption, match=r"--step-ms .* 1e-06 to .*; it is 0"):
        what_if(job, cluster("2x1", "1gbit"), WhatIf(step_ms=0.0))


def test_a_plan_for_another_model_is_refused():
    mine = Workload((Gradient("w", (8, 1), 1.0, 0.0),), 1.0)
    theirs = Workload((Gradient("v", (8, 1), 1.0, 0.0),), 1.0)
    plan = uniform("dense", theirs, CostTable(), cluster("2x1", "1gbit"))
    with pytest.raises(BadPlan, match="for another model: it plans 'v', which has no gradient here"):
        plan.check_covers(mine.sizes)
    plan.check_covers(theirs.sizes)


def test_a_faster_device_is_faster_in_everything():
    slow = Workload((Gradient("w", (8, 1), 10.0, 4.0),), 12.0, finish_us=2.0, clips=True, host_us=30.0)
    assert slow.compute_us == 18.0
    assert scaled(slow, 0.5).free_us == slow.free_us / 2 == 15.0
    assert scaled(slow, 0.5).gradients[0].ready_us == 5.0


def test_the_graph_for_a_cluster_needs_no_clock():
    where = cluster("2x2", "10mbit")
    first, second = (rewritten(load_job(EXAMPLE), where).source for _ in range(2))
    assert first == second
    assert "all_reduce" in first or "all_gather" in first


def test_a_pass_that_does_not_exist_is_answered_with_those_that_do(job: Job):
    program = rewritten(job, cluster("2x1", "1gbit"))
    assert "pack_0" in {node.name for node in program.graph_after("bucket_gradients").graph.nodes}
    with pytest.raises(BadOption, match=r"no pass 'bucket'; the passes are sum_gradients, .*order_for_overlap"):
        program.graph_after("bucket")


def test_one_rank_runs_the_plain_step(job: Job):
    assert "all_reduce" not in rewritten(job, cluster("1x1", "1gbit")).source


def test_a_device_that_is_not_here_is_estimated_and_nothing_is_run(job: Job, monkeypatch: pytest.MonkeyPatch):
    def runs(*_: object, **__: object) -> None:
        raise AssertionError("an estimate ran something")

    monkeypatch.setattr(whatif, "machine_costs", runs)
    monkeypatch.setattr(whatif, "measured_here", runs)
    answer = what_if(job, cluster("4x2", "10gbit"), WhatIf(device="h100"))
    assert answer.choice.error > answer.costs.error
    shown, data = to_text(answer), to_json(answer)
    assert "estimate for NVIDIA H100 SXM" in shown
    assert "This is an estimate and may be off by" in shown
    assert "NVIDIA's H100 data sheet" in shown
    assert data["estimate"] == answer.costs.estimate
    assert data["compute"]["source"].endswith(f"(estimate: {answer.costs.estimate})")
    assert data["error"] == answer.choice.error
    assert answer.device is not None
    plan, eager = answer.device.steps[0], answer.device.steps[-1]
    assert (plan.name, eager.name) == ("the plan", "DDP, eager")
    assert f"the plan {plan.kernels} " in " ".join(shown.split())
    assert data["device"]["steps"][0]["launches"]["update"] == plan.launches["update"] > 0
    assert data["device"]["steps"][0]["memory"]["parameters"] == sum(4 * p.numel() for p in job.model.parameters())
    assert plan.kernels < eager.kernels


def test_a_faster_device_has_a_shorter_step_and_a_told_one_the_step_that_was_told(job: Job):
    where = cluster("2x1", "10gbit")
    steps = {device: what_if(job, where, WhatIf(device=device)) for device in ("l4", "h200")}
    assert steps["h200"].workload.free_us <= steps["l4"].workload.free_us
    told = what_if(job, where, WhatIf(device="h200", step_ms=100.0))
    assert told.workload.free_us == pytest.approx(100e3)
    assert told.costs.compute_error < steps["h200"].costs.compute_error
    assert told.costs.estimate


def test_a_device_without_a_preset_is_refused_before_anything_is_captured(job: Job):
    with pytest.raises(BadOption, match="there is no device 'h10'; did you mean 'h100'"):
        what_if(job, cluster("2x1", "1gbit"), WhatIf(device="h10"))


def test_what_is_unpriced_is_counted_and_listed():
    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mystery = torch.ops.fxcomp_test_whatif.mystery
        return mystery(mystery(model(batch))).mean()

    model = torch.nn.Linear(4, 4)
    job = Job(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    answer = what_if(job, cluster("2x1", "1gbit"), WhatIf(device="a100"))
    explained = replace(answer, unknowns=replace(answer.unknowns, unpriced=(("tick", 3),)))
    assert answer.unknowns.by_bytes == (("mystery", 2), ("mystery_backward", 2))
    shown, data = to_text(explained), to_json(explained)
    assert "4 calls: mystery x 2, mystery_backward x 2" in shown
    assert re.search(r"unpriced +3 calls: tick x 3", shown)
    assert data["compute"]["unpriced"] == [{"operator": "tick", "count": 3}]
    assert data["compute"]["by_bytes"][0] == {"operator": "mystery", "count": 2}


def test_every_mode_is_answered(job: Job):
    for mode in Mode:
        answer = what_if(job, cluster("2x1", "10mbit"), WhatIf(compress=Compress(within=mode.value)))
        assert isinstance(answer.plan, Plan)
        assert answer.plan.is_dense or mode is not Mode.LOSSLESS


def test_a_model_in_bf16_sends_half_the_bytes():
    shown: list[str] = []
    sent: list[int] = []
    where = cluster("2x1", "1gbit")
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(512, 256, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Job(
            model, lambda model, batch: model(batch).float().square().mean(), optimizer, torch.ones(4, 512, dtype=dtype)
        )
        explained = what_if(job, where, WhatIf(device="h100", compress=Compress.of("dense")))
        shown.append(to_text(explained))
        sent.append(sum(bucket["bytes"] for bucket in to_json(explained)["plan"]["buckets"]))
    elements = 512 * 256 + 256
    assert sent == [4 * elements, 2 * elements]
    assert "2 gradients, 0.525 MB" in shown[0]
    assert "2 gradients in bf16, 0.263 MB" in shown[1]


def test_a_step_may_sum_up_micro_batches(job: Job):
    once, four = (what_if(job, cluster("2x1", "100mbit"), WhatIf(device="a100", accumulate=n)) for n in (1, 4))
    passes = once.workload.backward_us
    assert four.workload.backward_us == pytest.approx(4 * passes, rel=0.4), "and the sums"
    assert four.micro_batches == 4
    with pytest.raises(BadOption, match="number of micro-batches"):
        what_if(job, cluster("2x1", "1mbit"), WhatIf(accumulate=0))


AT_MOMENTUM = Compress(plan="cmax(16)", at="momentum", steps=1000)


def test_the_work_around_a_moved_exchange_is_priced(job: Job):
    where, job = cluster("4x1", "100mbit"), replace(job, optimizer=torch.optim.AdamW(job.model.parameters()))
    answer = what_if(job, where, WhatIf(device="h100", compress=AT_MOMENTUM, step_ms=100.0))
    moved = [each for each in answer.workload.gradients if each.name in answer.plan.moved]
    assert moved
    assert all(each.own_us > 0 and each.moved_us > 0 for each in moved)
    free = replace(answer.workload, gradients=tuple(replace(g, own_us=0.0) for g in answer.workload.gradients))
    without = simulate(plan_tasks(free, answer.plan, answer.costs, where), answer.costs.processors)
    assert answer.step_us > without.step_time_us
    assert ", at the momentum" in to_text(answer)
    assert {bucket.get("at") for bucket in to_json(answer)["plan"]["buckets"]} == {"momentum", None}


@pytest.mark.parametrize(
    ("changes", "compress", "refused", "what"),
    [
        ({"make": torch.optim.RMSprop}, AT_MOMENTUM, Unsupported, "it keeps no mean of gradients"),
        ({"max_grad_norm": 1.0}, AT_MOMENTUM, BadOption, "does not go with max_grad_norm="),
        ({}, replace(AT_MOMENTUM, steps=None), BadOption, "there is no warm-up"),
    ],
)
def test_momenta_that_compile_step_refuses_are_not_predicted(job: Job, changes, compress, refused, what):
    make = changes.pop("make", torch.optim.AdamW)
    job = replace(job, optimizer=make(job.model.parameters()), **changes)
    with pytest.raises(refused, match=what):
        what_if(job, cluster("4x1", "100mbit"), WhatIf(device="h100", compress=compress))
