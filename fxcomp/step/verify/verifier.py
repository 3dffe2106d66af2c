"""Compare some of a compiled step's runs with eager PyTorch, and raise on every rank where they differ.

    eager PyTorch ─► loss, aux, gradients, buffers    on a copy of the batch; nothing of the user's changes
    the emitted step:
        each local gradient     is compared as it is made
        before any update       the ranks agree; all of them raise, or none
        each update             is compared with the user's own optimizer on a copy of that parameter
        after the last line     aux and buffers are compared; the ranks agree again

Every rank verifies the same steps. One that has no room for the eager pass tells the others, and the step is not
verified anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.optimizer import Owned
from fxcomp.capture.training import Training
from fxcomp.codegen.load import observed
from fxcomp.errors import VerificationFailed
from fxcomp.graph.buffers import written_parameters
from fxcomp.graph.captured import Captured
from fxcomp.graph.info import Role, info
from fxcomp.graph.regions import regions
from fxcomp.plan.verified_steps import VerifiedSteps
from fxcomp.runtime.runtime import Runtime
from fxcomp.step.verify.compare import FLOOR, difference, largest, tolerance_of
from fxcomp.step.verify.eager import Eager, run_eagerly
from fxcomp.step.verify.room import has_room, needed_bytes
from fxcomp.step.verify.update import UpdateCheck


class Emitted(Protocol):
    """A step as it was emitted."""

    @property
    def captured(self) -> Captured: ...

    @property
    def module(self) -> Any: ...

    @property
    def graph(self) -> torch.fx.GraphModule: ...


class Verifier:
    """Knows which steps are verified, and begins to."""

    def __init__(
        self, training: Training, steps: VerifiedSteps, is_fresh: Callable[[Owned], bool], note: Callable[[str], None]
    ):
        self._training, self._steps, self._is_fresh, self._note = training, steps, is_fresh, note
        self._has_noted = False

    def wants(self, step: int) -> bool:
        """Whether a step is verified; every rank says the same."""
        return step in self._steps

    def begin(
        self, batch: Any, emitted: Emitted, runtime: Runtime, step: int, *, is_plain: bool
    ) -> Verification | None:
        """Run eager PyTorch for a step that is about to run; None if some rank has no room for that.

        `is_plain` says that what reaches the updates is the mean of local gradients: nothing is compressed or owed.
        """
        if anywhere(self._training, runtime, not has_room(self._training, batch))[0]:
            self.skip(step, needed_bytes(self._training, batch))
            return None
        return Verification(self, self._training, batch, emitted, runtime, step, is_plain=is_plain)

    def is_fresh(self, owner: Owned) -> bool:
        """Whether a parameter's first step is still to come."""
        return self._is_fresh(owner)

    def skip(self, step: int, needed: int) -> None:
        """Say once that steps are not verified."""
        if not self._has_noted:
            self._has_noted = True
            self._note(
                f"step {step} was not verified, for want of memory on some rank: beside the step, {needed / 1e6:.0f} MB"
                " are needed here"
            )


def anywhere(training: Training, runtime: Runtime, *flags: bool) -> list[bool]:
    """What holds on any rank; all ranks call it at the same line."""
    counts = torch.tensor([float(flag) for flag in flags], device=training.device)
    runtime.transport.all_reduce(counts, "world", "main").wait()
    return [bool(count > 0) for count in counts.cpu()]


