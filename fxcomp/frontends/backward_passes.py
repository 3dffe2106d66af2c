"""Follow a plan in backward passes that are somebody else's: dense at first, then by a plan that all ranks share.

    pass 0 ... 5     dense, while it is timed when each bucket of gradients is ready
    then             a plan; those that may be faster take turns with it, and the fastest stays

A plan that was given is followed from the first pass on. What runs a pass is a class of its own: the hook
(`hook_job.py`), and what scatters gradients (`scatter_job.py`).
"""

from __future__ import annotations

import logging
import statistics
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.timeline import Timeline
from fxcomp.frontends.hook_program import Layout, arriving
from fxcomp.frontends.start import Start
from fxcomp.runtime.clock import Clock, Waits
from fxcomp.runtime.runtime import Counters, Runtime
from fxcomp.search.decision import Decision, Raced
from fxcomp.search.runners import lined_up
from fxcomp.site import NOBODY
from fxcomp.state.checkpoint import PLAN
from fxcomp.state.saved_state import Given
from fxcomp.step.calendar import Calendar
from fxcomp.step.executor import Executor
from fxcomp.step.explain import metrics_of
from fxcomp.step.follower import Followed, Follower
from fxcomp.step.schedule import Schedule
from fxcomp.step.step_times import StepTimes

log = logging.getLogger(__name__)

DENSE_PASSES = 6
"""Passes before there is a plan: after DDP's buckets have settled, three are timed."""

TIMED = 3
"""The number of passes whose buckets are timed: the plan is chosen by when they were ready."""

_NO_SCALER = (
    "fxcomp: a GradScaler scales losses in this process, and was not handed over: when its scale changes, what"
    " compression left out weighs as much more or less, once.\n  Pass scaler=scaler where compress= is passed."
)


