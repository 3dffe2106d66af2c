"""Run a program in both worlds, step by step, and say how it ended."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fxcomp
from fuzzing.changes import CHANGES
from fuzzing.compare import first_difference, take_rounding_over
from fuzzing.program import Program
from fuzzing.themes import make_world
from fuzzing.world import World, equal_models
from fxcomp.errors import FxcompError, VerificationFailed

FINDINGS = ("wrong", "unverified", "foreign", "unraised", "hung", "died", "generator")
"""Forbidden ends of a program."""


class CompilingDrewError(Exception):
    """Random numbers after compiling are not those that would have been drawn without it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a program on one rank.

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
    """Messages of ranks outside of collectives, so that a rank that has failed strands nobody."""

    def __init__(self, store: dist.Store | None, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks

    def share(self, topic: str, mine: str) -> list[str]:
        """Gather every rank's word on a topic."""
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
                    worlds.append(make_world(program, ranks.rank))
                except Exception as error:
                    return Outcome("generator", _said(error), where=traceback.format_exc())
            assert equal_models(worlds[0].model, worlds[1].model), "a program builds the same model twice"
            return _Run(program, ranks, *worlds).run()
    finally:
        torch.set_num_threads(before[0])
        torch.set_rng_state(before[1])


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
        for world in (ours, theirs):
            world.before_step(step)
        try:
            batches = ours.batch(step), theirs.batch(step)
        except Exception as error:
            return Outcome("generator", _said(error), step, traceback.format_exc())
        expected, eager_error = None, ""
        if not self.lossy:
            with theirs.random_numbers():
                try:
                    with theirs.around(step, eager=True):
                        expected = theirs.eager_gradients(batches[1])
                except Exception as error:
                    eager_error = _said(error)
        with ours.random_numbers():
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
            ours.after_step()
            return self._replicas_differ(step)
        theirs.eager_update()
        if theirs.micro == 0:
            ours.after_step()
            theirs.after_step()
        wrong = first_difference(ours, theirs, (result, expected), batches)
        # Where one rank changed what replicas share, eager ranks part; ours may not.
        wrongs = self.ranks.share(f"after step {step}", f"{int(theirs.parted)}{wrong}")
        wrong = "" if any(said[0] == "1" for said in wrongs) else wrong or "".join(said[1:] for said in wrongs)
        if wrong:
            return Outcome("wrong", wrong, step)
        if not theirs.parted:
            take_rounding_over(ours, theirs)
        return self._replicas_differ(step)

    def _change(self, slot: str, name: str, step: int) -> Outcome | None:
        errors: list[str] = []
        outcome = None
        for world in (self.ours, self.theirs):
            with world.random_numbers():
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
            with ours.around(step, eager=False):
                if ours.step is None:
                    ours.step = self._compile(batch)
                return ours.step(batch), None
        except VerificationFailed as error:
            # One rank alone has changed what replicas share: verification is what finds it.
            kind = "refused" if self.program.theme == "alone" and self.program.all("alone") else "unverified"
            return None, Outcome(kind, _said(error), step)
        except FxcompError as error:
            return None, _refused(error, step)
        except Exception as error:
            kind = "wrong" if isinstance(error, CompilingDrewError) else "foreign"
            return None, Outcome(kind, _said(error), step, traceback.format_exc())

    def _compile(self, batch: Any) -> Any:
        program, ours = self.program, self.ours
        plan = program.get("plan", "dense") if program.ranks > 1 else "balanced"
        state = torch.get_rng_state()
        step = fxcomp.compile_step(
            ours.model,
            ours.loss_fn,
            ours.optimizer,
            batch,
            max_grad_norm=ours.clip,
            skip_nonfinite=program.has("skip_nonfinite"),
            accumulate=ours.group,
            compress=plan,
            checks=fxcomp.Checks(verify=_verify(program)),
        )
        if not torch.equal(state, torch.get_rng_state()):
            raise CompilingDrewError("compiling left the default generator in another state")
        return step

    def _replicas_differ(self, step: int) -> Outcome | None:
        """Compare the ranks' replicas."""
        if self.program.ranks == 1 or self.ours.micro or self.ours.may_part(step, str(_verify(self.program))):
            return None
        tensors = [*self.ours.model.parameters(), *self.ours.model.buffers()]
        held = b"".join(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
        everyone = self.ranks.share(f"replicas {step}", hashlib.sha256(held).hexdigest())
        return Outcome("wrong", "ranks hold other parameters or buffers", step) if len(set(everyone)) > 1 else None


def _verify(program: Program) -> Any:
    """Choose the verified steps: mostly none, so that guards alone stand between us and a wrong step."""
    default = fxcomp.Checks().verify
    chosen = program.get("verify")
    if (program.has("plan") and not program.theme) or chosen == "1":
        return 1
    if chosen == "2":
        return 2
    if chosen == "sampled" and isinstance(default, str):
        return default
    return "never" if isinstance(default, str) else 0


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:2])[:300]}"


def _refused(error: FxcompError, step: int) -> Outcome:
    cause = error.__cause__ or error.__context__
    return Outcome("refused", _said(error), step, _said(cause) if cause is not None else "")
