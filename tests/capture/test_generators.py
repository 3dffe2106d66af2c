"""Seeding in a step happens at every step, as in eager PyTorch, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._utils import freeze_rng_state
from torch.utils._mode_utils import no_dispatch
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


def frozen(model: nn.Module, x: Tensor) -> Tensor:
    with freeze_rng_state():
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
    in_a_fork,
    frozen,
    by_saved_states,
    seeded_in_the_middle,
    seeded_for_a_block,
    read_back,
    lambda model, x: noisy(model, x, HELD),
    lambda model, x: noisy(model, x, UNSEEDED),
    lambda model, x: noisy(model, x, torch.default_generator),
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


def test_a_seed_that_nothing_draws_from_still_ends_the_step():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = noisy(model, x)
        torch.manual_seed(9)
        return value

    as_eager(loss, [torch.ones(3, 6)] * 3)


REFUSED: dict[str, LossFn] = {
    r"manual_seed\(\) of a torch.Generator that is not": lambda m, x: noisy(m, x, torch.Generator().manual_seed(7)),
    r"calls .manual_seed\(\) of": lambda m, x: noisy(m, x, HELD.manual_seed(7)),
    r"draws from a torch.Generator that it makes": lambda m, x: noisy(m, x, torch.Generator()),
    r"calls .seed\(\) of a": lambda m, x: noisy(m, x, HELD) * (HELD.seed() % 3),
    r"calls .seed\(\) of the default generator of cpu": after(torch.seed),
    r"calls .initial_seed\(\) of the default": lambda m, x: noisy(m, x) * (torch.initial_seed() % 3),
    r"calls .initial_seed\(\) of a": lambda m, x: noisy(m, x) * (HELD.initial_seed() % 3),
    r"calls .get_state\(\) of a": after(lambda: HELD.get_state()),
    r"calls .set_state\(\) of a": after(lambda: HELD.set_state(STATE)),
    r"calls .clone_state\(\) of a": lambda m, x: noisy(m, x, HELD.clone_state()),
    r"calls .graphsafe_get_state\(\) of": after(lambda: torch.default_generator.graphsafe_get_state()),
    r"calls .graphsafe_set_state\(\) of": after(lambda: HELD.graphsafe_set_state(UNSEEDED)),
    r"calls .get_offset\(\) of": after(lambda: HELD.get_offset()),
    r"calls .set_offset\(\) of": after(lambda: HELD.set_offset(4)),
    r"calls .__reduce__\(\) of a": lambda m, x: noisy(m, x, copy.deepcopy(HELD)),
    r"calls .__reduce__\(\) of": after(lambda: pickle.dumps(HELD)),
    r"calls .__setstate__\(\) of": after(lambda: HELD.__setstate__((1, None, STATE))),
}

STATE = torch.Generator().get_state()


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_happen_only_while_tracing_is_refused_at_its_line(text: str):
    model = nn.Linear(6, 4)
    states = [g.get_state() for g in (torch.default_generator, HELD)]
    line = "" if "makes" in text else r".*, at .*test_generators.py:\d+"
    with pytest.raises(errors.SeedsGenerator, match=f"(?s){text}{line}.*Seed the default generator"):
        fxcomp.compile_step(model, REFUSED[text], torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))
    assert all(map(torch.equal, states, [g.get_state() for g in (torch.default_generator, HELD)]))
    assert isinstance(HELD.manual_seed(1), torch.Generator), "methods are what they were"


BOUND = HELD.manual_seed, torch.default_generator.manual_seed


@pytest.mark.parametrize("bound", BOUND)
def test_a_method_that_was_bound_before_tracing_is_noticed_by_what_it_changes(bound: Any):
    model = nn.Linear(6, 4)
    torch.manual_seed(1)
    HELD.manual_seed(11)
    loss = after(lambda: [bound(7), HELD])  # the walk meets what code names
    with pytest.raises(errors.DrawsInPython, match=r"seeds or draws from .*(HELD|loss_fn|default_generator)"):
        fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))


def hidden(model: nn.Module, x: Tensor) -> Tensor:
    with no_dispatch(), torch.random.fork_rng():
        drawn = torch.randn(4)
    return (model(x) + drawn).sum()


def test_a_draw_that_no_mode_sees_is_refused():
    model = nn.Linear(6, 4)
    with pytest.raises(errors.DrawsInPython, match=r"draws from torch\.default_generator"):
        fxcomp.compile_step(model, hidden, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))


class Seeding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.manual_seed(3)
        return super().step(closure)


def test_an_optimizer_that_seeds_is_refused():
    model = nn.Linear(6, 4)
    with pytest.raises(errors.FxcompError, match=r"manual_seed\(\).* optimizer"):
        fxcomp.compile_step(model, noisy, Seeding(model.parameters(), lr=0.1), torch.ones(3, 6))
