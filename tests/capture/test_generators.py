"""Seeding in a step happens at every step, as in eager PyTorch, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp import errors

HELD = torch.Generator()
UNSEEDED = torch.Generator()

LossFn = Callable[[nn.Module, Any], Tensor]


def noisy(model: nn.Module, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    noise = torch.rand(4, generator=generator)
    if generator is not None:
        noise = noise.clone().uniform_(generator=generator) + torch.randperm(4, generator=generator)
    return F.dropout(model(x) * noise, 0.5).sum()


def after(act: Callable[[], Any]) -> LossFn:
    """A loss that draws after something was done to generators."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        act()
        return noisy(model, x)

    return loss


def in_a_fork(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        first = noisy(model, x)
    return first + noisy(model, x)


def by_saved_states(model: nn.Module, x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    first = noisy(model, x)
    torch.default_generator.set_state(state)
    return first + noisy(model, x)


def seeded_in_the_middle(model: nn.Module, x: Tensor) -> Tensor:
    first = noisy(model, x)
    before = torch.get_rng_state()
    torch.random.manual_seed(3)
    seeded = torch.get_rng_state()
    second = noisy(model, x)
    torch.set_rng_state(seeded)
    third = noisy(model, x)
    torch.set_rng_state(before)
    return first + second + third + noisy(model, x)


def seeded_for_a_block(model: nn.Module, x: Tensor) -> Tensor:
    def block(value: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(torch.tanh(value), 0.5)

    return checkpoint(block, model(x), use_reentrant=False, preserve_rng_state=False).square().sum()


def read_back(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(2**64 - 5)
    return noisy(model, x) * (torch.initial_seed() % 5)


FOLLOWED: list[LossFn] = [
    after(lambda: torch.manual_seed(7)),
    after(lambda: torch.random.manual_seed(-7)),
    after(lambda: torch.default_generator.manual_seed(7)),
    after(lambda: [torch.manual_seed(1), torch.manual_seed(2)]),
    lambda model, x: (noisy(model, x), torch.manual_seed(9))[0],
    in_a_fork,
    by_saved_states,
    seeded_in_the_middle,
    seeded_for_a_block,
    read_back,
    lambda model, x: noisy(model, x, HELD),
    lambda model, x: noisy(model, x, UNSEEDED),
]


def as_eager(loss: LossFn, batches: list[Any], verify: Any = "never") -> None:
    """Four steps have eager's losses and parameters, and end at eager's seeds and states of generators."""
    torch.manual_seed(0)
    HELD.manual_seed(11)
    model = nn.Linear(6, 4)
    reference = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    step = fxcomp.compile_step(model, loss, ours, batches[0], checks=fxcomp.Checks(verify=verify))
    generators = torch.default_generator, HELD, UNSEEDED
    states = [g.get_state() for g in generators]
    losses = [step(batch).item() for batch in batches]
    ends = [g.get_state() for g in generators], torch.initial_seed()
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    for batch, expected in zip(batches, losses, strict=True):
        theirs.zero_grad()
        value = loss(reference, batch)
        value.backward()
        theirs.step()
        assert value.item() == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert all(map(torch.equal, ends[0], [g.get_state() for g in generators]))
    assert ends[1] == torch.initial_seed()


@pytest.mark.parametrize("loss", FOLLOWED)
def test_a_default_generator_is_seeded_at_every_step_as_in_eager(loss: LossFn):
    torch.manual_seed(0)
    as_eager(loss, [torch.randn(3, 6) for _ in range(4)])


def test_a_verified_step_seeds_as_any_other():
    as_eager(in_a_fork, [torch.ones(3, 6)] * 3, verify=1)


def test_a_seed_in_the_batch_is_followed_when_it_comes_again():
    def loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
        torch.manual_seed(batch[1])
        return noisy(model, batch[0])

    as_eager(loss, [(torch.ones(3, 6), seed) for seed in (1, 2, 1, 1)])


REFUSED: dict[str, LossFn] = {
    r"calls .seed\(\) of the default generator of cpu, at .*test_generators.py:\d+": after(torch.seed),
    r"calls .initial_seed\(\) of the default": lambda m, x: noisy(m, x) * (torch.initial_seed() % 3),
    r"calls .graphsafe_get_state\(\) of": after(lambda: torch.default_generator.graphsafe_get_state()),
    r"calls .__reduce__\(\) of": after(lambda: copy.deepcopy(torch.default_generator)),
    r"draws from a torch.Generator that was not there": lambda m, x: noisy(m, x, torch.Generator()),
    r"draws from a torch.Generator that was not": lambda m, x: noisy(m, x, torch.Generator().manual_seed(7)),
    r"draws from a torch.Generator that": lambda m, x: noisy(m, x, HELD.clone_state()),
    r"the step draws from a torch.Generator": lambda m, x: noisy(m, x, torch.default_generator),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_use_of_generators_that_only_tracing_would_see_is_refused(text: str):
    states = [g.get_state() for g in (torch.default_generator, HELD)]
    with pytest.raises(errors.CaptureFailed, match=f"(?s){text}.*Seed the default generator"):
        compile_with(REFUSED[text])
    assert all(map(torch.equal, states, [g.get_state() for g in (torch.default_generator, HELD)]))


def compile_with(loss: LossFn) -> None:
    with torch.random.fork_rng():
        model = nn.Linear(6, 4)
    fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))


DEFAULT = torch.default_generator

MOVED: dict[str, Callable[[], Any]] = {
    "HELD, seeded": lambda: HELD.manual_seed(7),
    "HELD, seeded at random": lambda: HELD.seed(),
    "HELD, set": lambda: HELD.set_state(torch.Generator().get_state()),
    "DEFAULT, in hand": lambda: DEFAULT.manual_seed(7),
    "default_generator, a method in hand": lambda seed=DEFAULT.manual_seed: seed(7),
}


@pytest.mark.parametrize("how", MOVED)
def test_a_generator_that_tracing_moves_is_refused_and_put_back(how: str):
    torch.manual_seed(1)
    HELD.manual_seed(11)
    states = [g.get_state() for g in (torch.default_generator, HELD)]
    with pytest.raises(errors.CaptureFailed, match=r"seeds or draws from .*(HELD|DEFAULT|default_generator)"):
        compile_with(after(MOVED[how]))
    assert all(map(torch.equal, states, [g.get_state() for g in (torch.default_generator, HELD)]))


class Seeding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.manual_seed(3)
        return super().step(closure)


def test_an_optimizer_that_seeds_is_refused():
    model = nn.Linear(6, 4)
    with pytest.raises(errors.FxcompError, match=r"manual_seed\(\).* optimizer"):
        fxcomp.compile_step(model, noisy, Seeding(model.parameters(), lr=0.1), torch.ones(3, 6))
