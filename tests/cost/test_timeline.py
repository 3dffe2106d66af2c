"""The simulator: streams run in order, predecessors are waited for, processors are shared."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomp.cluster.cluster import UNSHARED, Processors
from fxcomp.compressors import kernels
from fxcomp.cost.timeline import Task, Timeline, simulate, step_time_us, step_times_us
from fxcomp.plan.kinds import Stream

ONE = Processors(1.0, 1.0)
WIRES = (Stream.INTRA, Stream.INTER)


def test_a_stream_runs_its_tasks_one_after_the_other():
    timeline = simulate([Task("a", Stream.COMPUTE, 2.0), Task("b", Stream.COMPUTE, 3.0)])
    assert [span.start_us for span in timeline.spans] == [0.0, 2.0]
    assert timeline.step_time_us == 5.0


def test_a_task_waits_for_what_it_follows_on_another_stream():
    tasks = [
        Task("a", Stream.COMPUTE, 2.0),
        Task("send", Stream.INTER, 5.0, after=("a",)),
        Task("b", Stream.COMPUTE, 1.0),
        Task("use", Stream.COMPUTE, 1.0, after=("send",)),
    ]
    timeline = simulate(tasks)
    assert [span.end_us for span in timeline.spans] == [2.0, 7.0, 3.0, 8.0]
    assert timeline.exposed_us == 4.0
    assert timeline.busy_us(Stream.INTER) == 5.0


def test_no_task_takes_no_time():
    assert simulate([]) == Timeline(())
    assert simulate([]).step_time_us == step_time_us([]) == 0.0


def test_tasks_that_wait_for_each_other_are_a_mistake():
    with pytest.raises(AssertionError, match="tasks wait for each other"):
        simulate([Task("a", Stream.CPU, 1.0, after=("b",)), Task("b", Stream.INTER, 1.0, after=("a",))])


# Sharing


def beside(load: float, processors: Processors) -> Timeline:
    """Compute for 10 µs, and a collective of 10 µs beside it."""
    return simulate([Task("send", Stream.INTER, 10.0, load=load), Task("a", Stream.COMPUTE, 10.0)], processors)


def test_a_transport_takes_its_share_from_compute_and_no_more():
    timeline = beside(0.2, ONE)
    send, compute = timeline.spans
    assert send.end_us == pytest.approx(10.0)
    assert compute.end_us == pytest.approx(12.0)
    assert compute.slowed_us == pytest.approx(2.0)
    assert timeline.slowed_us(Stream.COMPUTE) == pytest.approx(2.0)
    assert timeline.exposed_us == 0.0


def test_two_that_want_a_whole_processor_get_half_of_it():
    assert [span.end_us for span in beside(1.0, ONE).spans] == pytest.approx([20.0, 20.0])
    # From half a processor on, an equal share is less than the transport asks for.
    send, compute = beside(0.8, ONE).spans
    assert send.end_us == pytest.approx(16.0)
    assert compute.end_us == pytest.approx(18.0)


def test_a_spare_processor_slows_nobody():
    for processors in (UNSHARED, Processors(2.0, 1.0), Processors(16.0, 15.0)):
        assert [span.end_us for span in beside(1.0, processors).spans] == [10.0, 10.0]
    assert [p.has_spare for p in (UNSHARED, Processors(2.0, 1.0), Processors(16.0, 15.0), ONE)] == [True] * 3 + [False]


def test_compute_with_many_threads_weighs_as_many():
    send, compute = beside(1.0, Processors(3.0, 3.0)).spans
    assert compute.end_us == pytest.approx(10.0 * 4 / 3, rel=0.1)
    assert send.end_us == pytest.approx(10.0 * 4 / 3)


def test_ranks_that_share_a_processor_were_measured_sharing_it():
    assert [span.end_us for span in beside(0.0, Processors(0.5, 0.5)).spans] == [10.0, 10.0]
    assert beside(0.1, Processors(0.5, 0.5)).spans[1].end_us == pytest.approx(12.0)


def test_a_transport_that_waits_for_its_turn_is_slow_only_beside_compute():
    tasks = [Task("send", Stream.INTER, 10.0, load=0.2, overlap_speed=0.5), Task("a", Stream.COMPUTE, 10.0)]
    send, compute = simulate(tasks, ONE).spans
    # 0.2 processors at half speed: compute runs at 0.9, and the other half of the transfer at full speed after it.
    assert compute.end_us == pytest.approx(10 / 0.9)
    assert send.end_us == pytest.approx(10 / 0.9 + 10 - 0.5 * 10 / 0.9)
    assert [span.end_us for span in simulate(tasks, Processors(2.0, 1.0)).spans] == [10.0, 10.0]


# Properties


@st.composite
def steps(draw: st.DrawFn) -> list[Task]:
    """Steps like ours: compute down to a bucket, its collective, then the updates."""
    count = draw(st.integers(1, 8))
    times = st.floats(0.0, 100.0)
    tasks: list[Task] = []
    for k in range(count):
        tasks.append(Task(f"region {k}", Stream.COMPUTE, draw(times)))
        before = tasks[-1].name
        if draw(st.booleans()):
            tasks.append(Task(f"compress {k}", Stream.CPU, draw(times), (before,), 1.0))
            before = tasks[-1].name
        load, beside = draw(st.floats(0.0, 1.5)), draw(st.floats(0.05, 1.0))
        tasks.append(Task(f"send {k}", draw(st.sampled_from(WIRES)), draw(times), (before,), load, beside))
    tasks += [Task(f"update {k}", Stream.COMPUTE, draw(times), (f"send {k}",)) for k in range(count)]
    return tasks


room = st.sampled_from([UNSHARED, ONE, Processors(0.5, 0.5), Processors(2.0, 1.0), Processors(2.5, 2.0)])


@settings(max_examples=300)
@given(steps(), room)
def test_a_step_takes_at_least_its_longest_stream_and_at_most_the_sum(tasks: list[Task], processors: Processors):
    step = simulate(tasks, processors).step_time_us
    longest = max(sum(task.duration_us for task in tasks if task.stream is stream) for stream in Stream)
    assert longest - 1e-9 <= step <= sum(task.duration_us for task in tasks) + 1e-9


@settings(max_examples=300)
@given(steps(), room)
def test_streams_keep_their_order_and_nothing_starts_too_early(tasks: list[Task], processors: Processors):
    timeline = simulate(tasks, processors)
    ends = {span.task.name: span.end_us for span in timeline.spans}
    free = dict.fromkeys(Stream, 0.0)
    for span in timeline.spans:
        assert span.start_us >= free[span.task.stream]
        assert all(span.start_us >= ends[name] for name in span.task.after)
        assert span.end_us - span.start_us >= span.task.duration_us - 1e-9
        free[span.task.stream] = span.end_us


@settings(max_examples=200)
@given(steps(), room)
def test_processors_are_never_handed_out_twice(tasks: list[Task], processors: Processors):
    """Between two moments at which nothing changed, no more is used than there is."""
    timeline = simulate(tasks, processors)
    if processors is UNSHARED:
        return
    used = sum(
        span.task.duration_us
        * (processors.compute if span.task.stream is Stream.COMPUTE else min(span.task.load, processors.count))
        for span in timeline.spans
    )
    assert used <= processors.count * timeline.step_time_us * (1 + 1e-9) + 1e-9


@pytest.mark.skipif(not kernels.available(), reason="no kernels are built")
@settings(max_examples=500)
@given(steps(), room)
def test_the_kernel_gives_the_references_bits(tasks: list[Task], processors: Processors):
    assert step_time_us(tasks, processors) == simulate(tasks, processors).step_time_us


def test_without_kernels_the_reference_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert step_time_us([Task("a", Stream.COMPUTE, 2.0)], ONE) == 2.0


@pytest.mark.parametrize("has_kernels", [True, False])
def test_rows_of_durations_are_steps_of_their_own(has_kernels: bool, monkeypatch: pytest.MonkeyPatch):
    tasks = [Task("a", Stream.COMPUTE, 2.0), Task("b", Stream.INTER, 5.0, ("a",)), Task("c", Stream.COMPUTE, 1.0)]
    if not has_kernels:
        monkeypatch.setattr(kernels, "available", lambda: False)
    assert step_times_us(tasks, [[2.0, 5.0, 1.0], [3.0, 0.5, 4.0], [0.0, 0.0, 0.0]], ONE) == [7.0, 7.0, 0.0]


@settings(max_examples=300)
@given(steps(), st.floats(1.0, 100.0))
def test_a_faster_network_never_hurts_a_step_that_does_not_share(tasks: list[Task], factor: float):
    def over(speed: float) -> float:
        return step_time_us(
            [replace(t, duration_us=t.duration_us / speed) if t.stream in WIRES else t for t in tasks], UNSHARED
        )

    assert over(factor) <= over(1.0) * (1 + 1e-9)


def test_a_random_order_of_names_changes_nothing():
    tasks = [Task(f"t{k}", list(Stream)[k % 4], k * 1.5, (f"t{k - 3}",) if k > 2 else (), 0.3) for k in range(40)]
    names = {task.name: f"n{n}" for n, task in enumerate(random.Random(0).sample(tasks, len(tasks)))}
    renamed = [replace(t, name=names[t.name], after=tuple(names[a] for a in t.after)) for t in tasks]
    assert step_time_us(renamed, ONE) == step_time_us(tasks, ONE)
