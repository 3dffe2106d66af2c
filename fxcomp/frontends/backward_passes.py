"""Average the gradients of eager backward passes: dense at first, then by a plan that all ranks share.

    pass 0 ... 5     dense; bucket ready times are measured
    then             a plan; other plans take turns with it (a race), and the fastest stays

A given plan is followed from the first pass. Subclasses run a pass: `hook_job.py` and `scatter_job.py`.
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
from fxcomp.state.checkpoint import states_of
from fxcomp.state.fields import PLAN
from fxcomp.state.saved_state import Given
from fxcomp.step.calendar import Calendar
from fxcomp.step.executor import Executor
from fxcomp.step.explain import metrics_of
from fxcomp.step.follower import Followed, Follower
from fxcomp.step.schedule import Schedule
from fxcomp.step.step_times import StepTimes

log = logging.getLogger(__name__)

DENSE_PASSES = 6
"""Number of passes before planning. The plan ignores the first passes, in which DDP rebuilds its buckets."""

TIMED = 3
"""Number of last dense passes whose ready times the plan uses."""

_NO_SCALER = (
    "fxcomp: a GradScaler scales losses in this process, and was not passed: when its scale changes,"
    " residuals are added once with their old scale.\n  Pass scaler=scaler where compress= is passed."
)


class ReadyTimes:
    """Compute time before each bucket: from the hook's return for the previous bucket to its call for this bucket."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._last: Any = None
        self._pass: list[tuple[Any, Any]] = []
        self._passes: deque[tuple[Layout, list[tuple[Any, Any]]]] = deque(maxlen=TIMED)

    def enter(self) -> None:
        now = self._clock.look()
        self._pass.append((now if self._last is None else self._last, now))

    def leave(self) -> None:
        self._last = self._clock.look()

    def end_pass(self, layout: Layout) -> None:
        self._passes.append((layout, self._pass))
        self._pass = []

    def medians_us(self, layout: Layout, device: torch.device) -> list[float]:
        """Return the median time before each bucket, in us; zeros for an untimed layout. Synchronizes the device."""
        compat.synchronize(device)
        passes = [looks for known, looks in self._passes if known == layout]
        if not passes:
            return [0.0] * len(layout)
        return [
            statistics.median(self._clock.us(*looks) or 0.0 for looks in each) for each in zip(*passes, strict=True)
        ]


