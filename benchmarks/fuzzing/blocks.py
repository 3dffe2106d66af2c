"""Layers of random models, by the shape of what runs through: rows (B, D), series (B, T, D), images (B, C, H, W)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from fuzzing.odd_layers import ODD, Applied

WIDTH = 8

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu, functional.gelu, torch.tanh, functional.silu, functional.leaky_relu, functional.elu, torch.sigmoid,
)  # fmt: skip

Make = Callable[[random.Random], nn.Module]


class Lines(nn.Module):
    """Run a layer that wants (B, D, T), as Conv1d and BatchNorm1d do, on (B, T, D)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    """The first thing that a layer returns: recurrent layers and attention return several."""

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


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with a mask that depends on the length."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=r.choice((0.0, 0.1)), batch_first=True)
        self.masked, self.weighs = r.random() < 0.5, r.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.masked else None
        y, weights = self.inner(x, x, x, attn_mask=mask, need_weights=self.weighs)
        return y if weights is None else y * (1 + weights.mean())


class Positions(nn.Module):
    """Add an embedding of each place; sliced, or looked up by a range."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.table, self.sliced = nn.Parameter(0.1 * torch.randn(32, WIDTH)), r.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x + (self.table[: x.shape[1]] if self.sliced else functional.embedding(places, self.table))


class Cells(nn.Module):
    """A recurrent cell in a Python loop over the length."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.cell = r.choice((nn.GRUCell, nn.RNNCell))(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[0], WIDTH), []
        for place in x.unbind(1):
            state = self.cell(place, state)
            found.append(state)
        return torch.stack(found, 1)


