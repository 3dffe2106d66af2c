"""Schedule of a job: the use of each step and the plan that it follows, the same on all ranks.

                    before a step                        after a step
    first steps     time each emitted line               choose a plan from the times
    warm-up         enter the next stage                 exchange gradients again if frozen second moments do not fit
    race                                                 start the next turn, or keep the fastest plan
    drift                                                if step times or links have changed, replan or race again
    errors          measure compression errors (a look)  choose a plan again by the measured errors

`race.py` and `drift.py` only compute; the schedule communicates and switches plans. `freeze.py` and
`errors/adaptation.py` switch plans themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxcomp import compat
from fxcomp.cluster.cluster import Level
from fxcomp.error_tables import ASSUMED
from fxcomp.errors import BadPlan, CannotReplan
from fxcomp.options import StepOptions
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.plan import Plan
from fxcomp.planning.decide import NOISE_US, Planner, is_alike
from fxcomp.progress import compiling, phase
from fxcomp.search.decision import Decision, PlanMove, Raced
from fxcomp.search.runners import Runner, lined_up
from fxcomp.site import Site
from fxcomp.state.fields import CALENDAR
from fxcomp.state.momenta import SavedMomenta
from fxcomp.state.saved_state import Given, plan_of, states_given
from fxcomp.step.alike import SELDOM, Alike
from fxcomp.step.calendar import BEGINS, IS_SETTLED, WINDOW, Calendar, Use
from fxcomp.step.drift import SMALL_BYTES, Window, drift_since, median_of_window, size_for
from fxcomp.step.errors.adaptation import Adaptation
from fxcomp.step.errors.error_looks import ErrorLooks
from fxcomp.step.first_steps import FirstSteps
from fxcomp.step.freeze import Freeze
from fxcomp.step.observer import StepUnderWay
from fxcomp.step.plan_in_force import PlanInForce
from fxcomp.step.race import LONGEST, WARM_STEPS, Race
from fxcomp.step.step_times import StepTimes

CHECKED_STEPS = 2
"""Number of steps whose shortest time is compared with the prediction from an earlier job's costs."""


class Schedule:
    """Races of a job, one at a time. Every rank calls the methods after the same steps or backward passes."""

    def __init__(
        self,
        calendar: Calendar,
        times: StepTimes,
        site: Site,
        take_turn: Callable[[int], object],
        settle: Callable[[Raced], object],
    ):
        """`take_turn` switches to the racing plan with this index, `settle` keeps the winner of a race."""
        self.calendar, self._times, self._site = calendar, times, site
        self._take_turn, self._settle = take_turn, settle
        self._race: Race | None = None
        """Current or scheduled race."""
        self.raced: Raced | None = None

    @property
    def is_racing(self) -> bool:
        """True if a race is scheduled or running. Predictions are not checked then."""
        return self._race is not None

    def takes_turns(self, step: int) -> bool:
        """Return True during a race."""
        return self._race is not None and step >= self._race.begins

    def note_on_race(self, step: int) -> str:
        """Describe the current or scheduled race; empty without one."""
        if self.takes_turns(step):
            return f"plans are racing: they take turns until one is measured best, in {LONGEST} steps at the most"
        return "" if self._race is None else f"plans will race from step {self._race.begins} on"

    def line_up(self, runners: Sequence[Runner], step: int) -> None:
        """Schedule a race after the warm-up. The first runner is the plan in force."""
        self._race = Race(runners, max(step, self.calendar.warm_from[-1]) + WARM_STEPS, self.calendar.free_steps)
        self.calendar.turn = self._race.turn

    def call_off(self) -> None:
        self._race = self.calendar.turn = None

    def between(self, steps: int) -> None:
        """After a turn, exchange its times, then start the next turn or keep the best plan."""
        race = self._race
        if race is None or steps != race.turn.ends:
            return
        race.end_turn(self._times.slowest(race.turn.steps, self._site))
        self._times.forget()
        if race.result is None:
            self.calendar.turn = race.turn
            self._take_turn(race.turn.number)
        else:
            self.call_off()
            self.raced = race.result
            self._settle(race.result)

    def wait(self, step: int) -> None:
        """Restart an unfinished race at `step`, or after the warm-up if that is later."""
        if self._race is not None:
            self.line_up(self._race.runners, step)


