"""The compiled step: feeds the emitted code, and follows what changes around it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.batch_type import BatchType, batch_type
from fxcomp.capture.optimizer import Owned, has_state, live_numbers, materialize_state
from fxcomp.capture.step_guard import Key, StepGuard
from fxcomp.capture.training import Training
from fxcomp.cluster.cluster import Cluster
from fxcomp.codegen.program import Program
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import CannotReplan, FxcompError, StepChanged
from fxcomp.graph.info import InputKind, Source
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback, Stage
from fxcomp.plan.plan import Plan
from fxcomp.plan.verified_steps import NEVER, VerifiedSteps
from fxcomp.ranks import ALONE, Ranks
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.state import CompressorStates, Residuals, Velocities
from fxcomp.state.handover import Exchange, Holding, hand_over
from fxcomp.state.saved_state import Carried, Given, Here, read_together, restore
from fxcomp.step.drift.correct import corrected, describe
from fxcomp.step.drift.judge import Finding, Row, agreed_rows, judge, step_with
from fxcomp.step.drift.predicted_costs import predict_costs
from fxcomp.step.drift.watch import Replan, Watch
from fxcomp.step.lockstep import Lockstep
from fxcomp.step.programs import Programs
from fxcomp.step.step_times import Looks, StepTimes
from fxcomp.step.verify.verifier import Verification, Verifier

SWITCH_STEPS = 20
"""So many measured steps decide whether a compressed plan is kept."""

WARM_STEPS = 2
"""The first steps, which allocate, are not judged."""

SWITCH_MARGIN = 0.03
"""How much slower than dense a plan must be to be given up: less is noise (assumed)."""


Build = Callable[[Any, Plan, Mapping[int, frozenset[int]]], Program]
"""Captures and compiles for a batch and a plan, with the dimensions of batch tensors that may vary. Local: ranks do not
communicate in it."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A compressed plan that was followed and turned out slower than dense, as all ranks know it."""

    plan: Plan
    step_us: float
    """What was measured of it."""
    dense_us: float | None = None
    """What has just been measured of the dense plan, where that is followed."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """What was chosen anew by another cost table, the same on all ranks, with fresh state for it."""

    plan: Plan
    costs: CostTable
    dense_plan: Plan
    dense_us: float
    """What is predicted for it."""
    program: Program
    """The first capture, following the plan."""
    residuals: Residuals
    compressor_states: CompressorStates
    mistrusted_us: float | None = None
    """What is predicted for a compressed plan that is not followed, after what another one really took."""


@dataclass(frozen=True, slots=True)
class Following:
    """How a step is compared with its prediction, and what may be done about it."""

    watch: Watch
    replan: Replan
    cluster: Cluster
    emit: Callable[[Plan], Program]
    """The first capture, following another plan by the costs in force. Local."""
    decide: Callable[[CostTable, GivenUp | None, str], Replanned] | None
    """Choose anew by another table; every rank calls it, for a topic of its own."""
    refusal: str = ""
    """Why there is no `decide`."""


class CompiledStep:
    """A training step; call it with a batch. Parameters, buffers and the optimizer's state change in place.

    Returns the loss, detached, or `(loss, aux)` if the loss function does. `.grad` of parameters is not set.
    """

    def __init__(
        self,
        training: Training,
        plan: Plan,
        build: Build,
        runtime: Runtime,
        residuals: Residuals,
        compressor_states: CompressorStates,
        *,
        velocities_of: Callable[[Plan], Velocities] | None = None,
        feedback: ErrorFeedback = CLASSIC,
        ranks: Ranks = ALONE,
        verify_every: int | str = NEVER,
        dense_ms: float | None = None,
        dense_plan: Plan | None = None,
        predicted_free_ms: float | None = None,
        costs: CostTable | None = None,
        following: Following | None = None,
        report: Callable[[CompiledStep], str] | None = None,
    ):
        self._ranks, self._lockstep = ranks, Lockstep(ranks)
        self._feedback = feedback
        self._stages: tuple[Stage, ...] = feedback.stages(plan)
        self._stage: int = 0
        self._rates: dict[int, float] = {}
        self.plan = self._stages[0].plan
        self.training = training
        self.runtime = runtime
        self.residuals = residuals
        self.compressor_states = compressor_states
        self._velocities_of = velocities_of
        self.velocities = velocities_of(self.plan) if velocities_of is not None else None
        """This rank's own momentum; None where it is the optimizer's."""
        self.steps = 0
        self.skipped_steps = 0
        """So many steps changed nothing, because a gradient was not finite on some rank."""
        self.notes: list[str] = []
        self.times = StepTimes(training.device)
        self._build = build
        self._guard = StepGuard(training)
        self.programs = Programs(self._guard, self._build_program)
        self._verifier = Verifier(training, VerifiedSteps.parse(verify_every), self._is_fresh, self.notes.append)
        self._judge_from_here()
        self._following = following
        self.timed: tuple[Row, ...] = ()
        """What each cost took when it was last compared with its prediction, as all ranks see it."""
        self._noted: set[str] = set()
        self._replans = 0
        self._patience, self._least_patience, self._patient_until = 1, 1, 0
        self._given_up: GivenUp | None = None
        self._returns = 0
        self._adopted: Program | None = None
        self._first_key: Key | None = None
        self._dense_ms, self._dense_plan = dense_ms, dense_plan
        self._report = report
        self.predicted_free_ms = predicted_free_ms
        """The predicted step if communication took no time, in ms; None if nothing was measured."""
        self.costs = costs
        """What the plan was judged by: another `compile_step(..., costs=step.costs)` measures nothing again."""
        self.payload_bytes: Mapping[tuple[str, str], int] = {}
        """What this rank put into collectives in the last step, by kind and level."""
        self._fresh_state = dict(training.fresh_state)
        self._stateful = True
        self._group_of = {owner.name: owner.group for owner in training.owned}
        self._parameters = dict(training.model.named_parameters())
        self.program: Program | None = None
        self._first_type: BatchType | None = None

    # Running

    def __call__(self, batch: Any) -> Any:
        self._lockstep.enter(self.steps)
        try:
            return self._step(batch)
        except BaseException as error:
            self._lockstep.leave(error, self.runtime)
            raise

    def close(self) -> None:
        """End the pool's thread and give back the process groups; other ranks need not be there.

        A step that nobody refers to any more is closed by itself. A `with` statement closes one at its end.
        """
        self._lockstep.close(self.runtime)

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, batch: Any) -> Any:
        self._enter_stage()
        kind, leaves = batch_type(batch)
        program = self.program = self.programs.find(batch, kind, leaves, self._stage)
        verify = self._verifier.wants(self.steps)
        watch = self._watch_of(kind) if not verify else None
        begin = self.times.look()
        # What autocast does is in the graph; what inference mode makes could not be trained any more.
        plain = torch.inference_mode(False), torch.no_grad(), compat.without_autocast()
        with plain[0]:
            checking = self._begin_verifying(batch, program) if verify else None
            with plain[1], plain[2]:
                result = self._run(program, leaves, checking or watch)
        self._count((begin, self.times.look()), kind, verify)
        return result

    def _run(self, program: Program, leaves: Sequence[Any], observer: Watch | Verification | None) -> Any:
        if self._feedback.scale_with_lr:
            self._scale_residuals()
        arguments = self.feed(program, leaves)
        self._lockstep.has_begun = True
        if observer is None:
            loss, aux = program.run(self.runtime, arguments)
        elif isinstance(observer, Verification):
            loss, aux = observer.run(arguments)
        else:
            loss, aux = observer.run(self.steps, program, self.runtime, arguments)
        self.runtime.finish()
        if not self.runtime.counters.skipped:
            self._fresh_state.clear()
            self._settle_waiting()
        captured = program.captured
        if captured.has_aux:
            assert captured.aux_spec is not None, "a step with aux knows its structure"
            return loss, pytree.tree_unflatten(captured.aux_leaves(aux), captured.aux_spec)
        return loss

    def _begin_verifying(self, batch: Any, program: Program) -> Verification | None:
        is_plain = self.plan.is_dense and self.velocities is None and not self.runtime.undelivered
        return self._verifier.begin(batch, program, self.runtime, self.steps, is_plain=is_plain)

    def feed(self, program: Program, leaves: Sequence[Any]) -> tuple[list[Any], ...]:
        """The arguments of the emitted function, in its order: lists of what the graph's inputs stand for."""
        lists: dict[InputKind, list[Any]] = {kind: [] for kind in InputKind}
        buffers = dict(self.training.model.named_buffers())
        self._ensure_state()
        numbers = self._live_numbers()
        for source in program.inputs:
            lists[source.kind].append(self._value(source, leaves, buffers, numbers))
        order = (
            InputKind.PARAMETER,
            InputKind.BUFFER,
            InputKind.STATE,
            InputKind.HYPER,
            InputKind.VELOCITY,
            InputKind.RESIDUAL,
            InputKind.COMPRESSOR_STATE,
            InputKind.BATCH,
        )
        return tuple(lists[kind] for kind in order)

    def _value(
        self,
        source: Source,
        leaves: Sequence[Any],
        buffers: Mapping[str, Tensor],
        numbers: Sequence[Mapping[str, float]],
    ) -> Any:
        match source.kind:
            case InputKind.PARAMETER:
                return self._parameters[source.name]
            case InputKind.BUFFER:
                return buffers[source.name]
            case InputKind.STATE:
                return self.training.optimizer.state[self._parameters[source.name]][source.key]
            case InputKind.HYPER:
                return numbers[source.index][source.key]
            case InputKind.VELOCITY:
                assert self.velocities is not None, "a step with momentum correction has velocities"
                return self.velocities.of_bucket(source.index)
            case InputKind.RESIDUAL:
                return self.residuals.of_bucket(source.index)
            case InputKind.COMPRESSOR_STATE:
                return self.compressor_states.of_bucket(source.index)
            case InputKind.BATCH:
                return leaves[source.index]

    def _ensure_state(self) -> None:
        """Make the optimizer's state if it is not there, as its own first step would."""
        optimizer, owned = self.training.optimizer, self.training.owned
        if self._stateful and not all(has_state(optimizer, owner.parameter) for owner in owned):
            self._fresh_state |= materialize_state(optimizer, owned)
            self._stateful = any(has_state(optimizer, owner.parameter) for owner in owned)

    def _is_fresh(self, owner: Owned) -> bool:
        """Whether a parameter's first step is still to come: nobody has loaded another state since."""
        return self._fresh_state.get(owner.name) is self.training.optimizer.state[owner.parameter]

    def _live_numbers(self) -> list[dict[str, float]]:
        numbers = [live_numbers(group) for group in self.training.optimizer.param_groups]
        for index, group in enumerate(numbers):
            if "dampening" not in group or not self._fresh_state:
                continue
            fresh = {self._is_fresh(owner) for owner in self.training.owned if owner.group == index}
            if fresh == {True, False}:
                raise StepChanged(
                    f"parameter group {index} has momentum for some parameters and none yet for others, which with"
                    " dampening cannot be stepped together.\n  Put the new parameters into a group of their own."
                )
            if fresh == {True}:
                group["dampening"] = 0.0  # SGD's first step takes the gradient as it is
        return numbers

    # Warm-up

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The plans that are followed one after the other; the last one stays."""
        return self._stages

    def _enter_stage(self) -> None:
        """Follow the plan of this step's number, the same on all ranks."""
        stage = max(0, sum(stage.first_step <= self.steps for stage in self._stages) - 1)
        if stage == self._stage or not self._stages:
            return
        self._stage, self.plan = stage, self._stages[stage].plan
        if self.velocities is not None:
            before, self.velocities = self.velocities, self._fresh_velocities()
            self.velocities.take_over(before)
        self.times.forget()
        self.runtime.forget_buffers()
        self._watch_anew()

    def _fresh_velocities(self) -> Velocities:
        assert self._velocities_of is not None, "asked only where there are some"
        return self._velocities_of(self.plan)

    def _scale_residuals(self) -> None:
        """Multiply residuals by what the learning rate was over what it is, so that they weigh what they weighed."""
        kept = {name: piece.values for name, piece in self.residuals.slices.items()}
        for index, numbers in enumerate(self._live_numbers()):
            rate = numbers["lr"]
            if rate <= 0:
                continue
            before = self._rates.get(index, rate)
            self._rates[index] = rate
            if before != rate:
                for owner in self.training.owned:
                    for values in (kept, self.runtime.undelivered):
                        if owner.group == index and owner.name in values:
                            values[owner.name].mul_(before / rate)

    def _settle_waiting(self) -> None:
        """What waited for this step's gradients has arrived. It was no gradient of this step: no velocity keeps it."""
        if self.velocities is not None:
            for name, value in self.runtime.undelivered.items():
                self.velocities.forget(name, value)
        self.runtime.undelivered.clear()

    # Programs

    def _build_program(self, batch: Any, varying: Mapping[int, frozenset[int]]) -> Program:
        self._stateful = True  # an option that changed may ask for state that was not needed before
        self._ensure_state()
        with torch.inference_mode(False):
            return self._build(batch, self.plan, varying)

    def adopt(self, batch: Any, program: Program, stage: int = 0) -> None:
        """Take over a program that was built for this batch while compiling."""
        kind, _ = batch_type(batch)
        self._first_type, self._first_key = kind, self._guard.key()
        self._adopt(program, stage)

    def _adopt(self, program: Program, stage: int) -> None:
        assert self._first_type is not None, "adopt knows the batch"
        assert self._first_key is not None, "and what was around it"
        self.programs.adopt(self._first_type, stage, self._first_key, program)
        if stage == self._stage:
            self.program = program
        if stage == max(0, len(self._stages) - 1):
            self._adopted = program

    # Watching

    def _count(self, looks: Looks, kind: BatchType, verified: bool) -> None:
        counters = self.runtime.take_counters()
        compat.count_as_stepped(self.training.optimizer)
        self.steps += 1
        self.skipped_steps += counters.skipped
        self.payload_bytes = counters.payload_bytes
        if not verified and kind == self._first_type:
            self.times.add(looks, counters.waits)
        if self.steps == self._judged_at and self._dense_ms is not None and not self.plan.is_dense:
            with self._ranks.together("comparing the plan with dense"):
                self._reconsider()
        following = self._following
        if following is not None and self._is_warm and following.watch.is_due(self.steps):
            with self._ranks.together("comparing steps with their prediction"):
                self._look_for_drift(following)

    def _judge_from_here(self) -> None:
        """Judge the plan that stays against dense after so many steps from now, or from its first one."""
        first = self._stages[-1].first_step if self._stages else 0
        self._judged_at = max(self.steps, first) + SWITCH_STEPS + WARM_STEPS

    def _go_on_from_here(self) -> None:
        """Forget what earlier steps took: this is another step of the job."""
        self.times.forget()
        self._patient_until = self.steps
        self._judge_from_here()
        self._watch_anew()

    def _reconsider(self) -> None:
        """Switch back to dense if the compressed plan turned out slower; all ranks decide by the same numbers.

        Every rank comes here at the same step. One that saw other batches than the dense step was measured on says so
        with -1, and then nobody judges.
        """
        times = list(self.times.settled_ms())
        is_known = len(times) >= SWITCH_STEPS // 2  # every other step may be verified
        mine = statistics.median(times[WARM_STEPS:]) if is_known else -1.0
        everyone = [value for (value,) in self._gather([mine])]
        measured, dense = max(everyone), self._dense_ms or 0.0
        if min(everyone) < 0 or self._dense_plan is None:
            return
        if measured <= dense * (1 + SWITCH_MARGIN):
            self._given_up, self._least_patience = None, 1
            return
        self.notes.append(
            f"switched back to dense at step {self.steps}: {measured:.1f} ms a step measured with compression,"
            f" {dense:.1f} ms without. What compression had left out so far goes out with the next step."
        )
        self._given_up = GivenUp(self.plan, 1e3 * measured)
        self.plan = self._dense_plan
        self._hand_over(Residuals({}, self.training.device))
        self._leave_plan()
        self.times.forget()
        self._watch_dense()

    def _watch_dense(self) -> None:
        """Go on looking for drift after a plan was given up, more patiently each time: its costs are not understood."""
        following = self._following
        if following is None:
            return
        self._returns += 1
        self._least_patience *= 2
        self._patience = self._least_patience
        self._patient_until = self.steps + self._patience * following.watch.schedule.judged_every
        self._noted.clear()
        dense = self._ranks.attempt("emitting the dense step", partial(following.emit, self.plan))
        self._adopt(dense, 0)
        self.agree_on_watching("watching the dense step")

    def _hand_over(self, residuals: Residuals) -> None:
        """Go on with other residuals and velocities, for the plan that is followed from now on; nothing is lost."""
        exchange = self._exchange("changing plans")
        sizes, ranks = self._here.trained_sizes, self._ranks.world_size
        before = Holding.of(ranks, self.residuals.slices, self.runtime.undelivered)
        self.runtime.undelivered = hand_over(before, residuals.slices, sizes, exchange)
        self.residuals = residuals
        if self.velocities is not None:
            velocities = self._fresh_velocities()
            hand_over(Holding.of(ranks, self.velocities.slices), velocities.slices, sizes, exchange, "velocities")
            self.velocities = velocities

    def _leave_plan(self) -> None:
        """Forget what was made for another plan than the one that is followed now, but not what that still owes."""
        self._stages = tuple[Stage, ...]()
        self._stage = 0
        waiting, transport = self.runtime.undelivered, self.runtime.transport
        self.runtime.close()
        self.runtime = Runtime(transport, self.training.device)
        self.runtime.undelivered = waiting
        self.programs.clear()
        self._adopted = None
        self._watch_anew()

    def _gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many on each, in rank order."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.training.device)
        everyone = mine.new_zeros(dist.get_world_size() * len(values))
        self.runtime.transport.all_gather(mine, everyone, "world", "main").wait()
        return [part.tolist() for part in everyone.view(-1, len(values))]  # pyright: ignore[reportUnknownMemberType]

    def _sum_over_ranks(self, value: Tensor) -> None:
        self.runtime.transport.all_reduce(value, "world", "main").wait()

    # Drift

    @property
    def judged_every(self) -> int | None:
        """After so many steps ranks compare what a step took with what was predicted; None if they do not."""
        return self._following.watch.schedule.judged_every if self._following is not None else None

    def agree_on_watching(self, topic: str) -> None:
        """Compare nothing if ranks would compare different things; every rank calls it when all stages are adopted."""
        program = self._adopted
        if self._following is None or program is None:
            return
        mine = [str(cost) for cost in predict_costs(program).costs]
        if any(theirs != mine for theirs in self._ranks.gather(topic, mine)):
            self._following = None

    @property
    def _is_warm(self) -> bool:
        """The plan that stays is followed."""
        return self._stage == max(0, len(self._stages) - 1)

    def _watch_of(self, kind: BatchType) -> Watch | None:
        """What times this step; None for most steps, and for batches that nothing was predicted for."""
        following = self._following
        if following is None or kind != self._first_type or not self._is_warm:
            return None
        return following.watch if following.watch.wants(self.steps) else None

    def _watch_anew(self) -> None:
        if self._following is not None:
            self._following.watch.restart(self.steps)

    def _compare(self, following: Following) -> tuple[Finding, ...]:
        """What is wrong with the costs, by numbers that all ranks share; every rank calls it at the same step."""
        program = self._adopted
        if program is None or self.costs is None:
            return ()
        predicted = predict_costs(program)
        everyone = self._gather([predicted.step_us, self.costs.error, *following.watch.rows(self.steps, predicted)])
        self.timed = agreed_rows(predicted.costs, [mine[2:] for mine in everyone])
        step_us, error = everyone[0][:2]
        return judge(self.timed, step_us, error)

    def _look_for_drift(self, following: Following) -> None:
        """Say what is wrong with the costs, and plan anew if that was asked for; all ranks decide the same."""
        findings = self._compare(following)
        fresh = [finding for finding in findings if finding.cause not in self._noted]
        is_automatic = following.replan is Replan.AUTO and self.steps >= self._patient_until
        if fresh:
            self._noted.update(finding.cause for finding in fresh)
            self._note_drift(following, fresh, offers=following.decide is not None and not is_automatic)
        if findings and is_automatic:
            changed = self._plan_anew(following, findings)
            # What a table cannot be put right for would be found again and again.
            self._patience = self._least_patience if changed else 2 * self._patience
            self._patient_until = self.steps + self._patience * following.watch.schedule.judged_every

    def _note_drift(self, following: Following, findings: Sequence[Finding], *, offers: bool) -> None:
        program, costs = self._adopted, self.costs
        assert program is not None, "there are findings about what was adopted"
        assert costs is not None, "and they compare with its costs"
        predicted = predict_costs(program)
        becomes_us = step_with(findings, predicted, costs.processors)
        said = "; ".join(describe(finding, costs, following.cluster) for finding in findings)
        offer = " step.replan(), called by every rank, plans anew." if offers else ""
        self.notes.append(
            f"since step {self.steps - following.watch.schedule.judged_every}: {said}. With that the step is predicted"
            f" at {becomes_us / 1e3:.4g} ms, not {predicted.step_us / 1e3:.4g}.{offer}"
        )

    def replan(self) -> bool:
        """Put the costs right by what the running step took, choose anew, and follow that; whether the plan changed.

        Every rank calls it behind the same step, and all follow the same plan. What compression has left out is kept,
        or goes out with the next step where it is fed back no more; the optimizer's state stays. Raises CannotReplan.
        """
        following = self._following
        if following is None or following.decide is None:
            nothing = (
                "nothing is timed here: with one rank, with replan='off', or with plan= and no costs=.\n"
                "  Leave plan= and replan= out."
            )
            raise CannotReplan(following.refusal if following is not None else nothing)
        if not self._is_warm:
            raise CannotReplan(
                f"the warm-up of error feedback lasts until step {self._stages[-1].first_step}, this is {self.steps}.\n"
                "  Plan anew once the plan itself is followed."
            )
        self._lockstep.check()
        with self._ranks.together("replan"):
            findings = self._compare(following)
            self._ranks.attempt("looking at what was timed", partial(self._check_timed, following))
            return self._plan_anew(following, findings) if findings else False

    def _check_timed(self, following: Following) -> None:
        if all(row.first_us is None for row in self.timed):
            raise CannotReplan(
                f"too few steps have been timed: {following.watch.schedule.judged_every} in a row are needed, with"
                " batches like the first one.\n  Train on and ask again; the report says what was measured."
            )

    def _plan_anew(self, following: Following, findings: Sequence[Finding]) -> bool:
        program, costs = self._adopted, self.costs
        assert program is not None, "there are findings about what was adopted"
        assert costs is not None, "and they compare with its costs"
        assert following.decide is not None, "asked only where there is something to decide"
        self._replans += 1
        topic = "planning anew"

        def put_right() -> CostTable:
            return corrected(costs, findings, predict_costs(program), following.cluster)

        table = self._ranks.attempt(f"{topic}: correcting the costs", put_right)
        # A dense plan has just been measured. Of another one there is only a prediction, with its error.
        is_known = self.plan.is_dense and bool(self.times.settled_ms())
        everyone = [value for (value,) in self._gather([self.step_ms if is_known else -1.0])]
        dense_ms = max(everyone) if min(everyone) > 0 else None
        if self._given_up is not None:
            self._given_up = replace(self._given_up, dense_us=1e3 * dense_ms if dense_ms is not None else None)
        new = following.decide(table, self._given_up, topic)
        changed = new.plan != self.plan
        self.notes.append(
            f"planned anew at step {self.steps}, for {', '.join(str(f.cost) for f in findings)}:"
            f" {'another plan is followed' if changed else 'the plan stays'},"
            f" predicted at {new.program.timeline.step_time_us / 1e3:.4g} ms a step; dense at {new.dense_us / 1e3:.4g}."
        )
        if new.mistrusted_us is not None and self._given_up is not None:
            self.notes[-1] += (
                f" With compression {new.mistrusted_us / 1e3:.4g} ms are predicted, which is not believed: the plan"
                f" that was given up took {self._given_up.step_us / 1e3:.4g}."
            )
        self._dense_ms = dense_ms if dense_ms is not None else new.dense_us * (1 + new.costs.error) / 1e3
        self._dense_plan, self.costs = new.dense_plan, new.costs
        self._follow(new)
        self._noted.clear()
        return changed

    def _follow(self, new: Replanned) -> None:
        """Follow another plan from the next step on. Nothing that was left out is lost."""
        self._hand_over(new.residuals)
        new.compressor_states.take_over(self.compressor_states)
        self.plan, self.compressor_states = new.plan, new.compressor_states
        self.runtime.transport = self._ranks.extend(self.runtime.transport, new.plan)
        self._leave_plan()
        self.times.forget()
        self._judge_from_here()
        self._adopt(new.program, 0)
        self.agree_on_watching("watching the new plan")

    @property
    def counted_notes(self) -> tuple[str, ...]:
        """What the report says about the warm-up, and about steps that were left out."""
        notes: list[str] = []
        if self._stage < len(self._stages) - 1:
            last = self._stages[-1].first_step
            notes.append(f"warming up until step {last}: stage {self._stage + 1} of {len(self._stages) - 1}")
        if self.skipped_steps:
            notes.append(f"{self.skipped_steps} of {self.steps} steps left out: a gradient was not finite")
        return tuple(notes)

    @property
    def step_ms(self) -> float:
        """The median of recent steps, in ms; nan before the first."""
        return self.times.median_ms

    @property
    def exposed_ms(self) -> float:
        """How long recent steps stood still waiting for the network, in ms (median); nan before the first."""
        return self.times.exposed_ms

    # Looking

    @property
    def source(self) -> str:
        """The emitted step as Python source."""
        return self._current.source

    @property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return self._current.timeline

    def graph(self, after: str | None = None) -> GraphModule:
        """The final graph, or the graph after a pass. Raises FxcompError naming the passes if there is no such one."""
        if after is None:
            return self._current.graph
        history = self._current.replay()
        if after not in history:
            raise FxcompError(f"there is no pass {after!r}; the passes are {', '.join(history)}")
        return history[after]

    def explain(self) -> str:
        """What was decided and why, as text."""
        assert self._report is not None, "compile_step sets the report"
        return self._report(self)

    @property
    def _current(self) -> Program:
        assert self.program is not None, "compile_step adopts a program before it returns"
        return self.program

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, velocities and compressors' states; the model and the optimizer have their own."""
        return self._carried.state_dict(self._ranks.rank, self._ranks.world_size)

    def load_state_dict(self, state: Given) -> None:
        """Take back a saved state. Every rank calls this, each with what it saved, or with None where there is nothing.

        The states may be of another plan or of another number of ranks. Each is loaded by one rank, whichever it is;
        those of ranks that have gone by any, in a list with its own: `load_state_dict([state, another])`. What all
        ranks owe the mean gradient stays what it was (see `fxcomp.state.handover`). A rank without a state takes from
        the others what all must share: the number of steps, and what compressors of summed payloads remember.

        Raises BadState, or PeerFailed where another rank's state does not fit; nothing is trained after that until a
        state has been loaded. After something was raised inside a step on some rank, this is how ranks go on.
        """
        self._lockstep.check_open()
        with self._ranks.together("load_state_dict", after_a_stop=True):
            self._load_together(state)
            here = {"the plan": self.plan.digest, "the number of steps": self.steps}
            self._ranks.check_same("going on from the states", here)

    def _load_together(self, state: Given) -> None:
        exchange = self._exchange("load_state_dict")
        agreed = read_together(state, self._here, exchange)
        if agreed is None:
            return
        self.steps, self._rates = agreed.steps, dict(agreed.rates)
        self._enter_stage()
        self._go_on_from_here()
        self.runtime.undelivered = restore(agreed, self._carried, self._here, exchange)

    @property
    def _carried(self) -> Carried:
        return Carried(
            self.plan.digest, self.steps, self._rates, self.residuals, self.compressor_states, self.velocities,
            self.runtime.undelivered,
        )  # fmt: skip

    @property
    def _here(self) -> Here:
        sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        plans = {self.plan.digest, *(stage.plan.digest for stage in self._stages)}
        return Here(sizes, sorted(self._current.captured.gradient_names), plans, self.residuals.slices)

    def _exchange(self, topic: str) -> Exchange:
        return Exchange(self._ranks, self._sum_over_ranks, topic, self.training.device)
