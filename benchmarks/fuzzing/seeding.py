"""Writers of random number generators beside their readers, inside the forward pass and the loss."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


class Generators:
    """Sources to draw from: generators and numbers that live longer than a step."""

    def __init__(self, seed: int):
        self.own, self.other = torch.Generator(), torch.Generator()
        self.own.manual_seed(seed)
        self.other.manual_seed(seed + 1)
        self.number, self.calls = 5, [0]
        self.state: Tensor = torch.Generator().manual_seed(11).get_state()
        self.seed: Any = 0
        """Of the batch: a Python number, or a tensor."""

    def given(self, seed: Any) -> Generators:
        """The same generators, beside a batch's seed."""
        other = copy.copy(self)
        other.seed = seed
        return other


Draws = Callable[[Tensor, Generators], Tensor]


# Readers: the same shape comes back, with something drawn in it


def _in_place(x: Tensor, _: Generators) -> Tensor:
    return x * torch.empty_like(x).uniform_(0.5, 1.5)


READERS: dict[str, Draws] = {
    "dropout": lambda x, _: functional.dropout(x, 0.3),
    "rand": lambda x, _: x * torch.rand(x.shape),
    "randn_like": lambda x, _: x + 0.1 * torch.randn_like(x),
    "bernoulli": lambda x, _: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "randperm": lambda x, _: x[:, torch.randperm(WIDTH)],
    "randint": lambda x, _: x * torch.randint(1, 4, x.shape),
    "multinomial": lambda x, _: x * (1 + torch.multinomial(torch.ones(WIDTH), 2).sum()),
    "normal": lambda x, _: x + 0.1 * torch.normal(0.0, 1.0, x.shape),
    "uniform_": _in_place,
    "exponential_": lambda x, _: x + 0.1 * torch.empty_like(x).exponential_(),
    "gumbel": lambda x, _: x * functional.gumbel_softmax(x, tau=1.0),
    "rsample": lambda x, _: x + 0.1 * torch.distributions.Normal(0.0, 1.0).rsample(x.shape),
    "rrelu": lambda x, _: functional.rrelu(x, training=True),
    "own": lambda x, g: x * torch.rand(x.shape, generator=g.own),
    "own_in_place": lambda x, g: x * torch.empty_like(x).normal_(generator=g.own),
    "other": lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g.other),
    "default": lambda x, _: x * torch.rand(x.shape, generator=torch.default_generator),
    "own_perm": lambda x, g: x[:, torch.randperm(WIDTH, generator=g.own)],
}


# Writers


def _seeded(seed: Callable[[Generators], Any]) -> Draws:
    def write(x: Tensor, g: Generators) -> Tensor:
        torch.manual_seed(seed(g))
        return x

    return write


def _counted(x: Tensor, g: Generators) -> Tensor:
    g.calls[0] += 1
    torch.manual_seed(g.calls[0])
    return x


def _fresh(x: Tensor, _: Generators) -> Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3))


def _fresh_by_batch(x: Tensor, g: Generators) -> Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(int(g.seed)))


def _forked(seed: int | None) -> Draws:
    def write(x: Tensor, _: Generators) -> Tensor:
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            return x * torch.rand(x.shape)

    return write


def _saved(x: Tensor, _: Generators) -> Tensor:
    state = torch.get_rng_state()
    y = x * torch.rand(x.shape)
    torch.set_rng_state(state)
    return y


def _saved_and_seeded(x: Tensor, _: Generators) -> Tensor:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    y = x * torch.rand(x.shape)
    torch.set_rng_state(state)
    return y


def _set_constant(x: Tensor, g: Generators) -> Tensor:
    torch.set_rng_state(g.state)
    return x


def _own_seeded(x: Tensor, g: Generators) -> Tensor:
    g.own.manual_seed(9)
    return x


def _own_saved(x: Tensor, g: Generators) -> Tensor:
    state = g.own.get_state()
    y = x * torch.rand(x.shape, generator=g.own)
    g.own.set_state(state)
    return y


def _own_to_other(x: Tensor, g: Generators) -> Tensor:
    g.other.set_state(g.own.get_state())
    return x


def _cloned(x: Tensor, g: Generators) -> Tensor:
    return x * torch.rand(x.shape, generator=g.own.clone_state())


def _default_seeded(x: Tensor, _: Generators) -> Tensor:
    torch.default_generator.manual_seed(4)
    return x


