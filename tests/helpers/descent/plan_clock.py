"""Simulate the step of a plan in numbers: the tasks of `plan_tasks.assemble`; csrc/plan_clock.h does the same.

Where no two tasks lack a processor each starts when its stream and its predecessors are done, so one look at each, in
the order of issue, is enough. Where they share processors that gives a bound, and the simulator gives the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxcomp.cluster.cluster import Processors
from fxcomp.cost.timeline import Task, simulate
from fxcomp.plan.kinds import POOL, Stream
from fxcomp.plan.plan import launch_order
from fxcomp.search.descent.problem import NOTHING, PLACE, Problem
from fxcomp.search.descent.templates import BACKWARD, REGION
from fxcomp.search.plan_tasks import ROUNDING_US
from helpers.descent.priced_parts import Record

_COMPUTE = PLACE[Stream.COMPUTE]
_POOL = frozenset(PLACE[stream] for stream in POOL)
_STREAMS = tuple(Stream)


class PlanClock:
    """Simulates plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem

    def alone_us(self, plan: Sequence[Record]) -> float:
        """Return the step without shared processors; with them no step is shorter."""
        return _Walk(self.p, plan).step_us

    def step_us(self, plan: Sequence[Record]) -> float:
        walk = _Walk(self.p, plan)
        if not self.p.shares:
            return walk.step_us
        # Loads and speeds are what they are here: the simulator must not find a spare processor and drop the speeds.
        return simulate(walk.tasks, Processors(self.p.processors, self.p.compute)).step_time_us


class _Walk:
    """Issues the tasks of one plan."""

    def __init__(self, problem: Problem, plan: Sequence[Record]) -> None:
        self.p, self.plan = problem, plan
        self.tasks: list[Task] = []
        self.ends: list[float] = []
        self.clocks = [0.0] * len(PLACE)
        self.come_to = 0
        """The main thread's last task."""
        self.regions: list[int] = []
        self.places: list[list[int]] = [[] for _ in plan]
        """The numbers of each bucket's tasks, as far as they were issued."""
        self.broadcast = self.backward = -1
        self.done_us = self.entered_us = 0.0
        self._walk()
        self.step_us = max(self.clocks)

    def _add(self, stream: int, us: float, after: Sequence[int], demand: float = 0.0, beside: float = 1.0) -> int:
        start = self.clocks[stream]
        for other in after:
            start = max(start, self.ends[other])
        self.clocks[stream] = start + us
        self.ends.append(start + us)
        number = len(self.ends) - 1
        if stream == _COMPUTE:
            self.come_to = number
        if self.p.shares:
            names = tuple(map(str, after))
            self.tasks.append(Task(str(number), _STREAMS[stream], us, names, demand, beside))
        return number

    def _compute(self, us: float, after: Sequence[int] = ()) -> int:
        return self._add(_COMPUTE, us, after, self.p.compute)

    def _share_buffers(self, after: int) -> None:
        p = self.p
        load, beside = min(p.broadcast_load, p.processors), p.broadcast_beside
        self.broadcast = self._add(p.broadcast_stream, p.broadcast_us, (after,), load, beside)

    @property
    def _must_share(self) -> bool:
        return self.p.broadcast_stream >= 0 and self.broadcast < 0

    def _enter(self) -> None:
        """Compute down to the next bucket's last gradient."""
        ready_us = self.plan[len(self.regions)].ready_us
        us = ready_us - self.entered_us
        self.entered_us = ready_us
        if self._must_share and self.done_us + us + ROUNDING_US >= self.p.broadcast_ready_us:
            first = max(0.0, min(self.p.broadcast_ready_us - self.done_us, us))
            self._share_buffers(self._compute(first))
            self.done_us += first
            us -= first
        self.regions.append(self._compute(us))
        self.done_us += us

    def _stage(self, number: int, size: int, *, is_started: bool) -> None:
        """Issue the next tasks of a bucket. The pool begins a stage when the main thread has done what comes before."""
        p, record, places = self.p, self.plan[number], self.places[number]
        first, begin = p.template_tasks[record.pattern], len(places)
        for k in range(begin, begin + size):
            task = first + k
            after = [self._place(number, p.follows[f]) for f in range(p.task_follows[task], p.task_follows[task + 1])]
            stream = p.task_stream[task]
            if is_started and k == begin and stream in _POOL:
                after.append(self.come_to)
            places.append(self._add(stream, record.us[k], after, record.demand[k], record.beside[k]))

    def _place(self, number: int, task: int) -> int:
        if task >= 0:
            return self.places[number][task]
        return {REGION: self.regions[number], BACKWARD: self.backward}[task]

    def _walk(self) -> None:
        p = self.p
        stages = [p.template_stages[record.pattern : record.pattern + 2] for record in self.plan]
        for launch in launch_order(tuple(end - begin for begin, end in stages)):
            while len(self.regions) <= launch.region:
                self._enter()
            size = p.stage_tasks[stages[launch.bucket][0] + launch.stage]
            self._stage(launch.bucket, size, is_started=True)
        while len(self.regions) < len(self.plan):
            self._enter()
        self.backward = self._compute(max(0.0, p.backward_us - self.done_us))
        if self._must_share:
            self._share_buffers(self.backward)
        self._finish()

    def _finish(self) -> None:
        """Issue what comes after backward."""
        p = self.p
        for number, record in enumerate(self.plan):
            tasks = p.template_tasks[record.pattern + 1] - p.template_tasks[record.pattern]
            self._stage(number, tasks - len(self.places[number]), is_started=False)
            if not p.updates_wait:
                self._compute(record.update_us, self._arrived(number))
        if p.commits:
            self._update_buffers()
        if p.updates_wait:
            self._compute(p.finish_us, [task for number in range(len(self.plan)) for task in self._arrived(number)])
            for number, record in enumerate(self.plan):
                self._compute(record.update_us, self._arrived(number))
        if not p.commits:
            self._update_buffers()

    def _arrived(self, number: int) -> list[int]:
        arrival = self.p.template_arrival[self.plan[number].pattern]
        return [] if arrival == NOTHING else [self._place(number, arrival)]

    def _update_buffers(self) -> None:
        if self.p.broadcast_stream >= 0:
            self._compute(self.p.buffers_us, (self.broadcast,))
