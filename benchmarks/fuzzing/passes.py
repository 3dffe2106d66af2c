"""Forward and backward passes as a grammar, spoken to DistributedDataParallel and to fxcomp's frontends side by side.

    F3     a forward pass of 3 rows; losses are numbered in the order of their forward passes
    f3     one under no_sync
    g3     one under torch.no_grad
    B0+1    one backward pass of the sum of losses 0 and 1; their graphs are kept where a later word needs them
    S      a step of the optimizer
    z  Z   zero_grad(set_to_none=True), and False

`F3 f5 B0+1 S z` is a sentence. After each backward pass and each step a rank's gradients must be those of
DistributedDataParallel. That reduces once after forward passes outside of no_sync, however many backward passes they
have, so it leaves gradients apart on the ranks after `F3 F3 B0 B1`. Only where its own are apart may ours be something
else: then every backward pass through a forward pass outside of no_sync averages all that there is.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import FxcompError

Quiet = Callable[[], contextlib.AbstractContextManager[None]]

ROWS = (1, 2, 3, 5)
"""So many rows are in a batch: one, two, and sizes that the symbolic graph serves."""

TOLERANCE = 2e-6
"""Of gradients of about one: sums over passes and over ranks come in another order."""

FINDINGS = ("wrong", "foreign")
"""Forbidden ends of a sentence."""


@dataclass(frozen=True, slots=True)
class Word:
    """One thing that a training loop does."""

    kind: str
    rows: int = 0
    losses: tuple[int, ...] = ()
    keeps: bool = False
    """The graph is kept: a later backward pass runs through it again."""

    def __str__(self) -> str:
        return self.kind + (str(self.rows) if self.rows else "") + "+".join(map(str, self.losses))


def parse(text: str) -> tuple[Word, ...]:
    """Read a sentence."""
    words: list[Word] = []
    for part in text.split():
        assert re.fullmatch(r"[Ffg][1-9]|B\d+(\+\d+)*|[SzZ]", part), f"{part!r} is no word"
        if part[0] == "B":
            words.append(Word("B", losses=tuple(map(int, part[1:].split("+")))))
        else:
            words.append(Word(part[0], rows=int(part[1:] or 0)))
    return _keeping(words)


def _keeping(words: Sequence[Word]) -> tuple[Word, ...]:
    """Keep the graphs that a later word runs through."""
    later: set[int] = set()
    kept: list[Word] = []
    for word in reversed(words):
        kept.append(Word(word.kind, word.rows, word.losses, keeps=bool(later & set(word.losses))))
        later.update(word.losses)
    return tuple(reversed(kept))


def draw(seed: int) -> tuple[Word, ...]:
    """Draw a sentence of one to three steps; some losses are never used, some twice."""
    rng = random.Random(f"passes {seed}")
    words: list[Word] = []
    pending: list[int] = []
    count = 0
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
                kind = rng.choice("FFFfffg")
                words.append(Word(kind, rows=rng.choice(ROWS)))
                if kind != "g":
                    pending.append(count)
                    count += 1
            if pending and rng.random() < 0.85:
                losses = tuple(sorted(rng.sample(pending, rng.randint(1, len(pending)))))
                words.append(Word("B", losses=losses))
                if rng.random() < 0.85:
                    pending = [loss for loss in pending if loss not in losses]
            if rng.random() < 0.1:
                words.append(Word(rng.choice("zZ")))
        words.append(Word("S"))
        pending = []  # an optimizer has written what their backward passes would read
        if rng.random() < 0.85:
            words.append(Word(rng.choice("zZ")))
    return _keeping(words)


# One speaker


@dataclass(slots=True)
class Speaker:
    """A model, how it is called, and how it is kept from reducing."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    quiet: Quiet

    def say(
        self, words: Sequence[Word], rank: int, after_backward: Callable[[int], None] = lambda _: None
    ) -> Iterator[Tensor]:
        """Do what a sentence says; give this rank's gradients after each backward pass and before each step."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        losses: list[Tensor] = []
        for number, word in enumerate(words):
            if word.kind == "B":
                total = torch.stack([losses[place] for place in word.losses]).sum()
                total.backward(retain_graph=word.keeps)
                after_backward(number)
                yield gradients(self.model)
            elif word.kind == "S":
                yield gradients(self.model)
                optimizer.step()
            elif word.kind in "zZ":
                optimizer.zero_grad(set_to_none=word.kind == "z")
            elif word.kind == "g":
                with torch.no_grad():
                    self.call(rows(word.rows, number, rank))
            else:
                with self.quiet() if word.kind == "f" else contextlib.nullcontext():
                    losses.append(self.call(rows(word.rows, number, rank)).square().mean())


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def rows(count: int, number: int, rank: int) -> Tensor:
    """Make the batch of a word on a rank."""
    return 2.0 * torch.randn(count, 6, generator=torch.Generator().manual_seed(1000 * number + rank))


def gradients(model: nn.Module) -> Tensor:
    """Put all gradients into one tensor; none is zero."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.detach().flatten() for gradient in found])


