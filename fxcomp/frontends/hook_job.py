"""Run the buckets of one DistributedDataParallel model: dense at first, then by a plan that all ranks share.

    pass 0 ... 5     no plan yet: each bucket is averaged as it comes, and it is noted when it came
    from then on     the plan's emitted step, fed with each bucket as it comes

The first passes change DDP's buckets: after one pass, or two with `static_graph=True`, it rebuilds them in the order in
which gradients became ready. What belongs to a plan is kept by parameter name, so it does not matter. A pass whose
buckets are not known beforehand is gathered, and runs when its last bucket has come.

Nothing is sent from another thread: the emitted step runs inside the hook, stands still only where the plan says, and
ends in the hook of the last bucket. So an error leaves `backward()` as it was raised.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import RanksApart, UnsupportedFeature
from fxcomp.frontends.hook_program import DdpBucket, HookProgram, Layout, Running, arriving
from fxcomp.frontends.hook_start import ReadyTimes, Start, decide, following
from fxcomp.frontends.hook_unused import Unused
from fxcomp.pipeline import Compiler
from fxcomp.report.explanation import Explanation
from fxcomp.runtime.runtime import Runtime
from fxcomp.search.choose import flip_gbit
from fxcomp.search.decision import Decision
from fxcomp.search.raced import Raced
from fxcomp.search.runners import lined_up
from fxcomp.state.checkpoint import PLAN
from fxcomp.state.saved_state import Given
from fxcomp.step.follower import Followed, Follower
from fxcomp.step.lockstep import Lockstep
from fxcomp.step.race import WARM_STEPS, Race
from fxcomp.step.step_times import StepTimes

log = logging.getLogger(__name__)

Future = torch.futures.Future[Tensor]

REBUILT = 3
"""Passes after which DDP rebuilds its buckets no more: one, and with static_graph=True two (measured, torch 2.13)."""

DENSE_PASSES = 6
"""Passes before there is a plan: after the buckets have settled, three are timed."""


class Arriving(Protocol):
    """A bucket that a backward pass hands over, as torch describes it."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


def delivered(buffer: Tensor) -> Future:
    """Make a future that is done."""
    future = _pending(buffer)
    future.set_result(buffer)
    return future


def _pending(buffer: Tensor) -> Future:
    return torch.futures.Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])


@dataclass(slots=True)
class Arrived:
    """What has come of the backward pass under way."""

    kinds: list[DdpBucket] = field(default_factory=list[DdpBucket])
    buffers: list[Tensor] = field(default_factory=list[Tensor])
    futures: list[Future] = field(default_factory=list[Future])

    def deliver(self) -> None:
        """Let DDP have its buffers back: they hold the means."""
        for future, buffer in zip(self.futures, self.buffers, strict=True):
            future.set_result(buffer)


CLOSED = (
    "what averages these gradients has been closed.\n"
    "  Set it up again, on all ranks: a new DistributedDataParallel with a new fxcomp.ddp_hook(), or average_replicas."
)


