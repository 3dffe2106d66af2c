"""Small byte-level GPT (14.3 M parameters), trained on the source of Python's standard library."""

from __future__ import annotations

import functools
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from fxcomp.errors import BadOption
from fxcomp.frontends.job import Job

VOCABULARY = 256
_VALIDATION_EVERY = 10  # files
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Text:
    """Training and validation tokens, from different files."""

    train: torch.Tensor  # uint8
    validation: torch.Tensor  # uint8


def load_text(limit_bytes: int = 4_000_000, folder: Path | None = None) -> Text:
    """Read Python files in name order up to `limit_bytes`, every tenth for validation."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    validation: list[bytes] = []
    left = limit_bytes
    for index, path in enumerate(_python_files(folder)):
        if left <= 0:
            break
        content = path.read_bytes()[:left]
        left -= len(content)
        (train if (index + 1) % _VALIDATION_EVERY else validation).append(content)
    if not validation:
        raise BadOption(
            f"the training text is the standard library's source, but {folder} has fewer than {_VALIDATION_EVERY} "
            "Python files.\n  Use a Python that was installed with its sources."
        )
    return Text(_tokens(train), _tokens(validation))


def draw_batch(
    tokens: torch.Tensor, *, step: int, rank: int, size: int = 8, context: int = 128, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (each `size` × `context`), determined by step, rank and seed."""
    # torch's CPU generator only uses the low 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    passages = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def _python_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _tokens(parts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 8
    heads: int = 6
    width: int = 384
    context: int = 128
    vocabulary: int = VOCABULARY


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Language model with tied embedding and output weights."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    logits = cast(torch.Tensor, model(inputs))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text, batches: int = 8) -> float:
    was_training = model.training
    model.eval()
    losses = [loss_fn(model, draw_batch(text.validation, step=step, rank=0)) for step in range(batches)]
    model.train(was_training)
    return torch.stack(losses).mean().item()


def gpt_job(config: GPTConfig | None = None, *, seed: int = 0, batch_size: int = 8) -> Job:
    """Return the GPT's job. Equal seeds give equal weights."""
    config = config or GPTConfig()
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = GPT(config)
    text = training_text()

    def next_batch(step: int, rank: int) -> Batch:
        return draw_batch(text.train, step=step, rank=rank, size=batch_size, context=config.context, seed=seed)

    return Job(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95)),
        next_batch(0, 0),
        max_grad_norm=1.0,
        next_batch=next_batch,
    )


training_text = functools.cache(load_text)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        nn.init.zeros_(module.bias)
