"""Python that decides by values of the batch and of buffers, and some by what is trained or drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.program import Add
from fuzzing.world import World

WIDTH, WORDS = 4, 9


class Given:
    """Everything that a decision may look at."""

    def __init__(self, model: Any, batch: Any, rows: Tensor):
        self.model, self.rows = model, rows
        self.ids, self.mask, self.lengths, self.x = batch["ids"], batch["mask"], batch["lengths"], batch["x"]


Decision = Callable[[Given, Tensor], Tensor]


def _assert(holds: Any, value: Tensor) -> Tensor:
    if not holds:
        raise ValueError("the batch is not as it should be")
    return value


def _by_list(given: Given, value: Tensor) -> Tensor:
    return value + sum((given.rows[i, :length].sum() for i, length in enumerate(given.lengths.tolist())), value * 0)


def _packed(given: Given, value: Tensor) -> Tensor:
    lengths = given.lengths.clamp(min=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(given.rows, lengths, batch_first=True, enforce_sorted=False)
    return value + packed.data.sum() * 0.1


def _warm_up(given: Given, value: Tensor) -> Tensor:
    given.model.counter += 1
    return value * 0.5 if given.model.counter < 3 else value


def _chained(given: Given, value: Tensor) -> Tensor:
    """One decision leads to another one."""
    if bool(given.mask.any()):
        return value * 2 if int(given.ids.max()) > 5 else value * 3
    return value * 0.5


def _moving(given: Given, value: Tensor) -> Tensor:
    """A buffer that follows the batch decides."""
    with torch.no_grad():
        given.model.scale.mul_(0.5).add_(given.x.mean((0, 1)) * 0.5)
    return value * 2 if bool(given.model.scale.mean() > 0) else value


def _split(given: Given, value: Tensor) -> Tensor:
    first = int(given.lengths[0])
    left, right = given.rows.split([first, given.rows.shape[1] - first], 1)
    return value + left.sum() * 0.5 - right.sum() * 0.3


HARMLESS: dict[str, Decision] = {
    "below_vocabulary": lambda g, v: _assert(g.ids.max() < WORDS, v),
    "sometimes_false": lambda g, v: _assert(int(g.ids.sum()) % 5 != 0, v),
    "any_masked": lambda g, v: v * 2 if g.mask.any() else v,
    "largest": lambda g, v: v * (1 + 0.1 * g.ids.max().item()),
    "equal": lambda g, v: v * 2 if torch.equal(g.lengths, g.lengths.sort().values) else v,
    "trimmed": lambda g, v: v + g.rows[:, : int(g.lengths.max())].sum() * 0.1,
    "by_list": _by_list,
    "masked_rows": lambda g, v: v + g.rows[g.mask].sum(),
    "nonzero": lambda g, v: v * (1 + 0.1 * g.mask.nonzero().shape[0]),
    "packed": _packed,
    "warm_up": _warm_up,
    "chained": _chained,
    "buffer_sum": lambda g, v: v * (1 + float(g.model.scale.sum())),
    "moving": _moving,
    "one_hot": lambda g, v: v + functional.one_hot(g.ids).shape[-1] * 0.1 * v,
    "repeat": lambda g, v: v + g.rows[:, 0].repeat_interleave(g.lengths, 0).sum() * 0.1,
    "split": _split,
}
"""By the batch and by buffers."""

TRAINED: dict[str, Decision] = {
    "by_parameter": lambda g, v: v * 2 if float(g.model.table.weight[0, 0]) > 0 else v,
    "by_loss": lambda _, v: v * 0.5 if float(v) > 1 else v,
    "by_draw": lambda _, v: v * 2 if float(torch.rand(())) > 0.5 else v,
}
"""By what is trained or drawn: refused."""

DECISIONS = {**HARMLESS, **TRAINED}


class Deciding(nn.Module):
    """An embedding, a layer and buffers, with decisions in the forward pass."""

    def __init__(self, decisions: list[Decision]):
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((WIDTH,), 0.1))
        self.decisions = decisions

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows = torch.tanh(self.layer(self.table(batch["ids"]) + batch["x"]))
        value = rows.square().sum()
        for decide in self.decisions:
            value = decide(Given(self, batch, rows), value)
        return value, rows


class Decisions(World):
    """Batches whose values decide, often alike and sometimes otherwise."""

    def build(self) -> tuple[Any, Any, Any]:
        later = [DECISIONS[f.name] for f in self.program.all("late")]

        def compute(model: nn.Module, batch: Any) -> Any:
            value, rows = model(batch)
            for decide in later:
                value = decide(Given(model, batch, rows), value)
            return value

        return Deciding([DECISIONS[f.name] for f in self.program.all("decision")]), compute, lambda _: None

    def batch(self, step: int) -> Any:
        program, g = self.program, torch.Generator()
        values = {"same": 0, "changing": step, "alternating": step % 2, "late": int(step > 2)}
        own = self.rank if program.has("own_values") else 0
        g.manual_seed(1000 * program.seed + 10 * values[program.get("values", "changing")] + own)
        rows, length = (3, 5) if not program.has("lengths") else ((3, 5), (2, 4), (4, 6))[step % 3]
        lengths = torch.randint(1, length + 1, (rows,), generator=g)
        mask = torch.rand(rows, length, generator=g) < g.initial_seed() // 10 % 3 / 2
        x = torch.randn(rows, length, WIDTH, generator=g)
        return {"ids": torch.randint(0, WORDS, (rows, length), generator=g), "mask": mask, "lengths": lengths, "x": x}


def draw_decisions(r: random.Random, add: Add, ranks: int) -> int:
    for number in range(r.choice((1, 1, 2))):
        add(f"decision.{number}", tuple(HARMLESS if r.random() < 0.93 else TRAINED))
    add("late.0", tuple(HARMLESS), 0.3)
    add("values", ("same", "changing", "alternating", "late"))
    add("lengths", ("three",), 0.3)
    add("own_values", ("yes",), 0.5 if ranks > 1 else 0.0)
    add("optimizer", ("sgd", "adamw"))
    add("skip_nonfinite", ("yes",), 0.1)
    add("accumulate", ("2",), 0.1)
    return r.choice((4, 5, 6))
