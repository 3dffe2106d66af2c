"""Run the modules of one fully_shard model: dense at first, then by a plan that all ranks share.

    fully_shard: a module's gradients, a part for each rank ──► here ──► this rank's part of the mean

    compress     every part by itself, with what was left out of it before
    all_to_all   a payload for each rank
    decompress   the mean of the payloads for this rank's part

A module that stays dense takes fully_shard's own reduce_scatter. Everything runs where fully_shard runs it: on the CPU
in backward's thread, on a GPU on its stream for reductions, while compute goes on. What a pass leaves out counts when
backward has ended and all parts were finite; until then both residuals are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import UnsupportedFeature
from fxcomp.frontends.backward_passes import DENSE_PASSES, ReadyTimes
from fxcomp.frontends.scatter_plan import Scattering
from fxcomp.frontends.scattered_modules import ScatteredModule
from fxcomp.plan.plan import Plan
from fxcomp.runtime.moves import Move
from fxcomp.runtime.runtime import Runtime
from fxcomp.site import Site
from fxcomp.step.calendar import Calendar
from fxcomp.step.lockstep import Lockstep
from fxcomp.step.race import WARM_STEPS, Race
from fxcomp.step.step_times import StepTimes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _ScatterPass:
    """The gradients that have come of the backward pass under way."""

    order: list[int] = field(default_factory=list[int])
    """The modules that have come."""
    residuals: dict[int, Tensor | None] = field(default_factory=dict[int, Tensor | None])
    """Residuals to keep if the pass counts; None for those that it has delivered."""
    agrees: bool = False
    """Ranks agree on whether it counts when it ends: something is left out of it, or delivered."""
    not_finite: Tensor | None = None
    stream: Any = None


CLOSED = (
    "what compresses these gradients has been closed.\n"
    "  Call fxcomp.compress_reduce_scatter again with a newly sharded model, on all ranks."
)


class ScatterJob:
    """The plan of one model, what its modules owe, and the backward pass under way."""

    def __init__(self, site: Site, modules: Sequence[ScatteredModule], plan: Scattering) -> None:
        self.site, self.modules, self.plan, self._scaler = site, modules, plan, plan.options.scaler
        self._lockstep = Lockstep(site.ranks, CLOSED)
        self._runtime = Runtime(site.transport, site.device)
        self._dense = [module.module.own_scatter for module in modules]
        self.passes = 0
        self.owed: dict[int, Tensor] = {}
        """Residuals of each module's gradients here: fp32, a part for each rank."""
        self.scale = 1.0
        """The factor of the loss that it is in the unit of."""
        self._calendar = Calendar()
        self._race: Race | None = None
        """Of the plan and dense."""
        self._compresses = True
        """False while dense has its turn, and after it has won."""
        self._delivers = False
        """Some rank owes what the next dense passes bring."""
        self._pass = _ScatterPass()
        self._ready = ReadyTimes(site.device)
        self.times = StepTimes(site.device)
        self._ended: Any = None

    def install(self) -> None:
        """Take the place of fully_shard's own collective."""
        for number, module in enumerate(self.modules):
            module.module.scatter_by(_ModuleScatter(self, number, self._dense[number]))

    # A pass

    def arrive(self, number: int) -> None:
        """The gradients of a module are there; compute has just made them."""
        if not self._pass.order:
            self._lockstep.enter(self.passes)
            self._lockstep.has_begun = True
            compat.at_end_of_backward(self._end)
            self._follow_scale()
            self._pass.agrees = self._delivers or (self._compresses and self.plan.keeps_something)
        self._pass.order.append(number)
        if self._is_timed:
            self._ready.enter()
            if self.site.device.type != "cpu":  # compute goes on at once
                self._ready.leave()

    def scatter(self, number: int, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        """Fill this rank's part of the mean of a module's gradients."""
        with torch.no_grad(), compat.without_autocast():
            try:
                self._scatter(number, output, given, group, op)
                if self._is_timed and self.site.device.type == "cpu":
                    self._ready.leave()
            except BaseException as error:
                self.stop(error)
                raise

    def stop(self, error: BaseException) -> None:
        """End the pass under way, in which something was raised; the other ranks learn of it."""
        self._pass = _ScatterPass()
        self._lockstep.leave(error, self._runtime)

    @property
    def _is_timed(self) -> bool:
        return not self.plan.is_decided and self.passes < DENSE_PASSES

    def _scatter(self, number: int, output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        module, now = self.modules[number], self._pass
        now.stream = compat.stream_of(given.device)
        # Where parameters without gradients are left out, what is owed waits.
        is_whole = given.numel() == module.elements
        if is_whole and self._compresses and self.plan.compressor(number) is not None:
            self._compress(number, output, given, op)
        else:
            if is_whole and self._race is None and (owed := self._owed(number)) is not None:
                given.add_(owed)
                now.residuals[number] = None
            self._dense[number](output, given, group, op)
        if now.agrees:
            self._look_at(output)

    def _owed(self, number: int) -> Tensor | None:
        return self._pass.residuals.get(number, self.owed.get(number))

    def _compress(self, number: int, output: Tensor, given: Tensor, op: Any) -> None:
        module, ranks = self.modules[number], self.site.ranks.world_size
        if not (compat.is_mean(op) or compat.is_sum(op)):
            raise UnsupportedFeature(
                "fully_shard scatters with a divisor of its own for gradients (set_gradient_divide_factor).\n"
                "  Leave it out, and scale the loss."
            )
        compressor = self.plan.compressor(number)
        assert compressor is not None, "its gradients are compressed"
        compressor = compressor.bound_to([(size,) for size in module.segments], ranks)
        feeds_back = self.plan.options.compress.feedback.surrounds(compressor)
        residual = self._fresh_residual(number, given.device) if feeds_back else None
        values, size = given.float(), compressor.payload_elements(module.segments)
        if residual is None and (owed := self._owed(number)) is not None:  # of another plan
            values = values + owed
            self._pass.residuals[number] = None
        payloads = given.new_empty(ranks * size, dtype=compressor.payload_dtype)
        for k in range(ranks):
            mine = slice(k * module.part, (k + 1) * module.part)
            kept, payload = None if residual is None else residual[mine], payloads[k * size : (k + 1) * size]
            compressor.encode(values[mine], kept, payload, module.segments)
        arrived = torch.empty_like(payloads)
        self.site.transport.all_to_all(Move(payloads, arrived, ranks, "world")).wait()
        mean = output if output.dtype is torch.float32 else output.new_empty(output.shape, dtype=torch.float32)
        compressor.decode(arrived, ranks, module.segments, mean)
        if compat.is_sum(op):
            mean.mul_(ranks)
        if mean is not output:
            output.copy_(mean)
        if residual is not None:
            self._pass.residuals[number] = residual

    def _fresh_residual(self, number: int, device: torch.device) -> Tensor:
        """Copy what is owed: a pass that does not count leaves it as it was."""
        known = self._owed(number)
        if known is None:
            return torch.zeros(self.modules[number].elements, device=device)
        return known.clone()

    def _look_at(self, part: Tensor) -> None:
        """See whether a part is finite: what is not finite on any rank is not in the part that it went to."""
        seen = (~torch.isfinite(torch.stack(torch.aminmax(part))).all()).to(torch.uint8).view(1)
        before = self._pass.not_finite
        self._pass.not_finite = seen if before is None else before | seen

    def _follow_scale(self) -> None:
        """Let what is owed be in the unit of the loss's factor."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self.scale:
            for value in self.owed.values():
                value.mul_(scale / self.scale)
            self.scale = scale

    # Its end

    def _end(self) -> None:
        """End a pass; torch calls this when backward has ended."""
        now, self._pass = self._pass, _ScatterPass()
        if not now.order:
            return
        try:
            with torch.no_grad():
                compat.wait_for_stream(now.stream)
                self._commit(now)
                self._count_pass(now)
        except BaseException as error:
            self.stop(error)
            raise

    def _commit(self, now: _ScatterPass) -> None:
        """Keep what the pass owes, unless a part of some rank is not finite: it is skipped then, or lost anyway."""
        if not now.agrees:
            return
        flag = now.not_finite
        assert flag is not None, "a part has come"
        self.site.transport.all_reduce(flag, "world", "main", "max").wait()
        if flag.device.type == "cpu":
            if flag.item():
                return
            self._delivers = self._delivers and len(set(now.order)) < len(self.modules)
        else:  # decided on the device: nobody waits for it
            now.residuals = {number: self._chosen(flag, number, value) for number, value in now.residuals.items()}
        for number, value in now.residuals.items():
            if value is None:
                self.owed.pop(number, None)
            else:
                self.owed[number] = value

    def _chosen(self, flag: Tensor, number: int, value: Tensor | None) -> Tensor | None:
        before = self.owed.get(number)
        if value is None:
            return None if before is None else before * flag
        return torch.where(flag.bool(), value.new_zeros(()) if before is None else before, value, out=value)

    def _count_pass(self, now: _ScatterPass) -> None:
        end = self.times.look()
        if self._ended is not None and self.plan.is_decided:
            self.times.add(self.passes, [(self._ended, end)], [])
        self._ended = end
        if self._is_timed:
            self._ready.end_pass(tuple(self.modules[number].bucket for number in now.order))
        self.passes += 1
        if self._race is not None and self.passes == self._race.turn.ends:
            self._end_turn(self._race)
        if not self.plan.is_decided and self.passes >= DENSE_PASSES:
            self._decide(list(dict.fromkeys(now.order)))

    def _decide(self, order: Sequence[int]) -> None:
        """Agree on a plan with all ranks."""
        with self.site.ranks.together("compress_reduce_scatter"):
            layout = tuple(self.modules[number].bucket for number in order)
            self.plan.decide(self.site, order, layout, self._ready.medians_us(layout, self.site.device))
            if self.plan.choice is not None and not self.plan.choice.is_dense:
                self._race = Race(self.plan.choice.runners, self.passes + WARM_STEPS, self._calendar)
        log.info("%s\n%s", self.site.cluster, self.plan.plan)

    def _end_turn(self, race: Race) -> None:
        """Let the other one have its turn, or the better one stay; what is owed goes out with the next dense pass."""
        race.end_turn(self.times.slowest(race.turn.steps, self.site))
        self.times.forget()
        if race.result is None:
            self._compresses = race.turn.number == 0
        else:
            self._race, self._compresses = None, race.result.winner == 0
            self._delivers = not self._compresses
            self.plan.tell(str(race.result), follows_dense=not self._compresses)
        self._ended = self.times.look()

    # State

    def follow(self, plan: Plan) -> None:
        """Follow a saved plan, also where dense has won or has its turn."""
        self.plan.follow(plan)
        self.plan.notes = (*self.plan.notes, "the plan is that of a loaded state")
        self.plan.choice, self._race, self._compresses = None, None, True

    def owe(self, parameters: Mapping[str, Tensor], scale: float) -> None:
        """Owe nothing but this; every rank calls it. Dense gradients bring it, compressed ones take it over."""
        self.owed = {
            number: module.in_parts(parameters, self.site.device)
            for number, module in enumerate(self.modules)
            if not parameters.keys().isdisjoint(module.module.names)
        }
        self.scale, self._delivers = scale, True

    @property
    def lockstep(self) -> Lockstep:
        return self._lockstep

    def close(self) -> None:
        """Give back the process groups; other ranks need not be there."""
        self._lockstep.close(self._runtime)


class _ModuleScatter:
    """The function that fully_shard calls with the gradients of one module."""

    def __init__(self, job: ScatterJob, number: int, dense: compat.Scatter) -> None:
        self._job, self._number, self._dense = job, number, dense
        self._has_begun = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._has_begun:  # memory for the gradients; that for the part comes after it
            self._has_begun = True
            self._job.arrive(self._number)
        return self._dense.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op, "fully_shard runs it on a stream of its own"
        self._has_begun = False
        self._job.scatter(self._number, output_tensor, input_tensor, group, op)