def fresh(model: nn.Module) -> None:
    """Give a model its first values again."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.grad = None


# Who speaks


def frontends(plan: str = "dense") -> dict[str, Speaker]:
    """Make DistributedDataParallel, and fxcomp's frontends that keep its loop."""
    models = {name: Net() for name in ("ddp", "backend", "hook")}
    wrapped = {name: DistributedDataParallel(models[name]) for name in ("ddp", "hook")}
    wrapped["hook"].register_comm_hook(None, fxcomp.ddp_hook(compress=plan))  # pyright: ignore[reportUnknownMemberType]
    mine = models["backend"]
    compiled: Any = fxcomp.compile_model(mine, plan)
    return {
        "backend": Speaker(mine, compiled, lambda: fxcomp.no_sync(mine)),
        **{name: Speaker(models[name], call, call.no_sync) for name, call in wrapped.items()},
    }


# Judging


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a sentence.

    equal      gradients were DistributedDataParallel's
    whole      its own are apart on the ranks somewhere, where ours followed the rule, which averages more
    refused    one of our errors
    wrong      neither, silently
    foreign    another error
    """

    kind: str
    text: str = ""


WARM = parse("F2 B0 z F3 B1 z")
"""Said before each sentence: the reduction that an earlier one has left open is closed, and graphs are there."""


def judge(words: Sequence[Word], theirs: Speaker, ours: Speaker) -> Verdict:
    """Say a sentence to both on every rank, and compare; every rank returns the same."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for speaker in (theirs, ours):
        fresh(speaker.model)
        list(speaker.say(WARM, rank))
        fresh(speaker.model)
    alone = Speaker(Net(), lambda x: alone.model(x), contextlib.nullcontext)
    fresh(alone.model)
    expected = list(theirs.say(words, rank))
    by_rule = list(_by_rule(alone, words, rank, ranks))
    try:
        found = list(ours.say(words, rank))
    except FxcompError as error:
        return _agreed(Verdict("refused", f"{type(error).__name__}: {error}"))
    except Exception as error:
        return _agreed(Verdict("foreign", f"{type(error).__name__}: {error}"))
    kind = "equal"
    places = [place for place, word in enumerate(words) if word.kind in "BS"]
    for place, mine, theirs_now, ruled in zip(places, found, expected, by_rule, strict=True):
        their_own_agree = _same_everywhere(theirs_now, ranks)
        if not _is_near_everywhere(mine, theirs_now):
            if their_own_agree or not _is_near_everywhere(mine, ruled):
                said = " ".join(map(str, words[: place + 1]))
                return _agreed(Verdict("wrong", f"after {said}: neither DistributedDataParallel's nor by the rule"))
            kind = "whole"
        if words[place].kind == "S" and not their_own_agree:
            break  # replicas part, and what follows is compared with nothing
    return _agreed(Verdict(kind))


def _by_rule(alone: Speaker, words: Sequence[Word], rank: int, ranks: int) -> Iterator[Tensor]:
    """Train without any frontend, and average `.grad` after the backward passes of which the rule says so."""
    averages = _averaging(words)

    def average(number: int) -> None:
        if number not in averages:
            return
        for parameter in alone.model.parameters():
            assert parameter.grad is not None, "a backward pass reaches every parameter"
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks

    return alone.say(words, rank, average)


def _averaging(words: Sequence[Word]) -> set[int]:
    """Find the words that average: through a forward pass outside, or the first ones after one."""
    outside: list[bool] = []
    is_open = False
    found: set[int] = set()
    for number, word in enumerate(words):
        if word.kind in "Ff":
            outside.append(word.kind == "F")
            is_open = is_open or word.kind == "F"
        elif word.kind == "B" and (is_open or any(outside[loss] for loss in word.losses)):
            found.add(number)
            is_open = False
    return found


def _same_everywhere(value: Tensor, ranks: int) -> bool:
    everyone = [torch.empty_like(value) for _ in range(ranks)]
    dist.all_gather(everyone, value)
    return all(torch.equal(each, everyone[0]) for each in everyone)


def _is_near_everywhere(value: Tensor, expected: Tensor) -> bool:
    apart = (value - expected).abs().max() - TOLERANCE * max(1.0, float(expected.abs().max()))
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return bool(apart <= 0)


def _agreed(verdict: Verdict) -> Verdict:
    """The worst of the ranks' verdicts."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, verdict)
    order = (*FINDINGS, "refused", "whole", "equal")
    return min(everyone, key=lambda each: order.index(each.kind))
