"""Measuring a step: what it takes around its nodes and between them counts too."""

import copy
import re
import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from helpers.jobs import JOBS, OPTIMIZERS, captured_step, cross_entropy
from torch import nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen.program import Program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate, step_time_us
from fxcomp.frontends.what_if import capture_job, measured_here
from fxcomp.graph.captured import Captured
from fxcomp.graph.lines import timed_lines
from fxcomp.graph.regions import cut, regions
from fxcomp.graph.run_passes import finished
from fxcomp.graph.work import is_free
from fxcomp.passes.annotate_costs import cost_key
from fxcomp.pipeline import Compiler
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.planning import timed_steps
from fxcomp.planning.timed_steps import (
    FEEDS,
    HeldCollectives,
    StepMeasurement,
    TimedStep,
    Way,
    apportion,
    around_us,
    feed_costs,
    measurement,
)
from fxcomp.runtime.group import Work
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Call, Reading
from fxcomp.runtime.transport import NullTransport, Transport
from fxcomp.search.choose import uniform
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.inputs import Inputs

PAIR = Cluster(2, 1, intra=Link(1, 10), inter=Link(10, 1))


def dense_plan(captured: Captured) -> Plan:
    return uniform("dense", Compiler(PAIR).analyze(captured.graph, CostTable()), CostTable(), PAIR)


def dense_program(captured: Captured) -> Program:
    return finished(Compiler(PAIR).emit(captured, dense_plan(captured), CostTable()))


def test_what_a_step_does_around_its_nodes_comes_before_all_of_them():
    captured, compiler = captured_step("mlp"), Compiler(PAIR)
    steps: list[float] = []
    for costs in (CostTable(), CostTable(feed_us=500.0)):
        workload = compiler.analyze(captured.graph, costs)
        plan = uniform("dense", workload, costs, PAIR)
        searched = simulate(plan_tasks(workload, plan, costs, PAIR)).step_time_us
        assert finished(compiler.emit(captured, plan, costs)).timeline.step_time_us == pytest.approx(searched)
        steps += [workload.free_us, workload.gradients[0].ready_us, searched]
    assert [after - before for before, after in zip(steps[:3], steps[3:], strict=True)] == pytest.approx([500.0] * 3)


class _Clock:
    """A clock that feeding moves on: by 100, 10, 20, ... s."""

    def __init__(self) -> None:
        self.now_s, self.fed = 0.0, 0

    def perf_counter(self) -> float:
        return self.now_s

    def feed(self) -> None:
        self.now_s += 10.0 * self.fed or 100.0
        self.fed += 1


def test_feeding_is_the_median_of_a_few_times(monkeypatch: pytest.MonkeyPatch):
    clock = _Clock()
    monkeypatch.setattr(timed_steps, "time", clock)
    assert around_us(clock.feed) == pytest.approx(30e6)
    assert clock.fed == FEEDS + 1


