"""Measuring a step: what it takes around its nodes and between them counts too."""

import copy
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from helpers.jobs import JOBS, OPTIMIZERS, captured_step, cross_entropy
from helpers.ranks import run_alone
from torch import nn

import fxcomp
from fxcomp.capture.step_guard import StepGuard
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen.program import Program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate, step_time_us
from fxcomp.frontends.what_if import capture_job, measured_here
from fxcomp.graph.captured import Captured
from fxcomp.graph.regions import regions
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.planning import decide, measure_step
from fxcomp.planning.measure_step import FEEDS, StepMeasurement, _MeasuredRun, feed_costs, feed_us
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport
from fxcomp.search.choose import uniform
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.inputs import Example, Inputs

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


def test_feeding_is_the_median_of_a_few_times_and_what_lies_between_the_lines(monkeypatch: pytest.MonkeyPatch):
    clock = _Clock()
    monkeypatch.setattr(measure_step, "time", clock)
    alone = StepMeasurement(100.0, 0.0, {"a": 80.0}, 10.0, None, None, {}, between_us=7.0)
    assert feed_us(alone, clock.feed) == pytest.approx(30e6 + 7.0)
    assert clock.fed == FEEDS + 1


def test_what_feeds_a_step_stands_beside_compute_where_a_device_works_later(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cpu")
    assert feed_costs(device, 5.0) == {"feed_us": 5.0}
    monkeypatch.setattr(measure_step.compat, "works_later", lambda _: True)
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


def test_packing_and_starts_are_summed_up_but_for_broadcasts(monkeypatch: pytest.MonkeyPatch):
    """Buckets take 10 us and more, starts 1 us and more, a start of buffers 1,000, and the regions 100."""
    run = _MeasuredRun(dense_program(captured_step("conv")), Runtime(NullTransport(), torch.device("cpu")))
    run.runtime.close()
    packs = {call: 10.0 * (call[1] + 1) for call in run._nodes if call[0] == "pack"}
    starts = {call: 1.0 + 2.0 * call[1] for call in run._nodes if call[0] == "launch"}
    assert len(packs) == len(starts) > 1
    buffers = starts.popitem()[0]
    monkeypatch.setattr(measure_step, "_is_broadcast", lambda node: node is run._nodes[buffers])
    for call, us in {**packs, **starts, buffers: 1000.0, ("region_0", 0): 100.0}.items():
        run._us[call] = [us, us]
    run.totals.append(1e4)
    found = run.measurement({})
    assert found.launch_us == statistics.median(starts.values())
    assert found.pack_us == sum(packs.values())
    assert found.compute_us == 100.0 + sum(packs.values())
    assert found.between_us == 1e4 - 100.0 - sum(packs.values()) - sum(starts.values())
    monkeypatch.setattr(measure_step.compat, "works_later", lambda _: True)
    run._handed += [70.0, 90.0, 80.0]
    run._starting_us |= {call: [40.0, 60.0, 50.0] for call in starts}
    found = run.measurement({})
    assert found.between_us == 80.0, "a device hides what the host takes to hand a step out"
    assert found.launch_us == statistics.median(starts.values()), "it does not hide what its own stream takes"
    assert found.starting_us == 50.0 * len(starts)


def test_what_the_host_takes_to_start_collectives_is_the_mean_over_networks_beyond_what_it_takes_without_one():
    alone, *others = (StepMeasurement(1.0, 0.0, {}, 0.0, None, None, {}, starting_us=us) for us in (2.0, 10.0, 20.0))
    assert decide._starting_us(alone, others) == 13.0
    assert decide._starting_us(alone, []) == 0.0


def test_every_region_bucket_and_start_of_a_step_is_timed():
    job = JOBS["conv"]
    model = job.build()
    asked = fxcomp.Job(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))
    training, captured = capture_job(asked)
    program, inputs = dense_program(captured), Inputs(training)
    site = Site.imagined(PAIR, torch.device("cpu"))
    state = GradientState.fresh(dense_plan(captured), inputs.shapes, site, ErrorFeedback())
    example = Example(captured, inputs, pytree.tree_leaves(asked.batch), StepGuard(training))
    (found,) = measure_step.measure_step(program, example.arguments(program, state), [NullTransport()], 2)
    assert set(found.region_us) == {region.name for region in regions(program.graph)}
    assert found.pack_us > 0
    assert found.launch_us is not None
    assert found.pack_gb_per_s is not None
    assert found.step_us >= found.compute_us


STARTING_US = 1e9


def measured() -> tuple[int, int, int, bool, list[CostTable]]:
    """Return the most memory of a step and of measuring it, the parameters' bytes, if all is as it was, and costs."""
    from helpers import late

    machine, device = late.start(), torch.device(late.DEVICE)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).to(device)
    batch = torch.randn(2, 128).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training, captured = capture_job(fxcomp.Job(model, lambda m, b: m(b).square().mean(), optimizer, batch))
    program, inputs = dense_program(captured), Inputs(training)
    state = GradientState.fresh(dense_plan(captured), inputs.shapes, Site.imagined(PAIR, device), ErrorFeedback())
    arguments = Example(captured, inputs, [batch], StepGuard(training)).arguments(program, state)
    held = machine.held_bytes[1]

    def most(run: Callable[[], object]) -> int:
        machine.most_bytes[1] = machine.held_bytes[1]
        run()
        machine.drain()
        return machine.most_bytes[1] - held

    with torch.no_grad():
        of_step = most(lambda: program.module.step(Runtime(NullTransport(), device), *arguments))
    before = [value.detach().cpu() for values in arguments for value in values if isinstance(value, torch.Tensor)]
    of_measuring = most(lambda: measure_step.measure_step(program, arguments, [NullTransport()], 2))
    after = [value.detach().cpu() for values in arguments for value in values if isinstance(value, torch.Tensor)]
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    is_as_before = all(map(torch.equal, before, after))
    compiler, site = Compiler(PAIR), Site.imagined(PAIR, device)
    example, plan = Example(captured, inputs, [batch], StepGuard(training)), dense_plan(captured)
    with patch.object(decide, "_starting_us", return_value=STARTING_US):
        costs = CostTable(**decide._measured_now(compiler, site, example, CostTable(), plan))
    asked, _ = measured_here(training, captured, batch, CostTable(), compiler)
    return of_step, of_measuring, parameter_bytes, is_as_before, [costs, asked]


def test_measuring_a_step_holds_no_second_copy_on_the_device_and_keeps_the_hosts_time_beside_compute():
    of_step, of_measuring, parameter_bytes, is_as_before, tables = run_alone(measured)
    assert is_as_before
    assert of_measuring < of_step + parameter_bytes / 2
    for costs in tables:
        assert costs.feed_us == 0.0
        assert costs.host_us > 0.0
    assert tables[1].host_us < STARTING_US < tables[0].host_us, "the host starts collectives besides"


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