class StepSchedule(Schedule):
    def __init__(
        self,
        force: PlanInForce,
        times: StepTimes,
        planner: Planner,
        options: StepOptions,
        site: Site,
        note: Callable[[str], None],
    ):
        super().__init__(force.calendar, times, site, force.take_turn, self._settle_on)
        self.calendar.verified = options.checks.verified
        self._force, self._planner, self._options, self._note = force, planner, options, note
        self._freeze = Freeze(force, site.ranks, self._follow, note)
        self._alike = Alike(force.inputs.training, site) if site.ranks.world_size > 1 else None
        self._settled: Window | None = None
        """First WINDOW steps of the plan."""
        self._raced: Window | None = None
        """Steps of the plan in the race before these, if any were counted: first steps of a turn take longer."""
        self._planned_for: Plan | None = None
        """Plan before the current race, if drift or `replan` started the race."""
        self._errors: ErrorLooks | None = None
        self._adaptation: Adaptation | None = None
        self._began: int | None = None
        """First step of a loaded job's warm-up, which is not repeated; None without one."""
        self._first: FirstSteps | None = None
        """Timed steps to choose a plan from; None once a plan is chosen."""
        if force.decision.is_provisional:
            self._time_from(0)
        elif force.decision.is_remembered:
            self._expect_from(0)
        else:
            self._race_plans(0, "compiling")

    @property
    def is_racing(self) -> bool:
        """True until a plan is chosen and its race has ended."""
        return self._first is not None or bool(self.calendar.checked) or super().is_racing

    def note_on_race(self, step: int) -> str:
        if checked := self.calendar.checked:
            return f"plans will race after step {checked[-1] + 1}: an earlier job's costs are checked until then"
        if self._first is None:
            return super().note_on_race(step)
        ends = self._first.numbers[-1] + 1
        return f"gradients travel dense until step {ends}: the first steps are timed, and a plan is chosen by them"

    @property
    def moves(self) -> Sequence[PlanMove]:
        return () if self._adaptation is None else self._adaptation.moves

    # A step

    def before_step(self, step: int) -> None:
        """Enter the warm-up stage of `step`; freeze second moments if due."""
        freezes_at = self._freeze.before_step(step)
        if freezes_at is not None:
            self._freeze_at(freezes_at)
            self.wait(step)
        if self._force.enter_stage_of(step):
            self._settle_anew(step)

    def begin(self, under_way: StepUnderWay) -> None:
        """Time the step if due, compare update inputs between ranks, and choose a step that verifies a new capture."""
        force, calendar, alike = self._force, self.calendar, self._alike
        step, program = under_way.number, under_way.program
        if under_way.use is Use.TIME and self._first is not None:
            self._first.before(under_way)
        programs = force.programs
        if alike is not None:
            alike.begin(step, program, force.runtime, force.inputs.numbers, programs.options)
        if not calendar.verified.is_sampled:
            return
        if alike is not None:
            if programs.is_new:
                alike.note_capture()
            calendar.verified_too = alike.verified_after
        elif programs.is_new and step >= (calendar.verified_too or -SELDOM) + SELDOM:
            calendar.verified_too = step + 1
        programs.is_new = False

    def between(self, steps: int) -> None:
        if self._first is not None and self._first.between(steps):
            self._choose(steps, self._first)
        self.calendar.timed = () if self._first is None else self._first.numbers
        if self.calendar.checked and steps > self.calendar.checked[-1]:
            self._check_costs(steps)
        if self._errors is not None:
            self.calendar.look_from = self._errors.between(steps)
        self._freeze.between(steps)
        is_free = not self.is_racing and not self._acts_on_drift(steps)
        if is_free and self._adaptation is not None and self.calendar.is_quiet_at(steps - 1):
            self._adaptation.act(steps)
        super().between(steps)

    def _follow(self, step: int) -> None:
        self.call_off()
        self._settle_anew(step)

    def _time_from(self, step: int) -> None:
        self._first = FirstSteps(self._site, self.calendar.free_steps, step)
        self.calendar.timed = self._first.numbers

    def _expect_from(self, step: int) -> None:
        """Check the CHECKED_STEPS steps after `step`. Skip `step`, because it allocates."""
        self.calendar.checked = self.calendar.free_steps(step + 1, CHECKED_STEPS)

    def _check_costs(self, step: int) -> None:
        """Start a race if links and step times match an earlier job's costs, else time the first steps again."""
        slowest = self._times.slowest(self.calendar.checked, self._site)
        took_us = min((1e3 * ms for ms in slowest if ms is not None), default=None)
        self.calendar.checked, topic, decision = (), "checking an earlier job's costs", self._force.decision
        with self._site.ranks.together(topic):
            mine_us = self._force.predicted.step_time_us  # depends on the rank's shards
            predicted_us = self._site.ranks.from_rank_0(topic, lambda: mine_us)
            said = "links take another time than an earlier job measured"
            if took_us is not None and not is_alike(took_us, predicted_us):
                said = f"steps take {took_us / 1e3:.4g} ms, by an earlier job's costs {predicted_us / 1e3:.4g}"
            elif self._planner.links_are_as_they_were(decision.costs, decision.workload.dense_bytes):
                self._race_plans(step, topic)
                return
            self._note(f"step {step}: {said}; the first steps are timed again")
            self._planner.earlier.forget()
            self._force.switch(self._planner.dense(), topic)
            self._settle_anew(step)
            self._time_from(step)

    def _choose(self, step: int, first: FirstSteps) -> None:
        """Choose the plan from the timed steps. Every rank calls it."""
        topic = "choosing a plan"
        with compiling(f"step {step}: {topic}"), self._site.ranks.together(topic):
            steps, feed_us = (first.steps, first.feed_us) if first.are_enough else ((), 0.0)
            decision = self._planner.after_steps(steps, feed_us)
            self._first = None
            with phase("writing the steps"):
                begins = step if self._began is None else self._began
                stages = self._options.compress.warmup_for(decision.plan).stages(decision.plan, begins)
                self._force.switch(decision, topic, stages=stages)
                self._settle_anew(step)
                self._race_plans(step, topic)

    def follow_saved(self, given: Given, steps: int) -> None:
        """Follow the plan of a loaded state, if the same number of ranks saved it with no race running or scheduled.

        Do nothing if a step has run, the plan does not fit, or the job does not begin dense. Every rank calls it.
        """
        ranks, decision = self._site.ranks, self._force.decision
        if ranks.world_size == 1 or not self._options.begins_dense:
            return
        states = states_given(given)
        settled = (
            plan_of([state])
            for state in states
            if state.get("ranks") == ranks.world_size and state.get(CALENDAR, {}).get(IS_SETTLED, True)
        )
        begins = next((state.get(CALENDAR, {}).get(BEGINS) for state in states), None)
        mine: dict[str, Any] = {"steps": steps, "plan": next(settled, None), "begins": begins}
        everyone = ranks.gather("the plans of loaded states", mine)
        saved = next((Plan.from_json(each["plan"]) for each in everyone if each["plan"] is not None), None)
        self._began = next((each["begins"] for each in everyone if each["begins"] is not None), None)
        if self._began and not any(each["steps"] for each in everyone):
            before, *_ = warm_from = self.calendar.warm_from
            self.calendar.warm_from = tuple(step - before + self._began for step in warm_from)
        if saved is None or any(each["steps"] for each in everyone):
            return
        try:
            saved.check_covers(decision.workload.sizes, decision.workload.types)
            saved.check_fits(self._site.cluster)
        except BadPlan:
            return
        self._first, self.calendar.timed, self.calendar.checked = None, (), ()
        self.call_off()
        said = "the plan is the loaded state's, predicted by costs not measured since; step.replan() measures them"
        followed = Decision(saved, decision.costs, decision.workload, notes=(said,))
        stages = self._options.compress.warmup_for(saved).stages(saved, self._began or 0)
        self._force.switch(followed, "following the saved plan", stages=stages)

    def follow_errors(self, errors: ErrorLooks, step: int) -> None:
        """Measure errors from `step` on and adapt the plan to them."""
        self._errors, self.calendar.look_from = errors, step
        if self._options.compress.measured and not self._options.why_plan_stays:
            terms = self._planner.terms
            self._adaptation = Adaptation(self._force, errors, terms, self._site, self._settle_anew, self._note)

    def go_on(self, saved: SavedMomenta) -> None:
        self._freeze.go_on(saved)
        self._freeze_at(self._force.momenta.freezes_at)

    def resume(self, steps: int) -> None:
        """Continue at another step. An unfinished race starts again."""
        self._freeze.resume(steps)
        self._settle_anew(steps)
        if self._first is not None:
            self._time_from(steps)
        if self.calendar.checked:
            self._expect_from(steps)
        if not self._force.is_racing:
            self.call_off()
        if self._errors is not None:
            self._errors.begin_at(steps)
            self.calendar.look_from = steps
        self._drop_adaptation(steps)
        self.wait(steps)

    def _settle_anew(self, step: int) -> None:
        self.calendar.followed_from = step
        self._times.forget()
        self._settled = self._raced = None

    def _freeze_at(self, step: int | None) -> None:
        """Exchange momenta from `step` on, after the last warm-up stage."""
        self._force.momenta.freezes_at = step
        if step is not None and self._force.plans[-1].moves_exchange:
            self.calendar.warm_from = (*self.calendar.warm_from[:-1], step)

    # Racing

    def _race_plans(self, step: int, topic: str) -> None:
        """Schedule a race and emit its programs, if there are several plans. Every rank calls it."""
        choice, stays = self._force.decision.choice, self._force.plans[-1]
        runners = lined_up(choice.runners, stays) if choice is not None and self._options.races else ()
        if runners:
            self._drop_adaptation(step)
            self._force.line_up([runner.plan for runner in runners[1:]], topic)
            self.line_up(runners, step)

    def _settle_on(self, raced: Raced) -> None:
        step = raced.last_step
        with self._site.ranks.together("ending the race"):
            self._force.settle_on(raced.winner)
            self._settle_anew(step)
            self._raced = Window(ms) if (ms := raced.stays.measured_ms) and raced.stays.steps else None
            compat.return_freed_memory(of_cycles=self._planned_for is not None)
            if self._planned_for is not None:
                self.calendar.be_patient(step, changed=self._force.plan != self._planned_for)
                self._planned_for = None
            self._note(str(raced))

    def _drop_adaptation(self, step: int) -> None:
        if self._adaptation is not None:
            self._adaptation.drop(step)

    # Planning again

    def check_replan(self, step: int) -> None:
        """Raise CannotReplan if replanning is not possible."""
        if self._site.ranks.world_size == 1:
            raise CannotReplan(
                "one rank sends nothing: it has no links to measure and no plan to choose.\n"
                "  Start several ranks, as torchrun does."
            )
        if self._options.why_not_replan:
            raise CannotReplan(self._options.why_not_replan)
        if checked := self.calendar.checked:
            raise CannotReplan(
                f"an earlier job's costs are being checked, and this is step {step}.\n"
                f"  Plan again after step {checked[-1] + 1}."
            )
        if self._first is not None:
            raise CannotReplan(
                f"there is no plan yet, and this is step {step}: one is chosen by the first steps.\n"
                f"  Plan again after step {self._first.numbers[-1] + 1}."
            )
        if not self._force.is_warm:
            last = self.calendar.warm_from[-1]
            raise CannotReplan(
                f"the warm-up of error feedback lasts until step {last}, this is {step}.\n"
                "  Plan again once the plan itself is followed."
            )
        if self.takes_turns(step):
            raise CannotReplan(
                f"plans are racing, and this is step {step}: the plan that stays is not known yet.\n"
                "  Plan again once a note names it."
            )

    def replan(self, step: int) -> bool:
        """Measure the links and choose a plan again. Every rank calls it. Return True if the plan changed."""
        topic, before = "planning again", self._force.plan
        workload, old = self._force.decision.workload, self._force.decision.costs
        self._drop_adaptation(step)
        errors = self._errors.table if self._adaptation is not None and self._errors is not None else ASSUMED
        decision = self._planner.again(old, topic, errors)
        self._force.switch(decision, topic)
        self.call_off()
        timeline = self._force.standing.timeline  # depends on the rank's shards
        predicted_us = self._site.ranks.from_rank_0(f"{topic}: the prediction", lambda: timeline.step_time_us)
        sum_of_all = CollectiveKind.ALL_REDUCE, Level.WORLD, workload.dense_bytes, self._site.cluster
        dense_us = [costs.collective(*sum_of_all).us for costs in (old, decision.costs)]
        self._note(_said_of(decision, step, predicted_us, dense_us, changed=decision.plan != before))
        self._race_again(step, f"{topic}: the race", before)
        return decision.plan != before

    def _drifted(self, step: int) -> str:
        """Return a sentence on drift if a window ends at `step`; empty without drift. Every rank calls it."""
        if self._site.ranks.world_size == 1 or not self._options.is_watched or not self.calendar.judges_after(step):
            return ""
        mine = median_of_window(self._times.since(step - WINDOW))
        everyone = [ms for (ms,) in self._site.gather_numbers("how long steps take", [mine])]
        if min(everyone) < 0:
            return ""
        now = self._window(max(everyone))
        settled, self._settled = self._settled or self._raced, self._settled or now
        return "" if settled is None or step < self.calendar.patient_until else drift_since(step, settled, now)

    def _window(self, step_ms: float) -> Window:
        """Return a window; if the plan compresses, time an all_reduce that can show drift. Every rank calls it."""
        settled, sum_us = self._settled, self._planner.sum_us
        if self._force.plan.is_dense or (settled is not None and settled.sum_us <= NOISE_US):
            return Window(step_ms)
        size = size_for(step_ms, sum_us(SMALL_BYTES)) if settled is None else settled.size
        return Window(step_ms, size, sum_us(size))

    def _acts_on_drift(self, step: int) -> bool:
        """Check for drift, and replan or race again. Return True if there is drift."""
        drift = self._drifted(step)
        if not drift:
            return False
        plans_again, offers = self._options.checks.replan == "auto", not self._options.why_not_replan
        offer = " step.replan(), called by every rank, measures the links again and chooses by them."
        self._note(f"{drift}{offer if offers and not plans_again else ''}")
        self._planner.earlier.forget()
        with self._site.ranks.together("acting on drift"):
            if plans_again:
                self.replan(step)
            else:
                self._race_again(step, "racing again", self._force.plan)
        return True

    def _race_again(self, step: int, topic: str, before: Plan) -> None:
        """Start a race if there are other plans. Drift checks then pause, for longer if `before` stays the plan."""
        self._settle_anew(step)
        self._race_plans(step, topic)
        self._planned_for = before if self.is_racing else None
        if not self.is_racing:
            self.calendar.be_patient(step, changed=self._force.plan != before)


def _said_of(decision: Decision, step: int, predicted_us: float, dense_us: Sequence[float], *, changed: bool) -> str:
    """Write the note on a replanned decision. `dense_us`: µs to sum all gradients, by old costs and by new costs."""
    assert decision.choice is not None, "a chosen plan has been compared"
    before_us, now_us = dense_us
    return (
        f"planned again at step {step}: summing all gradients takes {now_us / 1e3:.4g} ms over the links as they are"
        f" now, and took {before_us / 1e3:.4g} before; {'another plan is followed' if changed else 'the plan stays'},"
        f" predicted at {predicted_us / 1e3:.4g} ms a step; dense at {decision.choice.dense_us / 1e3:.4g}."
    )
