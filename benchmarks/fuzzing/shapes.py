"""Batches whose sizes change one by one, each from {0, 1, 2, n, width}, in random order, and then come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.program import Add, Program
from fuzzing.world import World

WIDTH = 4
WORDS = 7

Sizes = Sequence[int]
Numbers = Sequence[Any]
"""Sizes as the loss reads them; symbols while tracing."""


class Shaped(nn.Module):
    """A few parameters, and operations that look at the number of rows."""

    def __init__(self, program: Program):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)
        self.bodies = [BODIES[feature.name] for feature in program.all("body")]

    def forward(self, x: Tensor) -> Tensor:
        """Rows (n, WIDTH) in, rows out."""
        for body in self.bodies:
            x = body(self, x)
        return self.norm(self.inner(x))


def _looped(_: Any, x: Tensor) -> Tensor:
    return torch.stack([row * (1 + 0.1 * i) for i, row in enumerate(x)]) if x.shape[0] else x


def _padded(_: Any, x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 0, max(0, 3 - x.shape[0])))


def _split(_: Any, x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return torch.cat((x[half:], x[:half] * 0.5))


def _attention(m: Any, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(m.inner(x)[None], x[None], x[None])[0]


def _broadcast(m: Any, x: Tensor) -> Tensor:
    """Multiply by a row that has the width's length, or the batch's: where both are alike, another one."""
    weights = m.inner.bias if x.shape[0] != x.shape[1] else x.mean(1)
    return x * weights


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda _, x: x,
    "centred": lambda _, x: x - x.sum(0) / max(x.shape[0], 1),
    "products": lambda m, x: m.inner(x) @ x.t() @ x / WIDTH if x.shape[0] else x,
    "softmax": lambda m, x: x * m.inner(x).softmax(0),
    "looped": _looped,
    "padded": _padded,
    "split": _split,
    "attention": _attention,
    "broadcast": _broadcast,
    "first_two": lambda _, x: torch.cat((x[:2] * 2, x[2:])),
    "folded": lambda _, x: x.view(2, -1, WIDTH).flip(0).reshape(-1, WIDTH) if x.shape[0] % 2 == 0 else x,
    "repeated": lambda _, x: x.repeat(2, 1) if x.shape[0] < 3 else x,
    "sorted": lambda _, x: x.sort(0).values,
    "topk": lambda _, x: x.topk(min(2, x.shape[0]), 0).values,
    "dropout": lambda _, x: functional.dropout(x, 0.2),
    "chunked": lambda _, x: torch.cat([c * (i + 1) for i, c in enumerate(x.chunk(2))]),
}


# What a batch is made of: how many sizes it has, how it is drawn, how its loss is computed

Draw = Callable[[torch.Generator, Sizes], Any]
Loss = Callable[[Any, Any], tuple[Tensor, Numbers]]


def _randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def _rows(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    x, y = batch
    rows = model(x)
    value = (rows.sum(1)[: y.shape[0]] * y[: rows.shape[0]]).sum() if rows.shape[0] != y.shape[0] else rows.sum(1) @ y
    return value, x.shape


def _pair(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    p, q = model(batch["p"]), model(batch["q"])
    return (p @ q.t()).sin().sum() + p.sum() * 0.1, (batch["p"].shape[0], batch["q"].shape[0])


def _boxes(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    images, boxes = batch
    rows = model(images)
    parts = [(rows[i % rows.shape[0]] * box).square().sum() / max(len(box), 1) for i, box in enumerate(boxes)]
    joined = torch.cat(boxes)
    return sum(parts, rows.sum() * 0.1) + (model.inner(joined)).sin().sum(), [b.shape[0] for b in boxes]


def _tokens(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    ids, mask = batch
    x = model.table(ids) * mask[..., None]
    rows = model(x.flatten(0, 1))
    return rows.sin().sum() + x.sum(1).square().sum() * 0.1, ids.shape


def _ragged(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    padded = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return model(padded.flatten(0, 1)).sin().sum(), [part.shape[0] for part in batch]


def _graph(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    nodes, (source, target) = batch["nodes"], batch["edges"]
    messages = model.inner(nodes)[source]
    gathered = torch.zeros_like(nodes).index_add(0, target, messages)
    return model(nodes + gathered).sin().sum(), (nodes.shape[0], source.shape[0])


def _images(model: Any, batch: Any) -> tuple[Tensor, Numbers]:
    x = model.conv(batch)
    return model(x.flatten(2).sum(2)).sin().sum() + x.square().sum(), batch.shape


def _draw_tokens(g: torch.Generator, s: Sizes) -> Any:
    return torch.randint(0, WORDS, (s[0], s[1]), generator=g), torch.rand(s[0], s[1], generator=g) < 0.7


def _draw_graph(g: torch.Generator, s: Sizes) -> Any:
    edges = s[1] if s[0] else 0
    return {"nodes": _randn(g, s[0], WIDTH), "edges": torch.randint(0, max(s[0], 1), (2, edges), generator=g).unbind(0)}


FORMS: dict[str, tuple[int, Draw, Loss]] = {
    "rows": (1, lambda g, s: (_randn(g, s[0], WIDTH), _randn(g, s[0])), _rows),
    "pair": (2, lambda g, s: {"p": _randn(g, s[0], WIDTH), "q": _randn(g, s[1], WIDTH)}, _pair),
    "boxes": (3, lambda g, s: (_randn(g, 3, WIDTH), [_randn(g, k, WIDTH) for k in s]), _boxes),
    "tokens": (2, _draw_tokens, _tokens),
    "ragged": (3, lambda g, s: [_randn(g, k, WIDTH) for k in s], _ragged),
    "graph": (2, _draw_graph, _graph),
    "images": (3, lambda g, s: _randn(g, s[0], WIDTH, s[1], s[2]), _images),
}


# What the loss makes of sizes


BRANCHES: dict[str, Callable[[Tensor, Numbers], Tensor]] = {
    "is_one": lambda v, s: v * 0.5 if s[0] == 1 else v,
    "is_zero": lambda v, s: v + 1 if s[-1] == 0 else v,
    "is_width": lambda v, s: v * 2 if s[0] == WIDTH else v,
    "is_even": lambda v, s: v * 0.7 if s[0] % 2 == 0 else v,
    "is_many": lambda v, s: v * 0.3 if s[-1] > 2 else v,
    "are_equal": lambda v, s: v * 0.9 if s[0] == s[-1] else v,
    "is_less": lambda v, s: v * 0.8 if s[0] < s[-1] else v,
    "mean": lambda v, s: v / max(s[0], 1),
    "counted": lambda v, s: v * (1 + 0.1 * len(list(range(s[-1])))),
    "as_tensor": lambda v, s: v * torch.tensor(1.0 + s[0]),
}

AUXILIARY: dict[str, Callable[[Tensor, Numbers], Any]] = {
    "sizes": lambda _, s: list(s),
    "ratio": lambda _, s: s[0] / (s[-1] + 1),
    "way": lambda _, s: "one" if s[0] == 1 else "more",
    "dict": lambda v, s: {"n": s[0], "small": s[0] < 3, "value": v.detach().new_full((2,), s[-1])},
}


class Shapes(World):
    """Batches of a form, the sizes of which change."""

    def build(self) -> tuple[Any, Any, Any]:
        loss = FORMS[self.program.get("form", "rows")][2]
        branches = [BRANCHES[feature.name] for feature in self.program.all("branch")]
        beside = AUXILIARY.get(self.program.get("aux"))

        def compute(model: nn.Module, batch: Any) -> Any:
            value, sizes = loss(model, batch)
            for branch in branches:
                value = branch(value, sizes)
            # Where no row is, nothing is left of the model; its parameters stay in the loss.
            value = value + 0.01 * sum((p.sum() for p in model.parameters()), torch.zeros(()))
            return value if beside is None else (value, beside(value, sizes))

        return Shaped(self.program), compute, lambda _: None

    def batch(self, step: int) -> Any:
        generator = torch.Generator()
        generator.manual_seed(1000 * self.program.seed + 10 * step + self.rank)
        count, make, _ = FORMS[self.program.get("form", "rows")]
        return make(generator, _sizes(self.program, step, count, self.rank))


def _sizes(program: Program, step: int, count: int, rank: int) -> Sizes:
    """Five sizes in random order, and some of them again; for each leaf apart, for all at once, or for one alone."""
    r = program.random(f"sizes {rank}")
    n = r.choice((3, 5, 6, 7))
    orders: list[list[int]] = []
    for _ in range(count):
        order = r.sample([0, 1, 2, n, WIDTH], 5)
        orders.append(order + r.choices(order, k=10))
    chosen = r.randrange(count)
    match program.get("varying", "all"):
        case "together":
            return [orders[0][step]] * count
        case "one":
            return [order[step] if place == chosen else n for place, order in enumerate(orders)]
        case "in_turn":
            return [order[step] if place == step % count else order[0] for place, order in enumerate(orders)]
        case _:
            return [order[step] for order in orders]


def draw_shapes(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    add("form", tuple(FORMS))
    for number in range(r.choice((0, 1, 1, 2))):
        add(f"body.{number}", tuple(BODIES))
    for number in range(r.choice((0, 0, 1, 2))):
        add(f"branch.{number}", tuple(BRANCHES))
    add("aux", tuple(AUXILIARY), 0.4)
    add("varying", ("together", "one", "one", "all", "all", "in_turn"))
    add("accumulate", ("2",), 0.15)
    return r.choice((6, 7, 8, 10))
