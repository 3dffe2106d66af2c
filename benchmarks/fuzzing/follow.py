"""Run a program in both worlds, step by step, and say how it ended."""

from __future__ import annotations

import hashlib
import inspect
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fxcomp
from fuzzing.changes import CHANGES
from fuzzing.compare import first_difference
from fuzzing.program import Program
from fuzzing.world import World, around, equal_models
from fxcomp.errors import FxcompError, VerificationFailed

FINDINGS = ("wrong", "unverified", "foreign", "unraised", "hung", "died", "generator")
"""How a program must not end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended on one rank.

    equal      every step did what eager PyTorch does
    refused    one of our errors
    raised     eager raises there, and so do we
    wrong      another number, silently
    unverified verification found another number: not silent, but wrong
    foreign    an error that is not ours, where eager has none
    unraised   eager raises and we do not
    hung, died what the name says; generator: the program could not be built
    """

    kind: str
    text: str = ""
    steps: int = 0
    where: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Ranks:
    """What ranks tell each other outside of collectives, so that a rank that has failed strands nobody."""

    def __init__(self, store: dist.Store | None, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks

    def share(self, topic: str, mine: str) -> list[str]:
        """What every rank says about a topic."""
        if self.store is None:
            return [mine]
        self.store.set(f"fuzz/{topic}/{self.rank}", mine)
        self.store.wait([f"fuzz/{topic}/{rank}" for rank in range(self.ranks)], timedelta(seconds=40))
        return [self.store.get(f"fuzz/{topic}/{rank}").decode() for rank in range(self.ranks)]


def follow(program: Program, ranks: Ranks | None = None) -> Outcome:
    """Run a program; leaves this process as it was."""
    ranks = ranks or Ranks(None, 0, 1)
    before = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    worlds: list[World] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                try:
                    worlds.append(World(program, ranks.rank))
                except Exception as error:
                    return Outcome("generator", _said(error), where=traceback.format_exc())
            assert equal_models(worlds[0].model, worlds[1].model), "a program builds the same model twice"
            return _Run(program, ranks, *worlds).run()
    finally:
        for world in worlds:
            for handle in world.handles:
                handle.remove()
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)


class _Run:
    """The loop over steps."""

    def __init__(self, program: Program, ranks: Ranks, ours: World, theirs: World):
        self.program, self.ranks, self.ours, self.theirs = program, ranks, ours, theirs
        self.lossy = program.has("plan")

    def run(self) -> Outcome:
        for step in range(self.program.steps):
            if outcome := self._step(step):
                return outcome
        return Outcome("equal", steps=self.program.steps)

    def _step(self, step: int) -> Outcome | None:
        ours, theirs = self.ours, self.theirs
        for change in self.program.all("change"):
            if change.step == step and (outcome := self._change(change.slot, change.name, step)):
                return outcome
        batches = ours.batch(step), theirs.batch(step)
        expected, eager_error = None, ""
        if not self.lossy:
            with theirs.random_numbers(step):
                try:
                    expected = theirs.eager_gradients(batches[1])
                except Exception as error:
                    eager_error = _said(error)
        with ours.random_numbers(step):
            result, outcome = self._compiled(step, batches[0])
        if ours.reseed is None and eager_error:
            kind = "raised" if outcome is not None else "unraised"
            outcome = Outcome(kind, eager_error, step)
        everyone = self.ranks.share(f"step {step}", f"{outcome.kind}, {outcome.text[:150]}" if outcome else "")
        if outcome is not None:
            return outcome
        if any(everyone):
            return Outcome("wrong", f"this rank went on where another one failed: {everyone}", step)
        if self.lossy:
            return self._replicas_differ(step)
        theirs.eager_update()
        ours.after_step()
        theirs.after_step()
        wrong = first_difference(ours, theirs, (result, expected), batches)
        wrongs = self.ranks.share(f"after step {step}", wrong)
        wrong = wrong or next(filter(None, wrongs), "")
        return Outcome("wrong", wrong, step) if wrong else None

    def _change(self, slot: str, name: str, step: int) -> Outcome | None:
        errors: list[str] = []
        outcome = None
        for world in (self.ours, self.theirs):
            with world.random_numbers(step):
                try:
                    CHANGES[name](world, self.program.random(slot))
                except FxcompError as error:
                    outcome = _refused(error, step)
                except Exception as error:
                    errors.append(_said(error))
        if outcome is not None:
            return outcome
        return Outcome("raised", errors[0], step) if errors else None

    def _compiled(self, step: int, batch: Any) -> tuple[Any, Outcome | None]:
        ours = self.ours
        try:
            with around(self.program):
                if ours.step is None:
                    ours.step = self._compile(batch)
                return ours.step(batch), None
        except VerificationFailed as error:
            return None, Outcome("unverified", _said(error), step)
        except FxcompError as error:
            return None, _refused(error, step)
        except Exception as error:
            return None, Outcome("foreign", _said(error), step, traceback.format_exc())

    def _compile(self, batch: Any) -> Any:
        program, ours = self.program, self.ours
        plan = program.get("plan", "dense") if program.ranks > 1 else None
        state = torch.get_rng_state()
        step = fxcomp.compile_step(
            ours.model, ours.loss_fn, ours.optimizer, batch, plan=plan, max_grad_norm=ours.clip,
            skip_nonfinite=program.has("skip_nonfinite"), verify_every=_verify(program),
        )  # fmt: skip
        assert torch.equal(state, torch.get_rng_state()), "compiling drew random numbers"
        return step

    def _replicas_differ(self, step: int) -> Outcome | None:
        """Whether ranks part under a compressed plan."""
        self.ours.after_step()
        tensors = [*self.ours.model.parameters(), *self.ours.model.buffers()]
        held = b"".join(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
        everyone = self.ranks.share(f"after step {step}", hashlib.sha256(held).hexdigest())
        return Outcome("wrong", "ranks hold other parameters or buffers", step) if len(set(everyone)) > 1 else None


def _verify(program: Program) -> Any:
    """How often the step verifies itself: mostly never, so that guards alone stand between us and a wrong step."""
    default = inspect.signature(fxcomp.compile_step).parameters["verify_every"].default
    chosen = program.get("verify")
    if program.has("plan") or chosen == "1":
        return 1
    if chosen == "sampled" and isinstance(default, str):
        return default
    return "never" if isinstance(default, str) else 0


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:2])[:300]}"


def _refused(error: FxcompError, step: int) -> Outcome:
    cause = error.__cause__ or error.__context__
    return Outcome("refused", _said(error), step, _said(cause) if cause is not None else "")