class Verification:
    """One step under verification."""

    def __init__(
        self,
        verifier: Verifier,
        training: Training,
        batch: Any,
        emitted: Emitted,
        runtime: Runtime,
        step: int,
        *,
        is_plain: bool,
    ):
        self._verifier, self._training, self._emitted, self._step = verifier, training, emitted, step
        self._runtime = runtime
        self._captured = emitted.captured
        self._is_plain = is_plain
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._needed = needed_bytes(training, batch)
        self._relative = tolerance_of(self._captured)
        self._wrong: list[str] = []
        self._is_exact = True
        """Whether everything so far was equal bit for bit: then whole numbers must be equal too."""
        self._updates = UpdateCheck(
            training, verifier.is_fresh, self._relative, written_parameters(self._captured.graph)
        )
        self._eager = self._run_eagerly(batch)
        self._updates.largest = max(map(largest, self._eager.gradients.values()), default=0.0) if self._eager else 0.0

    def run(self, arguments: Sequence[Any]) -> Any:
        """Run the emitted step; raises VerificationFailed on every rank if any rank found a difference."""
        function = observed(self._emitted.module, rule=self._updates.rule, update=self._watch_arrivals)
        self._runtime.on_gradient, self._runtime.on_update = self._on_gradient, self._on_update
        try:
            loss, aux = function(self._runtime, *arguments)
        finally:
            self._runtime.on_gradient = self._runtime.on_update = None
        if self._eager is not None:
            self._finish(self._eager, aux)
        return loss, aux

    def _run_eagerly(self, batch: Any) -> Eager | None:
        """Eager's results; None if there is no room for them, or if eager PyTorch raises."""
        try:
            return run_eagerly(self._training, self._captured, batch)
        except compat.OUT_OF_MEMORY:
            compat.forget_freed_memory(self._training.device)
            return None
        except Exception as error:
            self._wrong.append(f"eager PyTorch raises {type(error).__name__}: {error}")
            return None

    # Before any update

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if self._eager is None or self._wrong:
            return
        expected = self._eager.gradients[name]
        try:
            off = self._off(gradient, expected, FLOOR * self._relative * self._updates.largest)
        except compat.OUT_OF_MEMORY:  # then this one goes unseen
            off = None
        if off is not None:
            self._wrong.append(
                f"the gradient of {name!r} differs from eager by up to {off:.3g}, where it reaches"
                f" {largest(expected):.3g}"
            )
        if self._is_plain and self._ranks > 1:
            self._updates.means.add(name, gradient)
        if self._ranks > 1:
            del self._eager.gradients[name]

    def _on_update(self, loss: Tensor) -> None:
        eager = self._eager
        if eager is not None:
            if self._off(loss, eager.loss) is not None:
                self._wrong.insert(0, f"the loss is {loss.item():.9g}, eager's is {eager.loss.item():.9g}")
            if eager.unexpected and not self._wrong:
                self._wrong.append(f"{eager.unexpected[0]!r} has a gradient in eager PyTorch, and none here")
        out_of_memory = eager is None and not self._wrong
        wrong, skipped, unplain = anywhere(
            self._training, self._runtime, bool(self._wrong), out_of_memory, not self._is_plain
        )
        if wrong:
            self._fail("No parameter has been updated; buffers and residuals may have.")
        if skipped:
            self._eager = None
            self._verifier.skip(self._step, self._needed)
        elif eager is not None and self._ranks == 1:
            self._updates.expected = self._clipped(self._with_owed(eager.gradients))
        elif not unplain:
            self._updates.means.average(self._captured.gradient_names, self._runtime, self._ranks)

    def _with_owed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Eager's gradients and what has waited for them, which one rank adds by itself."""
        owed = {name: self._runtime.undelivered[name] for name in gradients if name in self._runtime.undelivered}
        return gradients | {name: gradients[name] + value.view_as(gradients[name]) for name, value in owed.items()}

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Eager's gradients after clipping, in the same memory."""
        limit = self._training.max_grad_norm
        if limit is not None:
            stand_ins: list[Tensor] = []
            for value in gradients.values():
                stand_in = value.detach()
                stand_in.grad = value
                stand_ins.append(stand_in)
            torch.nn.utils.clip_grad_norm_(stand_ins, limit)
            for stand_in in stand_ins:
                stand_in.grad = None
        return gradients

    # Updates

    def _watch_arrivals(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """An update region that counts the buckets it gets, where gradients are clipped."""
        places = self._places_of_buckets().get(name, ()) if self._training.max_grad_norm is not None else ()
        if not places:
            return run

        def watched(*arguments: Any) -> Any:
            for place in places:
                self._updates.bucket(arguments[place])
            return run(*arguments)

        return watched

    def _places_of_buckets(self) -> dict[str, tuple[int, ...]]:
        """Which arguments of each update region are averaged gradients, flat."""
        seen: set[Any] = set()
        places: dict[str, tuple[int, ...]] = {}
        for region in (region for region in regions(self._emitted.graph) if region.updates):
            new = [n for n in region.inputs if _is_bucket(n) and n not in seen]
            seen.update(new)
            places[region.name] = tuple(region.inputs.index(n) for n in new)
        return places

    # After the last line

    def _finish(self, eager: Eager, aux: Sequence[Any]) -> None:
        skipped = self._runtime.counters.skipped
        self._updates.finish(self._captured.gradient_names, skipped=skipped)
        if self._updates.wrong:
            self._wrong.append(self._updates.wrong)
        self._check_aux(eager, aux)
        self._check_buffers(eager)
        if anywhere(self._training, self._runtime, bool(self._wrong))[0]:
            self._fail(self._what_was_updated())

    def _what_was_updated(self) -> str:
        done, all_of_them = self._updates.updated, len(self._captured.gradient_names)
        if done == 0:
            return "No parameter of this rank has been updated; buffers and residuals may have."
        how_many = "All parameters" if done == all_of_them else f"{done} of {all_of_them} parameters"
        return f"{how_many} of this rank have been updated. Load a checkpoint before you go on."

    def _check_aux(self, eager: Eager, aux: Sequence[Any]) -> None:
        values = self._captured.aux_leaves(aux)
        if self._captured.has_aux and eager.structure != self._captured.aux_spec:
            self._wrong.append("the auxiliary result has another structure than eager's")
            return
        for place, (value, expected) in enumerate(zip(values, eager.aux, strict=True)):
            if isinstance(value, Tensor) and isinstance(expected, Tensor):
                differs = self._off(value, expected, self._relative * largest(eager.loss)) is not None
            else:
                differs = not _equal(value, expected, self._relative)
            if differs and not self._wrong:
                self._wrong.append(
                    f"value {place} of the auxiliary result is {_shown(value)}, eager's is {_shown(expected)}"
                )

    def _check_buffers(self, eager: Eager) -> None:
        """Of rank 0 alone: the others are given its buffers."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        for name, buffer in self._training.model.named_buffers():
            expected = eager.buffers.get(name)
            if expected is not None and not self._wrong and (off := self._off(buffer, expected)) is not None:
                self._wrong.append(
                    f"the buffer {name!r} differs from eager's by up to {off:.3g}, where it reaches"
                    f" {largest(expected):.3g}"
                )

    # Both

    def _off(self, value: Tensor, expected: Tensor, absolute: float = 0.0) -> float | None:
        """The difference if it is more than noise. Whole numbers may follow from noise, as a count of right answers."""
        if torch.equal(value, expected):
            return None
        if (
            value.dtype is expected.dtype
            and not (value.is_floating_point() or value.is_complex())
            and not self._is_exact
        ):
            return None
        self._is_exact = False
        return difference(value, expected, self._relative, absolute)

    def _fail(self, what_happened: str) -> None:
        what = self._wrong[0] if self._wrong else "another rank found a difference"
        raise VerificationFailed(
            f"step {self._step}: {what}.\n"
            f"  {what_happened} Something that tracing took for a constant may have changed since: a global, a value in"
            " a closure, an attribute of an object. Call compile_step again after such a change. If nothing has, the"
            " capture is wrong for this model: please report it with the model's code, and train with eager PyTorch"
            " meanwhile."
        )


def _is_bucket(node: torch.fx.Node) -> bool:
    """Whether a node's value is a bucket of gradients that came from other ranks."""
    known = info(node)
    return known.role in (Role.WAIT, Role.DECOMPRESS, Role.COPY) and known.bucket is not None


def _equal(value: Any, expected: Any, relative: float) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return value == expected or value != value or abs(value - expected) <= relative * abs(expected)
    return type(value) is type(expected) and bool(value == expected)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.9g}" if value.numel() == 1 else f"a tensor up to {largest(value):.6g}"
    return repr(value)
