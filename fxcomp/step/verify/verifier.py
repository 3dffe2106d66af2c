"""Compare some steps with eager PyTorch, and raise on every rank if any rank finds a difference.

    parameters, state       compared between ranks
    eager PyTorch ─► loss, aux, gradients, buffers    on a copy of the batch, without side effects
    the emitted step:
        each local gradient     compared when it is ready
        before any update       ranks agree: all raise, or none. If a difference is small, the rounding error is
                                estimated first, with more runs of eager PyTorch
        each update             compared with the user's optimizer on a copy
        after the last line     aux and buffers are compared; ranks agree again

If a rank lacks memory for the eager pass, no rank verifies the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.structures import flatten
from fxcomp.capture.training import Training
from fxcomp.codegen.load import observed
from fxcomp.errors import VerificationFailed
from fxcomp.graph.captured import written_parameters
from fxcomp.graph.info import Role, info
from fxcomp.graph.regions import regions
from fxcomp.ranks import Ranks
from fxcomp.runtime.runtime import Runtime
from fxcomp.state.inputs import Sums
from fxcomp.state.momenta import moved_states
from fxcomp.step.calendar import Use
from fxcomp.step.observer import Observer, StepUnderWay
from fxcomp.step.verify.differences import Differences
from fxcomp.step.verify.eager import EagerResult, largest, rounding_of, run_eagerly
from fxcomp.step.verify.replicas import Replicas
from fxcomp.step.verify.update import UpdateCheck, square_sum

MARGIN = 1.1
"""Factor for the rounding of sizes by allocators (assumed)."""

STATES_AT_ONCE = 12
"""Number of copies of the largest parameter or state, in fp32 or wider: before, expected, and temporaries."""


@dataclass(slots=True)
class Verifier(Observer):
    wants = frozenset({Use.VERIFY})

    training: Training
    ranks: Ranks
    note: Callable[[str], None]
    sums: Sums
    """Gradient sums of the other micro-batches of the step's group."""
    _has_noted: bool = False
    _under_way: Verification | None = None

    def before(self, step: StepUnderWay) -> None:
        """Run eager PyTorch for the step, unless a rank lacks memory.

        Raises ReplicasDiffer on all ranks if parameters or optimizer state differ between ranks.
        """
        spare, needed = compat.spare_bytes(self.training.device), needed_bytes(self.training, step.batch)
        replicas = Replicas(self.training, self.ranks)
        is_full, *differing = anywhere(
            self.training, step.runtime, spare is not None and spare < needed, *replicas.flags
        )
        replicas.check(differing, step.number)
        self._under_way = None
        if is_full:
            self.skip(step.number, needed)
        else:
            self._under_way = Verification(self, step, needed)

    def after(self, step: StepUnderWay, aux: Sequence[Any]) -> None:  # noqa: ARG002
        """Compare the step's results. Raises VerificationFailed on all ranks."""
        if self._under_way is not None:
            self._under_way.finish(aux)
            self._under_way = None

    def skip(self, step: int, needed: int) -> None:
        """Note, only once, that a step is not verified for lack of memory."""
        if not self._has_noted:
            self._has_noted = True
            self.note(
                f"step {step} was not verified, for lack of memory on some rank: it needs {needed / 1e6:.0f} MB here"
                " besides the step"
            )


def needed_bytes(training: Training, batch: Any) -> int:
    """Return the bytes held during a verified step: gradients, buffers twice, the batch, and STATES_AT_ONCE states."""
    gradients = [owner.parameter.nbytes for owner in training.owned]
    largest_fp32 = max(max(owner.parameter.nbytes, 4 * owner.parameter.numel()) for owner in training.owned)
    buffers = sum(buffer.nbytes for buffer in training.model.buffers())
    leaves = sum(compat.held_bytes(leaf) for leaf in flatten(batch)[0] if isinstance(leaf, Tensor))
    return int(MARGIN * (sum(gradients) + 2 * buffers + leaves + STATES_AT_ONCE * largest_fp32))


