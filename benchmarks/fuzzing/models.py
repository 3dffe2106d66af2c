"""Models put together from a program's features."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fuzzing.blocks import ANYWHERE, BLOCKS, PASSAGES, WIDTH

if TYPE_CHECKING:
    from fuzzing.program import Program

WORDS = 11
CLASSES = 5

INPUTS = {"rows": "rows", "bytes": "rows", "tokens": "series", "series": "series", "images": "images"}
"""Contents of batches, and the shapes that their stems make of them."""

TRAITS = (
    "tied",
    "frozen",
    "frozen_block",
    "unused",
)


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


class Wrapped(nn.Module):
    """A block inside of a residual, a checkpoint or autocast."""

    def __init__(self, inner: nn.Module, way: str):
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "residual":
                return x + self.inner(x)
            case "checkpoint":
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            case _:
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(x).float()


class Net(nn.Module):
    """Stem, blocks, head."""

    def __init__(self, program: Program):
        super().__init__()
        kind = program.get("input", "rows")
        self.stem = Stem(kind, program.random("input"))
        blocks: list[nn.Module] = []
        self.kind = INPUTS[kind]
        for feature in program.all("block"):
            found, self.kind = _block(feature.name, self.kind, program.random(feature.slot))
            if found is None:
                continue
            is_passage = any(feature.name in passages for passages in PASSAGES.values())
            way = "" if is_passage else program.get(f"wrap.{feature.slot.split('.')[1]}")
            blocks.append(Wrapped(found, way) if way else found)
        self.blocks = nn.Sequential(*blocks)
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


def _block(name: str, kind: str, r: random.Random) -> tuple[nn.Module | None, str]:
    """A block of this name, if there is one for what comes in, and the kind of what comes out."""
    for layers in (BLOCKS[kind], ANYWHERE):
        if name in layers:
            return layers[name](r), kind
    if name in PASSAGES.get(kind, {}):
        after, make = PASSAGES[kind][name]
        return make(r), after
    return None, kind


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