class HookJob:
    """The plan of one model, the state of its error feedback, and the backward pass under way."""

    def __init__(self, start: Start, given: Given):
        self._start, self._site, self._given = start, start.site, given
        self._scaler = start.options.scaler
        self._lockstep = Lockstep(self._site.ranks, CLOSED)
        self._runtime = Runtime(self._site.transport, self._site.device)
        self._compiler = Compiler(
            self._site.cluster, self._site.rank, start.options.compress.feedback, skip_nonfinite=True
        )
        self.passes = 0
        self._follower: Follower | None = None
        """What passes follow, once there is a plan."""
        self._race: Race | None = None
        self._raced: Raced | None = None
        """The race that is over."""
        self._programs: dict[tuple[int, Layout], HookProgram] = {}
        """By the number of the plan."""
        self.program: HookProgram | None = None
        """The program that ran last."""
        self._kinds: dict[tuple[int, ...], DdpBucket] = {}
        """The buckets seen so far, by their parameters."""
        self._arrived = Arrived()
        self._running: Running | None = None
        self._gathers = False
        """The pass under way runs when its last bucket has come."""
        self._times = ReadyTimes(self._site.device)
        self._unused: Unused | None = None
        self.times = StepTimes(self._site.device)
        """From the end of one planned pass to the end of the next."""
        self._ended: Any = None
        self._flip_gbit: tuple[float | None] | None = None
        """Where the verdict changes, once somebody has asked: that takes a second or so."""

    @property
    def decision(self) -> Decision | None:
        """What passes follow now; None before there is a plan."""
        return None if self._follower is None else self._follower.decision

    @property
    def _planned(self) -> Follower:
        assert self._follower is not None, "there is a plan by now"
        return self._follower

    @property
    def _is_planned(self) -> bool:
        return self._follower is not None or self._start.is_planned

    @property
    def is_racing(self) -> bool:
        """Plans take turns, or will after passes that are not counted."""
        return self._race is not None

    @property
    def may_keep(self) -> bool:
        """Tell a pass in which something may be left out of the mean, and is owed."""
        return self._is_planned and (self._follower is None or self._follower.state.keeps_something)

    # Running

    def take(self, bucket: Arriving) -> Future:
        """Take the next bucket of a backward pass."""
        with torch.no_grad(), compat.without_autocast():
            try:
                if self.passes < DENSE_PASSES:
                    self._times.enter()
                future = self._take(bucket)
                if self.passes < DENSE_PASSES:
                    self._times.leave()
            except BaseException as error:
                self.stop(error)
                raise
            return future

    def stop(self, error: BaseException) -> None:
        """End the pass under way, in which something was raised; the other ranks learn of it."""
        self._arrived, self._running, self._unused = Arrived(), None, None
        self._lockstep.leave(error, self._runtime)

    def _take(self, bucket: Arriving) -> Future:
        number, buffer, arrived = bucket.index(), bucket.buffer(), self._arrived
        if number != len(arrived.kinds):
            raise RanksApart(
                f"bucket {number} came where bucket {len(arrived.kinds)} was due: the backward pass before did not"
                " reach every parameter.\n  Pass find_unused_parameters=True to DistributedDataParallel."
            )
        kind, future = self._kind(bucket, buffer.dtype), _pending(buffer)
        arrived.kinds.append(kind)
        arrived.buffers.append(buffer)
        arrived.futures.append(future)
        if number == 0:
            self._enter(kind)
        if not self._is_planned:
            buffer.mul_(1 / self._site.ranks.world_size)
            self._site.sum_over_ranks(buffer)
        elif not self._gathers:
            self._feed(number)
        if bucket.is_last():
            self._finish()
        return future

    def _kind(self, bucket: Arriving, dtype: torch.dtype) -> DdpBucket:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._kinds:
            self._kinds[key] = self._start.wrapped.bucket(parameters, dtype)
        return self._kinds[key]

    def _enter(self, first: DdpBucket) -> None:
        """Begin a pass: with the step of the last pass's buckets, if they are sure to come again."""
        self._lockstep.enter(self.passes)
        self._lockstep.has_begun = True
        program = self.program
        self._gathers = self.passes < REBUILT or program is None or program.layout[0] != first
        if program is not None and not self._gathers:
            self._begin(program)

    def _begin(self, program: HookProgram) -> None:
        self._planned.now.follow_scale(1.0 if self._scaler is None else self._scaler.get_scale())
        state = self._planned.state
        self._running = program.start(self._runtime, state)
        if self._start.wrapped.finds_unused and state.keeps_something:
            self._unused = Unused(state)

    def _feed(self, number: int) -> None:
        """Hand a bucket to the step under way."""
        program, kind = self.program, self._arrived.kinds[number]
        assert program is not None, "a step is under way"
        if self._running is None or program.layout[number] != kind:
            raise UnsupportedFeature(
                f"DistributedDataParallel has changed its buckets in the middle of training: bucket {number} begins"
                f" with {kind.names[0]!r} now.\n  Register the hook before the first backward pass."
            )
        views = kind.with_views(self._arrived.buffers[number])
        if self._unused is not None:
            self._unused.look_at(kind, views)
        owed = self._planned.state.owed
        for name, gradient in zip(kind.names, views[1:], strict=True):
            if name in owed:
                gradient.add_(owed[name].view(gradient.shape))
        program.lend(number, views[0], self._runtime)
        try:
            self._running.send(views)
        except StopIteration as end:
            self._running = None
            program.hand_back(end.value[1], self._arrived.buffers)

    def _finish(self) -> None:
        """End a pass: every bucket has come."""
        layout = tuple(self._arrived.kinds)
        if self.passes < DENSE_PASSES:
            self._times.end_pass(layout)
        if self._is_planned:
            self._end_step(layout)
        self._arrived.deliver()
        self._arrived = Arrived()
        self.passes += 1
        if self._race is not None and self.passes == self._race.turn_ends:
            self._end_turn(self._race, layout)
        if not self._is_planned and self.passes >= DENSE_PASSES:
            self._decide(layout)

    def _end_step(self, layout: Layout) -> None:
        """End the step that a pass has fed, and time it if it streamed."""
        if self._gathers:
            self._run_gathered(layout)
        assert self._running is None, "a step ends with its last bucket"
        self._runtime.finish()
        counters = self._runtime.take_counters()
        if not counters.skipped:
            self._planned.state.settle()
        if self._unused is not None:
            self._unused.put_back(layout, self._arrived.buffers, self._site)
            self._unused = None
        end = self.times.look()
        if self._ended is not None and not self._gathers:
            self.times.add(self.passes, [(self._ended, end)], counters.waits)
        self._ended = end

    def _run_gathered(self, layout: Layout) -> None:
        """Run a pass whose buckets have all come."""
        if self._follower is None:
            self._decide(layout)
        self.program = self._program_for(layout, self._planned.now)
        self._begin(self.program)
        for number in range(len(layout)):
            self._feed(number)

    # Deciding

    def _decide(self, layout: Layout) -> None:
        """Agree on a plan with all ranks, and take back a state that was loaded before."""
        with self._site.ranks.together("ddp_hook"):
            compute_us = self._times.medians_us(layout, self._site.device)
            decision = decide(self._start, self._compiler, layout, compute_us)
            self._follower = Follower(self._start.trained, decision)
            self._load(self._given)
            self._line_up(decision, layout)
        self._given = None
        self.program = self._program_for(layout, self._planned.now)
        log.info("%s\n%s", self._site.cluster, decision.plan)

    def _line_up(self, decision: Decision, layout: Layout) -> None:
        """Let the plan and the others that may be faster take turns after the next passes; every rank does it here."""
        runners = lined_up(decision.choice.runners, decision.plan) if decision.choice is not None else ()
        if runners:
            self._planned.line_up([runner.plan for runner in runners[1:]])
            for followed in self._planned.racing:
                self._program_for(layout, followed)
            self._race = Race(runners, self.passes + WARM_STEPS)

    def _end_turn(self, race: Race, layout: Layout) -> None:
        """Agree on what the turn's passes took, and let the next plan have its turn, or the best one stay."""
        race.end_turn(self.times.slowest(race.timed_steps, self._site))
        self.times.forget()
        if race.result is None:
            self._planned.take_turn(race.current)
        else:
            self._planned.settle_on(race.result.winner)
            self._planned.tell(str(race.result))
            self._race, self._raced = None, race.result
        self.program = self._program_for(layout, self._planned.now)
        self._runtime.forget_buffers()
        self._ended = self.times.look()

    def _program_for(self, layout: Layout, followed: Followed) -> HookProgram:
        key = followed.number, layout
        if key not in self._programs:
            compute_us = self._times.medians_us(layout, self._site.device)
            graph = arriving(layout, compute_us, self._site.device)
            plan, costs = followed.decision.plan, followed.decision.costs
            compiler = replace(self._compiler, skip_nonfinite=self._start.trained.keeps_something(plan))
            self._programs[key] = HookProgram.made(layout, graph, compiler, plan, costs)
        return self._programs[key]

    def explanation(self) -> Explanation:
        """Gather what a report is made of; there is a plan."""
        decision, program, terms, cluster = self.decision, self.program, self._start.terms, self._site.cluster
        assert decision is not None, "a report is of a plan"
        assert program is not None, "a plan has a program"
        if decision.choice is not None and cluster.hosts > 1 and self._flip_gbit is None:
            self._flip_gbit = (flip_gbit(decision.workload, decision.costs, cluster, terms),)
        return Explanation(
            plan=decision.plan,
            timeline=program.timeline,
            workload=decision.workload,
            costs=decision.costs,
            cluster=cluster,
            choice=decision.choice,
            mode=terms.mode.value,
            flip_gbit=self._flip_gbit[0] if self._flip_gbit else None,
            notes=(*decision.notes, *self._site.ranks.notes),
            measured_ms=self.times.median_ms,
            exposed_ms=self.times.exposed_ms,
            budget=terms.budget,
            raced=self._raced,
            is_racing=self.is_racing,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state; empty before there is a plan."""
        follower = self._follower
        if follower is None:
            return {}
        under = follower.racing[0] if follower.racing else follower.now
        plan = under.decision.plan  # followed where it is loaded, so it is not one whose turn it just is
        return {**follower.state_dict(under, plan, self.passes), PLAN: plan.to_json()}

    def load_state_dict(self, given: Given) -> None:
        """Take back a state, or keep it until there is a plan; every rank calls it."""
        self._lockstep.check_open()
        if self._follower is None:
            ranks = self._site.ranks
            with ranks.together("load_state_dict"):
                options, loads = following(self._start.options, given, ranks)
                self._start = replace(self._start, options=options, loads=loads)
            self._given = given
            return
        with self._site.ranks.together("load_state_dict", after_a_stop=True):
            self._load(given)

    def _load(self, given: Given) -> None:
        follower = self._planned
        steps = follower.load(given, {follower.decision.plan.digest})
        if steps is not None and self._race is not None and self.program is not None:  # it begins again
            runners = lined_up(self._race.runners, follower.decision.plan)
            self._race = Race(runners, self.passes + WARM_STEPS)
            self.program = self._program_for(self.program.layout, follower.now)
            self._runtime.forget_buffers()

    def close(self) -> None:
        """End the pool's thread and give back the process groups; other ranks need not be there."""
        self._lockstep.close(self._runtime)
