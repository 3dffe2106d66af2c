"""Python that decides by values: of the batch and of buffers, which may train, and of parameters and draws."""

from __future__ import annotations

import math
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


def _assert(holds: Any, value: Tensor, text: str = "the batch is not as it should be") -> Tensor:
    if not holds:
        raise ValueError(text)
    return value


def _trimmed(given: Given, value: Tensor) -> Tensor:
    longest = int(given.lengths.max())
    return value + given.rows[:, :longest].sum() * 0.1


def _by_list(given: Given, value: Tensor) -> Tensor:
    return value + sum((given.rows[i, :length].sum() for i, length in enumerate(given.lengths.tolist())), value * 0)


def _masked_rows(given: Given, value: Tensor) -> Tensor:
    return value + given.rows[given.mask].sum()


def _nonzero(given: Given, value: Tensor) -> Tensor:
    places = given.mask.nonzero()
    return value * (1 + 0.1 * places.shape[0])


def _packed(given: Given, value: Tensor) -> Tensor:
    lengths = given.lengths.clamp(min=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(given.rows, lengths, batch_first=True, enforce_sorted=False)
    return value + packed.data.sum() * 0.1


def _warm_up(given: Given, value: Tensor) -> Tensor:
    given.model.counter += 1
    return value * 0.5 if given.model.counter < 3 else value


def _every_other(given: Given, value: Tensor) -> Tensor:
    given.model.counter += 1
    return value * 0.5 if int(given.model.counter) % 2 else value


def _written_first(given: Given, value: Tensor) -> Tensor:
    """Decide by a copy that was written."""
    ids = given.ids.clone()
    ids[ids > 4] = 0
    return value * 2 if bool((ids == 0).any()) else value


def _in_no_grad(given: Given, value: Tensor) -> Tensor:
    with torch.no_grad():
        share = float((given.x > 0).float().mean())
    return value * (1 + share)


def _looped(given: Given, value: Tensor) -> Tensor:
    total, count = 0, 0
    while total < int(given.lengths.sum()) and count < 4:
        total += 3
        count += 1
    return value * (1 + 0.1 * count)


def _chained(given: Given, value: Tensor) -> Tensor:
    """One decision leads to another one."""
    if bool(given.mask.any()):
        return value * 2 if int(given.ids.max()) > 5 else value * 3
    return value * 0.5


def _then_draw(given: Given, value: Tensor) -> Tensor:
    if bool(given.mask[0, 0]):
        return value * (1 + torch.rand(()))
    return value


def _by_embedded(given: Given, value: Tensor) -> Tensor:
    return value * 2 if float(given.model.table.weight[0, 0]) > 0 else value


def _by_loss(_: Given, value: Tensor) -> Tensor:
    return value * 0.5 if float(value) > 1 else value


def _by_draw(_: Given, value: Tensor) -> Tensor:
    return value * 2 if float(torch.rand(())) > 0.5 else value


def _by_numpy(given: Given, value: Tensor) -> Tensor:
    return value * (1 + 0.1 * int(given.ids.numpy().max()))


def _buffer_sum(given: Given, value: Tensor) -> Tensor:
    return value * (1 + float(given.model.scale.sum()))


def _moving(given: Given, value: Tensor) -> Tensor:
    """A buffer that follows the batch decides."""
    with torch.no_grad():
        given.model.scale.mul_(0.5).add_(given.x.mean((0, 1)) * 0.5)
    return value * 2 if bool(given.model.scale.mean() > 0) else value


def _unique(given: Given, value: Tensor) -> Tensor:
    return value * (1 + 0.1 * len(given.ids.unique()))


def _one_hot(given: Given, value: Tensor) -> Tensor:
    return value + functional.one_hot(given.ids).shape[-1] * 0.1 * value


def _chosen(given: Given, value: Tensor) -> Tensor:
    return value + given.rows[int(given.lengths[0]) % given.rows.shape[0]].sum()


def _repeat(given: Given, value: Tensor) -> Tensor:
    return value + given.rows[:, 0].repeat_interleave(given.lengths, 0).sum() * 0.1


def _split(given: Given, value: Tensor) -> Tensor:
    first = int(given.lengths[0])
    left, right = given.rows.split([first, given.rows.shape[1] - first], 1)
    return value + left.sum() * 0.5 - right.sum() * 0.3


def _differs_from_itself(number: float) -> bool:
    return number != number


HARMLESS: dict[str, Decision] = {
    "below_vocabulary": lambda g, v: _assert(g.ids.max() < WORDS, v),
    "not_negative": lambda g, v: _assert(torch.all(g.ids >= 0), v),
    "lengths_fit": lambda g, v: _assert(g.lengths.max() <= g.rows.shape[1], v),
    "item_fits": lambda g, v: _assert(g.lengths.max().item() <= g.rows.shape[1], v),
    "finite": lambda g, v: _assert(not bool(g.x.isnan().any()), v),
    "sometimes_false": lambda g, v: _assert(int(g.ids.sum()) % 5 != 0, v),
    "any_masked": lambda g, v: v * 2 if g.mask.any() else v,
    "all_masked": lambda g, v: v * 2 if bool(g.mask.all()) else v,
    "first_masked": lambda g, v: v * 3 if g.mask[0, 0] else v,
    "largest": lambda g, v: v * (1 + 0.1 * g.ids.max().item()),
    "equal": lambda g, v: v * 2 if torch.equal(g.lengths, g.lengths.sort().values) else v,
    "allclose": lambda g, v: v * 2 if torch.allclose(g.x, g.x.abs()) else v,
    "trimmed": _trimmed,
    "by_list": _by_list,
    "masked_rows": _masked_rows,
    "nonzero": _nonzero,
    "packed": _packed,
    "warm_up": _warm_up,
    "every_other": _every_other,
    "written_first": _written_first,
    "in_no_grad": _in_no_grad,
    "looped": _looped,
    "chained": _chained,
    "then_draw": _then_draw,
    "by_numpy": _by_numpy,
    "buffer_sum": _buffer_sum,
    "moving": _moving,
    "unique": _unique,
    "one_hot": _one_hot,
    "chosen": _chosen,
    "repeat": _repeat,
    "split": _split,
    "text": lambda g, v: v * 2 if f"{g.lengths[0].item()}" == "2" else v,
    "format": lambda g, v: v * 2 if f"{g.lengths[0]:02d}" == "02" else v,
    "text_of_list": lambda g, v: v * 2 if "3" in str(g.ids[0].tolist()) else v,
    "text_of_shape": lambda g, v: v * 2 if str(g.rows.shape).startswith("torch.Size([2,") else v,
    "key": lambda g, v: v * {1: 2.0, 2: 3.0}.get(g.lengths[0].item(), 1.0),
    "members": lambda g, v: v * len(set(g.ids.flatten().tolist())),
    "identity": lambda g, v: v * 2 if g.mask.any().item() is True else v,
    "instance": lambda g, v: v * 2 if isinstance(g.lengths.max().item(), int) else v,
    "is_nan": lambda g, v: v * 2 if _differs_from_itself((g.x.sum() * 0 / g.mask.sum()).item()) else v,
    "minus_zero": lambda g, v: v * 2 if math.copysign(1, (-g.mask.sum() * 0.0).item()) < 0 else v,
    "times_zero": lambda g, v: v * 2 if g.x.log().sum().item() * 0 == 0 else v,
}
"""By the batch and by buffers."""

TRAINED: dict[str, Decision] = {
    "by_embedded": _by_embedded,
    "by_loss": _by_loss,
    "by_draw": _by_draw,
    "loss_is_nan": lambda _, v: v if _differs_from_itself(v.item()) else v * 2,
    "text_of_loss": lambda _, v: v if str(v.item()) == "1.0" else v * 2,
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
        inside = [DECISIONS[f.name] for f in self.program.all("decision")]
        later = [DECISIONS[f.name] for f in self.program.all("late")]
        beside = self.program.get("aux")

        def compute(model: nn.Module, batch: Any) -> Any:
            value, rows = model(batch)
            for decide in later:
                value = decide(Given(model, batch, rows), value)
            if beside == "value":
                return value, {"longest": int(batch["lengths"].max())}
            return (value, rows.detach().mean()) if beside else value

        return Deciding(inside), compute, lambda _: None

    def batch(self, step: int) -> Any:
        program, g = self.program, torch.Generator()
        values = {"same": 0, "changing": step, "alternating": step % 2, "late": int(step > 2)}
        own = self.rank if program.has("own_values") else 0
        g.manual_seed(1000 * program.seed + 10 * values[program.get("values", "changing")] + own)
        rows, length = (3, 5) if not program.has("lengths") else ((3, 5), (2, 4), (4, 6))[step % 3]
        lengths = torch.randint(1, length + 1, (rows,), generator=g)
        share = g.initial_seed() // 10 % 3 / 2
        mask = torch.rand(rows, length, generator=g) < share
        x = torch.randn(rows, length, WIDTH, generator=g)
        return {"ids": torch.randint(0, WORDS, (rows, length), generator=g), "mask": mask, "lengths": lengths, "x": x}


def draw_decisions(r: random.Random, add: Add, ranks: int) -> int:
    for number in range(r.choice((1, 1, 2))):
        add(f"decision.{number}", tuple(HARMLESS if r.random() < 0.93 else TRAINED))
    for number in range(r.choice((0, 0, 1))):
        add(f"late.{number}", tuple(HARMLESS))
    add("values", ("same", "changing", "alternating", "late"))
    add("lengths", ("three",), 0.3)
    add("own_values", ("yes",), 0.5 if ranks > 1 else 0.0)
    add("aux", ("value", "tensor"), 0.25)
    add("optimizer", ("sgd", "adamw"))
    add("skip_nonfinite", ("yes",), 0.1)
    add("accumulate", ("2",), 0.1)
    return r.choice((4, 5, 6))