class BackwardPasses(ABC):
    """Backward passes of one model, with plan, error-feedback state and times."""

    def __init__(self, what: str, start: Start, closed: str, given: Given = None):
        self.start, self.site = start, start.site
        self._what, self.given = what, given
        self.executor = Executor(self.site.ranks, closed)
        self.runtime = Runtime(self.site.transport, self.site.device)
        self.passes = 0
        self._passes_before = 0
        """Number of passes in earlier processes of a resumed job."""
        self.follower: Follower | None = None
        self._skipped = 0
        self._payload_bytes: Mapping[tuple[str, str], int] = {}
        self.ready = ReadyTimes(self.site.device)
        self.times = StepTimes(self.site.device)
        """Step times, from the end of a planned pass to the end of the next."""
        self.schedule = Schedule(Calendar(), self.times, self.site, self._take_turn, self._settle)
        self._ended: Any = None

    @property
    def decision(self) -> Decision | None:
        return None if self.follower is None else self.follower.decision

    @property
    def planned(self) -> Follower:
        assert self.follower is not None, "there is a plan by now"
        return self.follower

    @property
    def is_planned(self) -> bool:
        """True if there is a plan, or if the next pass makes one."""
        return self.follower is not None or self.start.is_planned

    @property
    def is_racing(self) -> bool:
        return self.schedule.is_racing

    @property
    def is_timed(self) -> bool:
        return self.passes < DENSE_PASSES

    @property
    def _passes_of_job(self) -> int:
        return self._passes_before + self.passes

    # Implemented by subclasses

    @property
    @abstractmethod
    def source(self) -> str:
        """Emitted step as Python source; empty before there is a plan."""

    @property
    @abstractmethod
    def timeline(self) -> Timeline | None:
        """Predicted timeline of a step; None before there is a plan."""

    @abstractmethod
    def report(self) -> str:
        """Explain the plan in force."""

    @abstractmethod
    def _choose(self, start: Start, graph: GraphModule, layout: Layout) -> Decision:
        """Choose a plan. Must run on every rank."""

    @abstractmethod
    def _prepare(self, followed: Followed, layout: Layout) -> None:
        """Build the programs of a plan, without communication."""

    @abstractmethod
    def _go_on(self) -> None:
        """Switch to the program of the plan in force."""

    def metrics(self, *, residuals: bool) -> dict[str, Any]:
        plan = None if self.decision is None else self.decision.plan
        counts = self._passes_of_job, self._skipped, self._payload_bytes
        found = metrics_of(*counts, self.times, plan, self.timeline)
        if residuals:
            found["residual_norm"] = 0.0 if self.follower is None else self.follower.state.residuals.norm
        return found

    # A pass

    def enter(self) -> None:
        """Begin a pass. Raises RanksApart if a rank was stopped inside a pass, or ranks at different passes."""
        self.executor.enter(self.passes)
        self.executor.has_begun = True

    def follow_scale(self) -> None:
        """Rescale residuals to the current loss scale."""
        scaler, device = self.start.options.scaler, self.site.device
        if scaler is None or not scaler.is_enabled():
            self.planned.now.follow_scale(1.0)
        elif compat.works_later(device):  # reading the scale would synchronize the host
            self.planned.now.follow_scale(compat.scale_of(scaler, device).clone())
        else:
            self.planned.now.follow_scale(float(scaler.get_scale()))

    def time_pass(self, waits: Waits, *, counts: bool) -> None:
        end = self.times.look()
        if self._ended is not None and counts:
            self.times.add(self.passes, [(self._ended, end)], waits)
        self._ended = end

    def count(self) -> Counters:
        counted = self.runtime.take_counters()
        self._payload_bytes = counted.payload_bytes
        self._skipped += counted.skipped
        return counted

    def end_pass(self, layout: Layout) -> None:
        """Count a pass, and advance the race or choose a plan. Must run on every rank."""
        self.passes += 1
        self.schedule.between(self.passes)
        if not self.is_planned and self.passes >= DENSE_PASSES:
            self.decide(layout)

    @contextmanager
    def stops_on_errors(self) -> Generator[None]:
        """Run a part of a pass without autograd and autocast. An exception stops the pass."""
        with torch.no_grad(), compat.without_autocast():
            try:
                yield
            except BaseException as error:
                self.stop(error)
                raise

    def stop(self, error: BaseException) -> None:
        """Stop the current pass, and report the error to the other ranks."""
        self.executor.leave(error, self.runtime)

    # Deciding

    def decide(self, layout: Layout) -> None:
        """Agree on a plan with all ranks, then restore a loaded state."""
        with self.site.ranks.together(self._what):
            self._decide(layout, self.given)
        self.given = None

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
        """Choose a plan from the ready times.

        Process groups that average different shards over the same links choose one plan if their buckets are equal.
        """
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
        """Start a race if other plans may be faster. Must run on every rank."""
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
        """Let the next pass follow the current plan, and do not count the time of the switch."""
        self.runtime.forget_buffers()
        self._go_on()
        self._ended = self.times.look()

    # State

    def state_dict(self) -> dict[str, Any]:
        follower = self.follower
        if follower is None:
            return {}
        under = follower.lasting
        plan = under.decision.plan  # during a race, the plan from before
        return {**follower.state_dict(under, plan, self._passes_of_job), PLAN: plan.to_json()}

    def load_state_dict(self, state: Given) -> None:
        self.executor.check_open()
        with self.site.ranks.together("load_state_dict", after_a_stop=True):
            given: Given = self.site.ranks.attempt("reading a checkpoint", lambda: states_of(state)) or None
            if self.follower is None:
                self.start, self.given = self.start.follow(given), given
            else:
                self._load(given)

    def _load(self, given: Given) -> None:
        follower = self.planned
        steps = follower.load(given)
        if steps is None:
            return
        self._passes_before = steps - self.passes
        self.schedule.wait(self.passes)
        if self.is_racing:  # the race starts again
            self.runtime.forget_buffers()
            self._go_on()

    def close(self) -> None:
        self.executor.close(self.runtime)
