"""Layers of random models, by the shape of what runs through: rows (B, D), series (B, T, D), images (B, C, H, W)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuzzing.odd_layers import ODD, Applied

WIDTH = 8

Make = Callable[[random.Random], nn.Module]


class Lines(nn.Module):
    """Run a layer that wants (B, D, T), as Conv1d and BatchNorm1d do, on (B, T, D)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    """The first thing that a layer returns: recurrent layers return several."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Attention(nn.Module):
    """Scaled dot products, written out as a user would."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.heads, self.causal, self.dropout = r.choice((1, 2)), r.random() < 0.5, r.choice((0.0, 0.0, 0.2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=r.random() < 0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _linear(r: random.Random) -> nn.Module:
    after = r.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU))()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.8), after)


def _lstm(r: random.Random) -> nn.Module:
    both = r.random() < 0.3
    return First(nn.LSTM(WIDTH, WIDTH // 2 if both else WIDTH, bidirectional=both, batch_first=True))


def _encoder(r: random.Random) -> nn.Module:
    dropout, norm_first = r.choice((0.0, 0.1)), r.random() < 0.5
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True, norm_first=norm_first)


def _conv2d(r: random.Random) -> nn.Module:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=r.choice((1, 2, WIDTH)), bias=r.random() < 0.5)


def _batch_norm(make: Callable[..., nn.Module]) -> Make:
    return lambda r: make(WIDTH, momentum=r.choice((0.1, 0.5)), affine=r.random() < 0.8)


_ANY_LENGTH: dict[str, Make] = {
    "linear": _linear,
    "layer_norm": lambda r: nn.LayerNorm(WIDTH, elementwise_affine=r.random() < 0.8),
    "dropout": lambda r: nn.Dropout(r.choice((0.1, 0.5, 0.0)), inplace=r.random() < 0.3),
}

BLOCKS: dict[str, dict[str, Make]] = {
    "rows": {**_ANY_LENGTH, "batch_norm": _batch_norm(nn.BatchNorm1d)},
    "series": {
        **_ANY_LENGTH,
        "batch_norm": lambda r: Lines(_batch_norm(nn.BatchNorm1d)(r)),
        "conv": lambda _: Lines(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        "lstm": _lstm,
        "attention": Attention,
        "encoder": _encoder,
    },
    "images": {
        "conv": _conv2d,
        "batch_norm": _batch_norm(nn.BatchNorm2d),
        "group_norm": lambda r: nn.GroupNorm(r.choice((1, 2, 4)), WIDTH),
        "channels_last": lambda _: Applied(lambda x: x.contiguous(memory_format=torch.channels_last)),
    },
}

PASSAGES: dict[str, dict[str, tuple[str, Make]]] = {
    "images": {
        "patches": ("series", lambda _: Applied(lambda x: x.flatten(2).transpose(1, 2))),
        "pooled": ("rows", lambda _: Applied(lambda x: x.mean((2, 3)))),
    },
    "series": {
        "mean": ("rows", lambda _: Applied(lambda x: x.mean(1))),
        "last": ("rows", lambda _: Applied(lambda x: x[:, -1])),
    },
}

ANYWHERE: dict[str, Make] = ODD
