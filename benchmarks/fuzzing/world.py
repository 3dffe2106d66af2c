"""A program's objects, twice: one world is compiled, the other one trains with eager PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzzing.losses import make_loss
from fuzzing.models import Net, draw_input, sizes, structured, with_layout
from fuzzing.program import Program
from fuzzing.training import SCHEDULES, apply_gradients, make_optimizer


class World:
    """Model, loss, optimizer and schedule, with random numbers of their own."""

    def __init__(self, program: Program, rank: int):
        self.program, self.rank, self.ranks = program, rank, program.ranks
        torch.manual_seed(program.seed)
        self.model: Any
        self.model, self.loss_fn, self.set_weight = self.build()
        self.optimizer = make_optimizer(program, self.model)
        schedule = program.get("schedule")
        self.schedule: Any = SCHEDULES[schedule](self.optimizer) if schedule else None
        self.clip = float(program.get("clip", "0")) or None
        self.step: Any = None
        self.reseed: int | None = None
        self.example = self.batch(0)
        self.saved = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        torch.manual_seed(program.seed + 1 + rank)
        self.generator_state = torch.get_rng_state()
        self.micro = 0
        """Micro-batches since the last step."""
        self.parted = False
        """True once eager replicas may differ, because one changed something alone."""

    # What small programs have of their own

    def build(self) -> tuple[nn.Module, Any, Any]:
        """The model, the loss function, and what sets a number in it."""
        return Net(self.program), *make_loss(self.program)

    def before_step(self, step: int) -> None:
        """Change something, on this rank perhaps alone."""

    def around(self, step: int, *, eager: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Enter a step's surroundings; around eager's only those that change its numbers, or that it refuses."""
        is_told = self.program.get("around") in ("no_grad", "inference_mode")
        return around(self.program if is_told or not eager else None)

    def may_part(self, step: int, verified: str) -> bool:  # noqa: ARG002
        """Return whether replicas may differ after a step without an error."""
        return False

    def forward_around(self) -> AbstractContextManager[Any]:
        """Enter the surroundings of eager's forward pass alone, as a user does it with autocast."""
        return around(self.program if self.program.get("around") == "autocast" else None)

    def more(self) -> Any:
        """Return the values to compare beside model, optimizer and result."""
        return None

    @contextmanager
    def random_numbers(self) -> Generator[None]:
        """Draw from this world's generator, and leave it where it comes to be."""
        torch.set_rng_state(self.generator_state)
        if self.reseed is not None:
            torch.manual_seed(self.reseed)
            self.reseed = None
        try:
            yield
        finally:
            self.generator_state = torch.get_rng_state()

    def batch(self, step: int) -> Any:
        """A batch of this step and rank, the same in both worlds."""
        program, generator = self.program, torch.Generator()
        generator.manual_seed(1000 * program.seed + 10 * step + self.rank)
        # With compressed plans or not, every rank has lengths of its own.
        batch, length = sizes(program.get("lengths"), step, random.Random(f"{program.seed} lengths {self.rank}"))
        kind = program.get("input", "rows")
        x = with_layout(draw_input(kind, generator, batch, length), program.get("layout"))
        if program.has("skip_nonfinite") and step == 2 and self.rank == 0 and x.is_floating_point():
            x = x * float("inf")
        y = torch.randint(0, 5, (batch, length) if kind in ("tokens", "series") else (batch,), generator=generator)
        number = 0.5 if program.get("weight") == "batch" and step > 1 else 1.0
        return structured(program.get("structure", "tuple"), x, y, number)

    def after_step(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    # Eager

    def eager_gradients(self, batch: Any) -> Any:
        """Return loss_fn's result; gradients are in `.grad`."""
        if self.micro == 0:
            self.optimizer.zero_grad()
        with self.forward_around():
            result = self.loss_fn(self.model, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        return result

    @property
    def group(self) -> int:
        """So many micro-batches make a step."""
        return int(self.program.get("accumulate", "1"))

    def eager_update(self) -> None:
        """Average gradients as DistributedDataParallel does, and step; a gradient that is not finite may prevent it."""
        self.micro = (self.micro + 1) % self.group
        if self.micro:
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.group > 1:
                parameter.grad /= self.group
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.ranks > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in trained])
            dist.all_reduce(flat)
            flat /= self.ranks
            for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
                p.grad = part.view_as(p)
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        if self.program.has("skip_nonfinite") and not all(bool(p.grad.isfinite().all()) for p in trained):
            return
        apply_gradients(trained, self.optimizer, self.clip)


@contextmanager
def around(program: Program | None) -> Generator[None]:
    """Enter the surroundings of the calls in the user's program."""
    match program.get("around") if program is not None else "":
        case "no_grad":
            with torch.no_grad():
                yield
        case "inference_mode":
            with torch.inference_mode():
                yield
        case "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                yield
        case _:
            yield


def equal_models(ours: nn.Module, theirs: nn.Module) -> bool:
    """Return whether two models start alike."""
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
