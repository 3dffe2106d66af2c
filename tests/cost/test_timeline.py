"""The simulator: streams run in order, predecessors are waited for."""

from fxcomp.cost.timeline import Stream, Task, Timeline, simulate, step_time_us


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


def test_the_step_time_is_the_timelines():
    tasks = [Task(f"t{k}", list(Stream)[k % 4], k * 1.5, after=(f"t{k - 3}",) if k > 2 else ()) for k in range(40)]
    assert step_time_us(tasks) == simulate(tasks).step_time_us