def anywhere(training: Training, runtime: Runtime, *flags: bool) -> list[bool]:
    """Return, for each flag, True if any rank set it. Every rank calls it at the same line."""
    counts = torch.tensor([float(flag) for flag in flags], device=training.device)
    runtime.transport.all_reduce(counts, "world", "main").wait()
    return [bool(count > 0) for count in counts.cpu()]


class Verification:
    def __init__(self, verifier: Verifier, step: StepUnderWay, needed: int):
        self._verifier, self._training, self._program = verifier, verifier.training, step.program
        self._step, self._runtime, self._batch = step.number, step.runtime, step.batch
        state = step.force.state
        plan = step.force.plan
        self._is_plain = plan.is_dense and not plan.moves_exchange and not state.owed
        """True if updates get the mean of local gradients: no compression, and no residuals of an earlier plan."""
        self._ranks = verifier.ranks.world_size
        self._needed = needed
        self._seen = Counter[str]()
        """Number of elements of each gradient that have been compared."""
        self._differences = Differences(step.program.captured)
        self._updates = UpdateCheck(
            self._training,
            self._differences.relative,
            written_parameters(step.program.captured.graph),
            moved_states(step.program.captured.graph, plan),
        )
        self._eager = self._completed(self._run_eagerly(step.batch))
        self._updates.largest = max(map(largest, self._eager.gradients.values()), default=0.0) if self._eager else 0.0
        function = observed(self._program.module, rule=self._updates.rule, update=self._watch_arrivals)
        step.run = lambda arguments: function(step.runtime, *arguments)
        shown = self._runtime.gradients
        shown.on_gradient, shown.on_update = self._on_gradient, self._on_update

    def _run_eagerly(self, batch: Any) -> EagerResult | None:
        try:
            return run_eagerly(self._training, self._program.captured, batch, self._seed())
        except compat.OUT_OF_MEMORY:
            compat.forget_freed_memory(self._training.device)
        except Exception as error:
            self._differences.note(f"eager PyTorch raises {type(error).__name__}: {error}")
        return None

    def _seed(self) -> Tensor | None:
        if self._training.loss_scale is None:
            return None
        return self._verifier.sums.seed(is_weighted=self._program.captured.is_weighted)

    def _look_again(self) -> bool:
        """Compare small differences of gradients (suspects) with estimated rounding errors.

        Return True if a difference is too large on any rank. Every rank calls it.
        """
        rounding: dict[str, float] = {}
        with suppress(*compat.OUT_OF_MEMORY):
            rounding = rounding_of(self._training, self._program.captured, self._batch, self._seed())
        largest = self._updates.largest
        self._updates.rounding = self._differences.judge_suspects({k: v * largest for k, v in rounding.items()})
        return anywhere(self._training, self._runtime, bool(self._differences.first))[0]

    def _completed(self, eager: EagerResult | None) -> EagerResult | None:
        """Add gradients of the group's other micro-batches to `eager`; None if memory is short. Every rank calls it."""
        sums, share = self._verifier.sums, None
        if self._program.captured.is_weighted:
            share = sums.share(eager and eager.count, self._sum_over_ranks, self._ranks)
        if eager is None:
            return None
        try:
            for name, gradient in eager.gradients.items():
                eager.gradients[name] = sums.whole(name, gradient, share)
        except compat.OUT_OF_MEMORY:
            compat.forget_freed_memory(self._training.device)
            return None
        return eager

    def _sum_over_ranks(self, value: Tensor) -> None:
        self._runtime.transport.all_reduce(value, "world", "main").wait()

    # Before any update

    def _on_gradient(self, name: str, gradient: Tensor, start: int) -> None:
        if self._eager is None or self._differences.first:
            return
        with suppress(*compat.OUT_OF_MEMORY):  # skip this gradient
            expected = self._eager.gradients[name]
            gradient = gradient.to(expected.dtype)  # 16-bit values may stand for their cast
            sent, wanted = self._updates.as_sent(name, gradient, expected, start)
            self._differences.check_gradient(name, sent, wanted, self._updates.largest, start)
        if self._ranks > 1:
            if self._is_plain:
                self._updates.means.add(name, gradient, start)
            self._seen[name] += gradient.numel()
            if self._seen[name] == self._eager.gradients[name].numel():
                del self._eager.gradients[name]

    def _on_update(self, loss: Tensor) -> None:
        eager, found = self._eager, self._differences
        if eager is not None:
            found.check_loss(loss, eager.loss)
            if eager.unexpected:
                found.note(f"{eager.unexpected[0]!r} has a gradient in eager PyTorch, and none here")
        out_of_memory = eager is None and not found.first
        wrong, skipped, unplain, suspected = anywhere(
            self._training, self._runtime, bool(found.first), out_of_memory, not self._is_plain, bool(found.suspects)
        )
        if wrong or (suspected and self._look_again()):
            self._fail("No parameter has been updated; buffers and residuals may have.")
        if skipped:
            self._eager = None
            self._verifier.skip(self._step, self._needed)
        elif eager is not None and self._ranks == 1:
            self._updates.expected = self._clipped(self._with_undelivered(eager.gradients))
        elif not unplain:
            self._updates.means.average(self._program.captured.gradient_names, self._runtime, self._ranks)

    def _with_undelivered(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the residuals of a dropped plan to eager's gradients, as the step does on a single rank."""
        owed = self._runtime.gradients.owed
        waited = {name: owed[name] for name in gradients if name in owed}
        added = ((gradients[name], name, value) for name, value in waited.items())
        return gradients | {name: own.add(value.view_as(own)).to(own.dtype) for own, name, value in added}

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        limit = self._training.max_grad_norm
        if limit is not None:
            norm = math.sqrt(sum(map(square_sum, gradients.values())))
            for value in gradients.values():
                value.mul_(min(1.0, limit / (norm + 1e-6)))
        return gradients

    # Updates

    def _watch_arrivals(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an update region to sum the squares of its averaged buckets, if gradients are clipped by norm."""
        places = self._places_of_buckets().get(name, ()) if self._training.max_grad_norm is not None else ()
        if not places:
            return run

        def watched(*arguments: Any) -> Any:
            for place in places:
                self._updates.bucket(arguments[place])
            return run(*arguments)

        return watched

    def _places_of_buckets(self) -> dict[str, tuple[int, ...]]:
        """Return the positions of flat averaged gradients in each update region's arguments."""
        seen: set[Any] = set()
        places: dict[str, tuple[int, ...]] = {}
        for region in (region for region in regions(self._program.graph) if region.updates):
            new = [n for n in region.inputs if _is_bucket(n) and n not in seen]
            seen.update(new)
            places[region.name] = tuple(region.inputs.index(n) for n in new)
        return places

    # After the last line

    def finish(self, aux: Sequence[Any]) -> None:
        """Compare updates, aux and buffers."""
        eager, found = self._eager, self._differences
        if eager is None:
            return
        self._updates.finish(self._program.captured.gradient_names, skipped=self._runtime.counters.skipped)
        found.note(self._updates.wrong)
        found.check_aux(aux, eager)
        if self._verifier.ranks.rank == 0:  # other ranks receive rank 0's buffers
            found.check_buffers(self._training.model, eager)
        if anywhere(self._training, self._runtime, bool(found.first))[0]:
            self._fail(self._what_was_updated())

    def _what_was_updated(self) -> str:
        done, all_of_them = self._updates.updated, len(self._program.captured.gradient_names)
        if done == 0:
            return "No parameter of this rank has been updated; buffers and residuals may have."
        how_many = "All parameters" if done == all_of_them else f"{done} of {all_of_them} parameters"
        return f"{how_many} of this rank have been updated. Load a checkpoint before you go on."

    def _fail(self, what_happened: str) -> None:
        raise VerificationFailed(
            f"step {self._step}: {self._differences.first or 'another rank found a difference'}.\n"
            f"  {what_happened} Tracing takes globals, values in closures and attributes of objects for constants: if"
            " one has changed since, call compile_step again. If none has, the capture is wrong for this model: please"
            " report it with the model's code, and train with eager PyTorch meanwhile."
        )


def _is_bucket(node: torch.fx.Node) -> bool:
    known = info(node)
    return known.role in (Role.WAIT, Role.DECOMPRESS, Role.COPY) and known.bucket is not None
