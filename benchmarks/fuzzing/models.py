"""Models put together from a program's features."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuzzing.odd_layers import ODD, Applied

if TYPE_CHECKING:
    from fuzzing.program import Program

WIDTH = 8
WORDS = 11
CLASSES = 5

INPUTS = {"rows": "rows", "bytes": "rows", "tokens": "series", "series": "series", "images": "images"}
"""Contents of batches, and the shapes that their stems make of them."""

TRAITS = ("tied", "frozen", "frozen_block", "unused")

Make = Callable[[random.Random], nn.Module]


def _linear(r: random.Random) -> nn.Module:
    after = r.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU))()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.8), after)


def _conv(r: random.Random) -> nn.Module:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=r.choice((1, 2, WIDTH)), bias=r.random() < 0.5)


def _dropout(r: random.Random) -> nn.Module:
    return nn.Dropout(r.choice((0.1, 0.5, 0.0)), inplace=r.random() < 0.3)


def _batch_norm(make: Callable[..., nn.Module]) -> Make:
    return lambda r: make(WIDTH, momentum=r.choice((0.1, 0.5)), affine=r.random() < 0.8)


_ANYWHERE: dict[str, Make] = {**ODD, "dropout": _dropout}
BLOCKS: dict[str, dict[str, Make]] = {
    "rows": {**_ANYWHERE, "linear": _linear, "batch_norm": _batch_norm(nn.BatchNorm1d)},
    "series": {**_ANYWHERE, "linear": _linear},
    "images": {
        **_ANYWHERE,
        "conv": _conv,
        "batch_norm": _batch_norm(nn.BatchNorm2d),
        "channels_last": lambda _: Applied(lambda x: x.contiguous(memory_format=torch.channels_last)),
    },
}
"""Layers by the shape of what runs through: rows (B, D), series (B, T, D), images (B, C, H, W)."""


class Stem(nn.Module):
    """From a batch's input to the width of the model."""

    def __init__(self, kind: str, r: random.Random):
        super().__init__()
        self.kind = kind
        match kind:
            case "tokens":
                padding, norm = r.choice((None, 0, 2)), r.choice((*[None] * 15, 1.0))
                self.layer: nn.Module = nn.Embedding(WORDS, WIDTH, padding_idx=padding, max_norm=norm)
            case "images":
                self.layer = nn.Conv2d(3, WIDTH, 3, padding=1)
            case _:
                self.layer = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float() / 16 if self.kind == "bytes" else x)


class Net(nn.Module):
    """Stem, blocks, head."""

    def __init__(self, program: Program):
        super().__init__()
        kind = program.get("input", "rows")
        self.stem = Stem(kind, program.random("input"))
        layers = BLOCKS[INPUTS[kind]]
        self.blocks = nn.Sequential(*(layers[f.name](program.random(f.slot)) for f in program.all("block")))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS if kind == "tokens" else CLASSES)
        self._apply_traits(program)

    def _apply_traits(self, program: Program) -> None:
        if program.has("trait.tied") and isinstance(self.stem.layer, nn.Embedding):
            self.head.weight = self.stem.layer.weight
        if program.has("trait.unused"):
            self.unused = nn.Parameter(torch.ones(3))
        if program.has("trait.frozen"):
            chosen = program.random("trait.frozen").choice(list(self.parameters()))
            chosen.requires_grad_(False)
        if program.has("trait.frozen_block"):
            self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.blocks(x)
        if x.dim() == 4:
            x = x.mean((2, 3))
        return self.head(self.norm(x))


# Batches


def draw_input(kind: str, g: torch.Generator, batch: int, length: int) -> Tensor:
    match kind:
        case "tokens":
            return torch.randint(0, WORDS, (batch, length), generator=g)
        case "series":
            return torch.randn(batch, length, 6, generator=g)
        case "images":
            return torch.randn(batch, 3, 6, 6, generator=g)
        case "bytes":
            return torch.randint(0, 16, (batch, 6), generator=g, dtype=torch.uint8)
        case _:
            return torch.randn(batch, 6, generator=g)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The same values, otherwise in memory."""
    match layout:
        case "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided":
            return torch.stack((x, x), -1)[..., 0]
        case "expanded":
            return x[:1].expand_as(x)
        case _:
            return x


def sizes(lengths: str, step: int, r: random.Random) -> tuple[int, int]:
    """Batch size and length of a step."""
    everywhere = [(r.randrange(2, 7), r.randrange(2, 8)) for _ in range(8)]
    match lengths:
        case "two":
            return everywhere[step % 2]
        case "changing":
            return everywhere[step]
        case "down_to_one":
            batch, length = everywhere[step]
            return (1, length) if step % 2 else (batch, 1)
        case _:
            return everywhere[0]


def structured(structure: str, x: Tensor, y: Tensor, number: float) -> Any:
    """A batch, in one of the ways in which loaders pass it."""
    match structure:
        case "dict":
            return {"x": x, "y": y, "weight": number}
        case "nested":
            return {"inputs": (x, {"mask": (y >= 0)}), "meta": [y, "name", None, number, 3]}
        case "aliased":
            return (x, y, x, y[:1], number)
        case "list":
            return [x, y, torch.tensor(number, dtype=torch.float64)]
        case _:
            return x, y, number


def opened(batch: Any) -> tuple[Tensor, Tensor, Any]:
    """Input, target and weight of a batch, whatever its structure."""
    if isinstance(batch, dict):
        if "inputs" in batch:
            (x, others), meta = batch["inputs"], batch["meta"]
            return x, meta[0] * others["mask"], meta[3]
        return batch["x"], batch["y"], batch["weight"]
    if isinstance(batch, list):
        x, y, number = batch
        return x, y, number
    if len(batch) == 5:
        return (batch[0] + batch[2]) / 2 if batch[0].is_floating_point() else batch[2], batch[1], batch[4]
    return batch