class ByLength(nn.Module):
    """Take another way for long series, and halve those of even length."""

    def __init__(self, r: random.Random):
        super().__init__()
        self.short, self.long, self.border = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), r.choice((4, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.short(x) + 0 * self.long.weight.sum() + 0 * self.long.bias.sum()
        if x.shape[1] > self.border:
            y = self.long(y)
        return y * (0.5 if x.shape[1] % 2 == 0 else 1.0)


class Experts(nn.Module):
    """A soft mixture of linear layers in a ModuleList, or by name in a ModuleDict."""

    def __init__(self, r: random.Random):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(r.choice((2, 3)))]
        by_name = {f"expert {i}": layer for i, layer in enumerate(layers)}
        self.experts = nn.ModuleList(layers) if r.random() < 0.5 else nn.ModuleDict(by_name)
        self.gate = nn.Linear(WIDTH, len(layers))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        weights = self.gate(x).softmax(-1)
        return sum((weights[..., i : i + 1] * layer(x) for i, layer in enumerate(layers)), torch.zeros(()))


class Doubled(nn.Module):
    """A parametrization: the weight is symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized(r: random.Random) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    match r.choice(("weight_norm", "spectral_norm", "own", "orthogonal")):
        case "weight_norm":
            return parametrizations.weight_norm(linear)
        case "spectral_norm":
            return parametrizations.spectral_norm(linear)
        case "orthogonal":
            return parametrizations.orthogonal(linear, orthogonal_map="householder")
        case _:
            parametrize.register_parametrization(linear, "weight", Doubled())
            return linear


def _linear(r: random.Random) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.8), Applied(r.choice(ACTIVATIONS))]
    return nn.Sequential(*layers)


def _wide(r: random.Random) -> nn.Module:
    layers = [
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.ReLU(inplace=r.random() < 0.5),
        nn.Dropout(0.2),
        nn.Linear(4 * WIDTH, WIDTH),
    ]
    return nn.Sequential(*layers)


def _glu(r: random.Random) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU(r.choice((-1, -1))))


def _recurrent(kind: type[nn.RNNBase]) -> Make:
    def make(r: random.Random) -> nn.Module:
        two, both = r.random() < 0.3, r.random() < 0.3
        inner = kind(WIDTH, WIDTH // 2 if both else WIDTH, num_layers=1 + two, bidirectional=both, batch_first=True)
        inner.dropout = 0.1 if two and r.random() < 0.5 else 0.0
        return First(inner)

    return make


def _encoder(r: random.Random) -> nn.Module:
    options = {
        "dropout": r.choice((0.0, 0.1)),
        "norm_first": r.random() < 0.5,
        "activation": r.choice(("relu", "gelu")),
    }
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **options)


def _conv1d(r: random.Random) -> nn.Module:
    return Lines(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=r.choice((1, 2)), padding_mode=r.choice(("zeros", "circular")))
    )


def _conv2d(r: random.Random) -> nn.Module:
    groups, dilation = r.choice((1, 1, 2, WIDTH)), r.choice((1, 1, 2))
    mode = r.choice(("zeros", "zeros", "reflect"))
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation, groups=groups, padding_mode=mode)


def _batch_norm(make: Callable[..., nn.Module]) -> Make:
    def made(r: random.Random) -> nn.Module:
        return make(
            WIDTH,
            momentum=r.choice((*[0.1, 0.5] * 5, None)),
            affine=r.random() < 0.8,
            track_running_stats=r.random() < 0.9,
        )

    return made


def _convolved(r: random.Random) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(r.random() < 0.5)
    )


def _resized(r: random.Random) -> nn.Module:
    modes = (
        lambda x: functional.interpolate(functional.avg_pool2d(x, 2), size=x.shape[-2:]),
        lambda x: functional.max_pool2d(x, 3, 1, 1),
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)[..., ::2, ::2],
        lambda x: functional.pixel_shuffle(functional.pixel_unshuffle(x, 2), 2),
    )
    return Applied(r.choice(modes))


_ROWS: dict[str, Make] = {
    "linear": _linear,
    "wide": _wide,
    "glu": _glu,
    "layer_norm": lambda r: nn.LayerNorm(WIDTH, elementwise_affine=r.random() < 0.8),
    "rms_norm": lambda _: nn.RMSNorm(WIDTH),
    "dropout": lambda r: nn.Dropout(r.choice((0.1, 0.5, 0.0)), inplace=r.random() < 0.3),
    "alpha_dropout": lambda r: nn.AlphaDropout(r.choice((0.1, 0.3))),
    "experts": Experts,
    "parametrized": _parametrized,
    "prelu": lambda _: nn.PReLU(),
}

BLOCKS: dict[str, dict[str, Make]] = {
    "rows": {
        **_ROWS,
        "batch_norm": _batch_norm(nn.BatchNorm1d),
        "group_norm": lambda r: nn.GroupNorm(r.choice((1, 2, 4)), WIDTH),
        "bilinear": lambda _: Applied2(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    },
    "series": {
        **_ROWS,
        "batch_norm": lambda r: Lines(_batch_norm(nn.BatchNorm1d)(r)),
        "between_linears": lambda r: nn.Sequential(nn.Linear(WIDTH, WIDTH), Lines(nn.BatchNorm1d(WIDTH)), _linear(r)),
        "conv": _conv1d,
        "lstm": _recurrent(nn.LSTM),
        "gru": _recurrent(nn.GRU),
        "rnn": _recurrent(nn.RNN),
        "cells": Cells,
        "attention": Attention,
        "self_attention": SelfAttention,
        "encoder": _encoder,
        "positions": Positions,
        "by_length": ByLength,
        "dropout1d": lambda _: Lines(nn.Dropout1d(0.3)),
    },
    "images": {
        "conv": _conv2d,
        "convolved": _convolved,
        "batch_norm": _batch_norm(nn.BatchNorm2d),
        "group_norm": lambda r: nn.GroupNorm(r.choice((1, 2, 4)), WIDTH),
        "instance_norm": lambda r: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=r.random() < 0.5),
        "dropout2d": lambda _: nn.Dropout2d(0.3),
        "resized": _resized,
        "transposed_conv": lambda _: nn.ConvTranspose2d(WIDTH, WIDTH, 3, padding=1),
        "channels_last": lambda _: Applied(lambda x: x.contiguous(memory_format=torch.channels_last)),
    },
}


class Applied2(nn.Module):
    """A layer of two inputs, given the same twice."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


PASSAGES: dict[str, dict[str, tuple[str, Make]]] = {
    "images": {
        "patches": ("series", lambda _: Applied(lambda x: x.flatten(2).transpose(1, 2))),
        "pooled": ("rows", lambda _: Applied(lambda x: x.mean((2, 3)))),
    },
    "series": {
        "mean": ("rows", lambda _: Applied(lambda x: x.mean(1))),
        "last": ("rows", lambda _: Applied(lambda x: x[:, -1])),
        "largest": ("rows", lambda _: Applied(lambda x: x.amax(1))),
        "summed": ("rows", lambda _: Applied(lambda x: torch.einsum("btd->bd", x) / x.size(1))),
    },
}

ANYWHERE: dict[str, Make] = ODD