class ReadyTimes:
    """Times the compute before each bucket of the last passes, without what the hook itself takes."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._last: Any = None
        self._pass: list[tuple[Any, Any]] = []
        self._passes: deque[tuple[Layout, list[tuple[Any, Any]]]] = deque(maxlen=TIMED)

    def enter(self) -> None:
        """A bucket has come."""
        now = self._clock.look()
        self._pass.append((now if self._last is None else self._last, now))

    def leave(self) -> None:
        """Compute goes on."""
        self._last = self._clock.look()

    def end_pass(self, layout: Layout) -> None:
        """Every bucket has come, and these were they."""
        self._passes.append((layout, self._pass))
        self._pass = []

    def medians_us(self, layout: Layout, device: torch.device) -> list[float]:
        """The compute before each bucket; zeros where no pass had these buckets. Waits for the device."""
        compat.synchronize(device)
        passes = [looks for known, looks in self._passes if known == layout]
        if not passes:
            return [0.0] * len(layout)
        return [
            statistics.median(self._clock.us(*looks) or 0.0 for looks in each) for each in zip(*passes, strict=True)
        ]


class BackwardPasses(ABC):
    """The backward passes of one model, what they follow, and what is kept of their gradients."""

    def __init__(self, what: str, start: Start, closed: str, given: Given = None):
        self.start, self.site = start, start.site
        self._what, self._given = what, given
        self.executor = Executor(self.site.ranks, closed)
        self.runtime = Runtime(self.site.transport, self.site.device)
        self.passes = 0
        """Those of this process."""
        self._passes_before = 0
        """Those of the job before, where a state was loaded."""
        self.follower: Follower | None = None
        """The owner of the plan that passes follow, once there is one."""
        self._skipped = 0
        self._payload_bytes: Mapping[tuple[str, str], int] = {}
        self.ready = ReadyTimes(self.site.device)
        self.times = StepTimes(self.site.device)
        """From the end of one planned pass to the end of the next."""
        self.schedule = Schedule(Calendar(), self.times, self.site, self._take_turn, self._settle)
        self._ended: Any = None

    @property
    def decision(self) -> Decision | None:
        """Return the decision that passes follow now; None before there is a plan."""
        return None if self.follower is None else self.follower.decision

    @property
    def planned(self) -> Follower:
        """Return the owner of the plan that passes follow."""
        assert self.follower is not None, "there is a plan by now"
        return self.follower

    @property
    def is_planned(self) -> bool:
        """There is a plan, or the next pass makes one."""
        return self.follower is not None or self.start.is_planned

    @property
    def is_racing(self) -> bool:
        """Plans take turns, or will after passes that are not counted."""
        return self.schedule.is_racing

    @property
    def is_timed(self) -> bool:
        """The pass under way tells when buckets are ready."""
        return self.passes < DENSE_PASSES

    @property
    def _passes_of_job(self) -> int:
        return self._passes_before + self.passes

    # What runs a pass

    @property
    @abstractmethod
    def source(self) -> str:
        """The emitted step as Python source; empty before there is a plan."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline | None:
        """The predicted step; None before there is a plan."""

    @abstractmethod
    def report(self) -> str:
        """Explain the plan in force."""

    @abstractmethod
    def _choose(self, start: Start, graph: GraphModule, layout: Layout) -> Decision:
        """Decide for buckets that arrive as a graph says; every rank calls it."""

    @abstractmethod
    def _prepare(self, followed: Followed, layout: Layout) -> None:
        """Make what running a plan needs. Local."""

    @abstractmethod
    def _go_on(self) -> None:
        """Go on with the plan that is followed now."""

    def metrics(self, *, residuals: bool) -> dict[str, Any]:
        """Sum the last pass up in numbers."""
        plan = None if self.decision is None else self.decision.plan
        counts = self._passes_of_job, self._skipped, self._payload_bytes
        found = metrics_of(*counts, self.times, plan, self.timeline)
        if residuals:
            found["residual_norm"] = 0.0 if self.follower is None else self.follower.state.residuals.norm
        return found

    # A pass

    def enter(self) -> None:
        """Begin a pass. Raises RanksApart where ranks have stopped at different places."""
        self.executor.enter(self.passes)
        self.executor.has_begun = True

    def follow_scale(self) -> None:
        """Let what is kept be in the unit of the loss's factor."""
        scaler, device = self.start.options.scaler, self.site.device
        if scaler is None or not scaler.is_enabled():
            self.planned.now.follow_scale(1.0)
        elif compat.works_later(device):  # to read it, the host would wait for all that it has given the device
            self.planned.now.follow_scale(compat.scale_of(scaler, device).clone())
        else:
            self.planned.now.follow_scale(float(scaler.get_scale()))

    def time_pass(self, waits: Waits, *, counts: bool) -> None:
        """Note the end of a planned pass."""
        end = self.times.look()
        if self._ended is not None and counts:
            self.times.add(self.passes, [(self._ended, end)], waits)
        self._ended = end

    def count(self) -> Counters:
        """Take what the pass under way has counted."""
        counted = self.runtime.take_counters()
        self._payload_bytes = counted.payload_bytes
        self._skipped += counted.skipped
        return counted

    def end_pass(self, layout: Layout) -> None:
        """Count a pass that brought these buckets; at its end another plan may be followed. Every rank calls it."""
        self.passes += 1
        self.schedule.between(self.passes)
        if not self.is_planned and self.passes >= DENSE_PASSES:
            self.decide(layout)

    @contextmanager
    def stops_on_errors(self) -> Generator[None]:
        """Do a part of a pass inside, without autograd and autocast; what is raised there ends the pass."""
        with torch.no_grad(), compat.without_autocast():
            try:
                yield
            except BaseException as error:
                self.stop(error)
                raise

    def stop(self, error: BaseException) -> None:
        """End the pass under way, in which something was raised; the other ranks learn of it."""
        self.executor.leave(error, self.runtime)

    # Deciding

    def decide(self, layout: Layout) -> None:
        """Agree on a plan with all ranks, and take back a state that was loaded before."""
        with self.site.ranks.together(self._what):
            self._decide(layout, self._given)
        self._given = None

    def _decide(self, layout: Layout, given: Given) -> None:
        self.follower = Follower(self.start.trained, self._decision(layout))
        self.schedule.call_off()
        self._load(given)
        self._line_up(layout)
        self._prepare(self.follower.now, layout)
        self._go_on()
        if self.start.options.scaler is None and self.follower.state.keeps_something and compat.some_scaler_scales():
            warnings.warn(_NO_SCALER, stacklevel=2)
        log.info("%s\n%s", self.site.cluster, self.follower.decision.plan)

    def _decision(self, layout: Layout) -> Decision:
        """Decide by when buckets are ready. Groups beside each other that have the same to send decide together."""
        start, ranks, beside = self.start, self.site.ranks, self.site.beside
        buckets = {f"bucket {k}": bucket.facts for k, bucket in enumerate(layout)}
        ranks.check_same("comparing buckets", buckets)
        mine = self.ready.medians_us(layout, self.site.device)
        with beside.together("deciding"):
            here = {"this rank's place": self.site.rank, "the hosts of ranks": list(self.site.cluster.placement)}
            facts = buckets | here | start.options.facts() | {"sizes": [bucket.sizes for bucket in layout]}
            if not beside.do_the_same("comparing groups", facts):
                beside, start = NOBODY, replace(start, site=replace(self.site, beside=NOBODY))
            everyone = beside.gather("ready times", self.site.gather_numbers("ready times", mine))
            times = [theirs for group in everyone for theirs in group]
            agreed = [statistics.median(each) for each in zip(*times, strict=True)]
            return self._choose(start, arriving(layout, agreed, self.site.device), layout)

    def _line_up(self, layout: Layout) -> None:
        """Let the plan and the others that may be faster take turns after the next passes; every rank does it here."""
        follower = self.planned
        choice = follower.decision.choice
        runners = lined_up(choice.runners, follower.decision.plan) if choice is not None else ()
        if runners:
            follower.line_up([runner.plan for runner in runners[1:]])
            for followed in follower.racing:
                self._prepare(followed, layout)
            self.schedule.line_up(runners, self.passes)

    def _take_turn(self, number: int) -> None:
        self.planned.take_turn(number)
        self._turn_to_plan()

    def _settle(self, raced: Raced) -> None:
        self.planned.settle_on(raced.winner)
        self.planned.tell(str(raced))
        self._turn_to_plan()

    def _turn_to_plan(self) -> None:
        """Let the next pass follow what is followed now; the time until it does not count."""
        self.runtime.forget_buffers()
        self._go_on()
        self._ended = self.times.look()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state; empty before there is a plan."""
        follower = self.follower
        if follower is None:
            return {}
        under = follower.lasting
        plan = under.decision.plan  # followed where it is loaded, so it is not one whose turn it just is
        return {**follower.state_dict(under, plan, self._passes_of_job), PLAN: plan.to_json()}

    def load_state_dict(self, given: Given) -> None:
        """Take back a state, or keep it until there is a plan; every rank calls it."""
        self.executor.check_open()
        with self.site.ranks.together("load_state_dict", after_a_stop=True):
            if self.follower is None:
                self.start, self._given = self.start.follow(given), given
            else:
                self._load(given)

    def _load(self, given: Given) -> None:
        follower = self.planned
        steps = follower.load(given)
        if steps is None:
            return
        self._passes_before = steps - self.passes
        self.schedule.wait(self.passes)
        if self.is_racing:  # it begins again
            self.runtime.forget_buffers()
            self._go_on()

    def close(self) -> None:
        """End the pool's thread and give back the process groups; other ranks need not be there."""
        self.executor.close(self.runtime)