def _default_to_own(x: Tensor, g: Generators) -> Tensor:
    g.own.set_state(torch.get_rng_state())
    return x


def _read_seed(x: Tensor, _: Generators) -> Tensor:
    return x * (1 + 0.1 * (torch.initial_seed() % 7))


def _read_own_seed(x: Tensor, g: Generators) -> Tensor:
    return x * (1 + 0.1 * (g.own.initial_seed() % 7))


def _forked_generator(x: Tensor, _: Generators) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(21)
        return functional.dropout(x, 0.4)


def _from_tensor(x: Tensor, g: Generators) -> Tensor:
    """A seed that was drawn."""
    torch.manual_seed(int(torch.randint(0, 100, (), generator=g.own)))
    return x


def _checkpointed(x: Tensor, _: Generators) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda t: functional.dropout(t * 1.1, 0.3), x, use_reentrant=False)


WRITERS: dict[str, Draws] = {
    "manual_seed": _seeded(lambda _: 3),
    "seed_by_number": _seeded(lambda g: g.number),
    "seed_by_batch": _seeded(lambda g: int(g.seed)),
    "random_manual_seed": lambda x, _: (torch.random.manual_seed(8), x)[1],
    "counted": _counted,
    "fresh": _fresh,
    "fresh_by_batch": _fresh_by_batch,
    "forked": _forked(None),
    "forked_and_seeded": _forked(6),
    "forked_generator": _forked_generator,
    "saved": _saved,
    "saved_and_seeded": _saved_and_seeded,
    "set_constant": _set_constant,
    "own_seeded": _own_seeded,
    "own_saved": _own_saved,
    "own_to_other": _own_to_other,
    "default_to_own": _default_to_own,
    "cloned": _cloned,
    "default_seeded": _default_seeded,
    "read_seed": _read_seed,
    "read_own_seed": _read_own_seed,
    "from_tensor": _from_tensor,
    "checkpointed": _checkpointed,
}


class Drawing(nn.Module):
    """Two layers, with draws between them."""

    def __init__(self, draws: list[Draws], generators: Generators):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.draws, self.generators = draws, generators

    def forward(self, x: Tensor, seed: Any) -> Tensor:
        x, generators = self.first(x), self.generators.given(seed)
        for draw in self.draws:
            x = draw(x, generators)
        return self.second(torch.tanh(x))


class Seeding(World):
    """Draws in the model and in the loss."""

    def build(self) -> tuple[Any, Any, Any]:
        program = self.program
        self.generators = Generators(program.seed % 1000)
        known = {**READERS, **WRITERS}
        model = Drawing([known[f.name] for f in program.all("draw")], self.generators)
        in_loss = [known[f.name] for f in program.all("late")]
        generators = self.generators

        def compute(model: nn.Module, batch: Any) -> Tensor:
            x, y, seed = batch
            for draw in in_loss:
                x = draw(x, generators.given(seed))
            return (model(x, seed).squeeze(1) - y).square().sum()

        def seeded_by_batch(model: nn.Module, batch: Any) -> Tensor:
            torch.manual_seed(int(batch[2]))
            return compute(model, batch)

        return model, seeded_by_batch if program.has("seeded") else compute, lambda _: None

    def batch(self, step: int) -> Any:
        program, g = self.program, torch.Generator()
        g.manual_seed(1000 * program.seed + 10 * step + self.rank)
        rows = (3, 2)[step % 2] if program.has("lengths") else 3
        number = {"fixed": 1, "changing": step, "alternating": step % 2}[program.get("seed_of_batch", "fixed")]
        seed: Any = torch.tensor(number) if program.has("tensor_seed") else number
        return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, generator=g), seed

    def more(self) -> Any:
        """Beside what every program compares: this program's own generators."""
        return [self.generators.own.get_state(), self.generators.other.get_state()]


def draw_seeding(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    for number in range(r.choice((1, 2, 2, 3))):
        add(f"draw.{number}", tuple(READERS if r.random() < 0.5 else WRITERS))
    for number in range(r.choice((0, 0, 1, 2))):
        add(f"late.{number}", tuple(READERS if r.random() < 0.5 else WRITERS))
    add("seeded", ("yes",), 0.1)
    add("seed_of_batch", ("fixed", "changing", "alternating"))
    add("tensor_seed", ("yes",), 0.15)
    add("lengths", ("two",), 0.2)
    add("accumulate", ("2",), 0.08)
    return r.choice((3, 4, 5))