def test_what_feeds_a_step_stands_beside_compute_where_a_device_works_later(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cpu")
    assert feed_costs(device, 5.0) == {"feed_us": 5.0}
    monkeypatch.setattr(timed_steps.compat, "works_later", lambda _: True)
    assert feed_costs(device, 5.0) == {"feed_us": 0.0, "host_us": 5.0}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_is_hidden_by_the_device_until_handing_it_out_takes_longest(micro_batches: int):
    job = JOBS["mlp"]
    model = job.build()
    asked = fxcomp.Job(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    _, captured = capture_job(asked)
    compiler = Compiler(PAIR, micro_batches=micro_batches)

    def step_us(costs: CostTable) -> float:
        workload = compiler.analyze(captured.graph, costs)
        plan = uniform("int8", workload, costs, PAIR)
        in_search = step_time_us(plan_tasks(workload, plan, costs, PAIR), costs.processors)
        assert finished(compiler.emit(captured, plan, costs)).timeline.step_time_us == pytest.approx(in_search)
        return in_search

    alone = step_us(CostTable())
    assert step_us(CostTable(host_us=0.9 * alone / micro_batches)) == pytest.approx(alone)
    assert step_us(CostTable(host_us=2.0 * alone)) == pytest.approx(2.0 * alone * micro_batches)


def test_a_question_about_a_job_includes_what_feeds_it():
    job = JOBS["mlp"]
    model = job.build()
    asked = fxcomp.Job(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    training, captured = capture_job(asked)
    costs, workload = measured_here(training, captured, asked.batch, CostTable(), Compiler(PAIR))
    assert costs.feed_us > 0.0
    without = Compiler(PAIR).analyze(
        captured.graph, CostTable(compute=costs.compute, pack_gb_per_s=costs.pack_gb_per_s)
    )
    assert workload.free_us == pytest.approx(without.free_us + costs.feed_us)


def test_updates_are_timed_where_gradients_are_not_finite_and_the_step_would_be_left_out():
    job = JOBS["mlp"]
    model = job.build()
    before = [p.detach().clone() for p in model.parameters()]
    asked = fxcomp.Job(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    training, captured = capture_job(asked)
    timed: list[set[str]] = []
    for batch in (asked.batch, (torch.full_like(asked.batch[0], torch.inf), asked.batch[1])):
        costs, _ = measured_here(training, captured, batch, CostTable(), Compiler(PAIR, skip_nonfinite=True))
        timed.append(set(costs.compute))
    assert timed[0] == timed[1]
    assert all(map(torch.equal, before, model.parameters()))


class Told(TimedStep):
    """A step that took what is told: buckets 10 us and more, starts 1 us and more, of buffers 1,000, waits 500."""

    def __init__(self, program: Program, buffers: int) -> None:
        self.program, self.way, self.node_us, self.handed_us = program, Way.OVERLAPPED, {}, 80.0
        calls = [call for _, call, _ in timed_lines(cut(program.graph))]
        self.told = {("region_0", 0): 100.0}
        for method, number in calls:
            us = {"pack": 10.0 * (number + 1), "launch": 1.0 + 2.0 * number, "wait": 500.0}.get(method)
            if us is not None:
                self.told[method, number] = 1000.0 if (method, number) == ("launch", buffers) else us

    @property
    def us(self) -> float:
        return 1e4

    def reading(self) -> Reading:
        return Reading({call: (50.0, 50.0 + us) for call, us in self.told.items()}, {}, {})

    def sum_of(self, method: str) -> float:
        return sum(us for call, us in self.told.items() if call[0] == method)


def test_packing_and_starts_are_summed_up_but_for_broadcasts(monkeypatch: pytest.MonkeyPatch):
    program = dense_program(captured_step("conv"))
    last = sum(call[0] == "launch" for _, call, _ in timed_lines(cut(program.graph))) - 1
    step = Told(program, last)
    buffers = next(node for node, call, _ in timed_lines(cut(program.graph)) if call == ("launch", last))
    monkeypatch.setattr(timed_steps, "_is_broadcast", lambda node: node is buffers)
    found = measurement([step, step])
    starts = [us for call, us in step.told.items() if call[0] == "launch" and us < 1000.0]
    assert len(starts) >= 1
    assert found.launch_us == statistics.median(starts)
    assert found.pack_us == step.sum_of("pack") > 0
    assert found.compute_us == 100.0 + step.sum_of("pack")
    assert found.between_us == 1e4 - sum(step.told.values()), "a wait for the network is not the host's"
    monkeypatch.setattr(timed_steps.compat, "works_later", lambda _: True)
    assert measurement([step]).between_us == 80.0, "a device hides what the host takes to hand a step out"


class Scattered(Told):
    """A step in which one call takes `late` us longer, which its total includes; 30 us are the host's."""

    def __init__(self, program: Program, call: Call, late: float) -> None:
        super().__init__(program, -1)
        self.told[call] += late

    @property
    def us(self) -> float:
        return 30.0 + sum(self.told.values())


def test_sums_are_taken_per_step():
    """The sum of medians would leave out what is late once, and count it as the host's time."""
    program = dense_program(captured_step("conv"))
    late = {("wait", 0): 200.0, ("wait", 1): 201.0, ("region_0", 0): 202.0}
    steps = [Scattered(program, *each) for each in late.items()]
    found = measurement(steps)
    usual_us = steps[0].us - 200.0
    assert found.step_us == pytest.approx(usual_us + 201.0)
    assert found.between_us == pytest.approx(30.0)
    assert found.wait_us == pytest.approx(steps[0].sum_of("wait"))
    assert found.compute_us == pytest.approx(100.0 + steps[0].sum_of("pack"))


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_calls_have_the_same_numbers_in_the_graph_and_in_a_running_step(name: str, *, is_weighted: bool):
    """The launch that sums the counts of a weighted loss has no task, but a number."""
    _, step = run_once(name, Way.OVERLAPPED, loss_fn=weighted if is_weighted else cross_entropy)
    reading = step.reading()
    assert reading is not None
    launches = re.findall(r'rt\.launch\("(\w+)"', step.program.source)
    assert [call for call in reading.main if call[0] == "launch"] == [("launch", k) for k in range(len(launches))]
    known = {call: node.name for node, call, _ in timed_lines(cut(step.program.graph)) if call[0] == "launch"}
    assert known == {("launch", k): name for k, name in enumerate(launches) if name != "all_reduce_count"}
    assert ("all_reduce_count" in launches) == is_weighted
    assert set(measurement([step]).region_us) == {region.name for region in regions(step.program.graph)}


def weighted(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> fxcomp.WeightedLoss:
    return fxcomp.WeightedLoss(cross_entropy(model, batch) * len(batch[1]), torch.tensor(len(batch[1])))


def run_once(
    name: str, way: Way, transport: Transport | None = None, loss_fn: Any = cross_entropy
) -> tuple[list[torch.Tensor], TimedStep]:
    """Train one step in a way; return the loss, parameters, buffers and optimizer state, and the step."""
    job = JOBS[name]
    model = job.build()
    asked = fxcomp.Job(model, loss_fn, OPTIMIZERS["adamw"](model.parameters()), job.batch(0, 0))
    training, captured = capture_job(asked)
    program, inputs = dense_program(captured), Inputs(training)
    site = Site.imagined(PAIR, torch.device("cpu"))
    state = GradientState.fresh(dense_plan(captured), inputs.shapes, site, ErrorFeedback())
    arguments = inputs.of(program, pytree.tree_leaves(asked.batch), state)
    runtime = Runtime(transport or NullTransport(), torch.device("cpu"))
    step = TimedStep(program, runtime, way)
    torch.manual_seed(3)
    with torch.no_grad():
        loss, _ = step.run(arguments)
    runtime.close()
    kept = [value for owner in training.owned for value in owner.state.values() if isinstance(value, torch.Tensor)]
    return [loss, *model.parameters(), *model.buffers(), *kept], step


@pytest.mark.parametrize("name", JOBS)
def test_a_step_trains_the_same_bits_in_every_way(name: str):
    as_any_other, _ = run_once(name, Way.OVERLAPPED)
    for way in (Way.HELD, Way.ONE_BY_ONE):
        found, _ = run_once(name, way)
        assert all(map(torch.equal, found, as_any_other)), way


@pytest.mark.parametrize("way", Way)
def test_every_region_bucket_and_start_of_a_step_is_timed(way: Way):
    _, step = run_once("conv", way)
    found = measurement([step])
    names = {region.name for region in regions(step.program.graph)}
    assert set(found.region_us) == (set() if way is Way.ONE_BY_ONE else names)
    working = {node.name for region in regions(step.program.graph) for node in region.nodes}
    assert set(step.node_us) == (working if way is Way.ONE_BY_ONE else set())
    assert found.pack_us > 0
    assert found.launch_us is not None
    assert found.pack_gb_per_s is not None
    assert found.step_us >= found.compute_us


class Recording(NullTransport):
    """Notes what a step launches and packs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def all_reduce(self, value: torch.Tensor, level: str, lane: str, how: str = "sum") -> Work:
        self.sizes.append(value.numel())
        return super().all_reduce(value, level, lane, how)


def test_held_collectives_start_in_their_order_where_one_is_waited_for():
    runtime = Runtime(network := Recording(), torch.device("cpu"))
    held = HeldCollectives(runtime)
    first, second = (held.launch(f"sum_{n}", "all_reduce", torch.full((n,), 1.0 * n), 1, "world") for n in (3, 5))
    assert network.sizes == []
    assert held.wait(second).tolist() == [5.0] * 5
    assert network.sizes == [3, 5]
    third = held.launch("sum_2", "all_reduce", torch.ones(2), 1, "world")
    assert held.wait(first).tolist() == [3.0] * 3
    assert network.sizes == [3, 5, 2], "what was launched since goes out with the next wait"
    assert held.wait(third).tolist() == [1.0] * 2
    runtime.close()
    plain, overlapped = Recording(), Recording()
    run_once("conv", Way.HELD, plain)
    run_once("conv", Way.OVERLAPPED, overlapped)
    assert plain.sizes == overlapped.sizes


def test_shares_of_a_region_are_equal_where_no_operator_was_timed_alone():
    program = dense_program(captured_step("mlp"))
    names = [region.name for region in regions(program.graph)]
    step = StepMeasurement(100.0, 0.1, dict.fromkeys(names, 12.0), 0.0, None, None)
    found = apportion(program, step, {}, "told")
    working = [[n for n in region.nodes if not is_free(n)] for region in regions(program.graph)]
    priced = sum(found[cost_key(node)].us for nodes in working for node in nodes)
    assert priced == pytest.approx(12.0 * sum(bool(nodes) for nodes in working))


class Unwritable(nn.Module):
    """Keeps what nobody may write into, and a frozen table whose rows the forward pass shortens."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        numpy.arange(4, dtype=numpy.float32).tofile(file)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shared", torch.ones(1).expand(4))
        with warnings.catch_warnings(action="ignore"):
            read_only = torch.from_numpy(numpy.memmap(file, numpy.float32, "r"))
        self.register_buffer("read_only", read_only)
        self.frozen = nn.Parameter(read_only.view(4), requires_grad=False)
        self.table = nn.Embedding(3, 4, max_norm=0.5).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.shared + self.read_only + self.frozen + self.table.weight.sum(0) + self.table(ROWS)


ROWS = torch.tensor([0, 2])


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_measuring_writes_into_nothing_that_a_step_only_reads_and_leaves_all_as_it_was(tmp_path: Path):
    model = Unwritable(tmp_path / "values")
    optimizer = torch.optim.AdamW(model.layer.parameters())
    job = fxcomp.Job(model, squares, optimizer, torch.ones(2, 4))
    before = copy.deepcopy(dict(model.state_dict()))
    training, captured = capture_job(job)
    measured_here(training, captured, job.batch, CostTable(), Compiler(PAIR))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert float(model.table.weight.norm(dim=1).max()) > 0.5, "nothing has shortened it"


class Masked(torch.optim.Optimizer):
    """Reads a mask that it keeps, and writes a mean."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept.update(mask=torch.ones_like(p), mean=torch.zeros_like(p))
                kept["mean"].mul_(0.9).add_(p.grad)
                p.add_(kept["mean"] * kept["mask"], alpha=-group["lr"])


def read_only(shape: torch.Size, file: Path) -> torch.Tensor:
    numpy.ones(shape, dtype=numpy.float32).tofile(file)
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(numpy.memmap(file, numpy.float32, "r", shape=tuple(shape)))


def inference(shape: torch.Size, _: Path) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(shape)


MASKS = {"expanded": lambda shape, _: torch.ones(1).expand(shape), "inference": inference, "read-only": read_only}
CALLS = torch.zeros(())


def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    CALLS.add_(1)
    return model(batch).square().mean()


@pytest.mark.parametrize("kind", MASKS)
def test_states_that_are_only_read_stay_and_what_is_written_is_put_back(kind: str, tmp_path: Path):
    model = nn.Linear(4, 4)
    optimizer = Masked(model.parameters())
    for number, p in enumerate(model.parameters()):
        optimizer.state[p].update(mask=MASKS[kind](p.shape, tmp_path / str(number)), mean=torch.ones_like(p))
    job = fxcomp.Job(model, counted, optimizer, torch.ones(2, 4))
    before, calls = copy.deepcopy(dict(model.state_dict())), float(CALLS)
    training, captured = capture_job(job)
    measured_here(training, captured, job.batch, CostTable(), Compiler(PAIR))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((optimizer.state[p]["mean"] == 1).all()) for p in model.parameters())
    assert float(CALLS) == calls
