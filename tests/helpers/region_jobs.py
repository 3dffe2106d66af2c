"""Small models whose steps are cut into several regions, over a transport that sends nothing; cases drawn pairwise.

Every rank is as this one: a sum is this rank's value times the number of ranks, and what arrives is what it has sent.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.codegen import program
from fxcomp.plan.strategy import Strategy
from fxcomp.ranks import ALONE
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.runtime.transport import NullTransport
from fxcomp.site import Site
from helpers.drifting import table
from helpers.jobs import Transformer, cross_entropy
from helpers.plans import plan_in_turns
from helpers.torch_compiled import QUICK

WORDS, CLASSES = 20, 5

SYMBOLIC_FROM = 2
"""The number of sizes that have captures of their own, before one capture serves many."""


class Mirror(NullTransport):
    """Ranks that all have what this one has."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Any:
        if how == "sum":
            value.mul_(self._ranks)
        return super().all_reduce(value, level, lane, how)

    def start(self, transfer: Transfer) -> Any:
        done = super().start(transfer)
        if transfer.pattern is Pattern.REDUCE_SCATTER:
            transfer.out.mul_(len(transfer.parts(self.place(transfer.level))))
        return done


@contextmanager
def mirrored(hosts: Cluster, devices: Sequence[str]) -> Iterator[None]:
    """Steps have these hosts, whose ranks all have what this one has; Inductor compiles regions on `devices`."""

    def site(_: Any, __: Any, device: torch.device, *___: Any) -> Site:
        return Site(ALONE, hosts, Mirror(hosts.world_size), device)

    with (
        patch.object(program, "INDUCTOR_DEVICES", devices),
        patch.object(Site, "of", site),
        inductor_config.patch(QUICK),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Inductor's own
        yield


class Convolutions(nn.Module):
    """Two convolutions with biases, the second one around a shortcut; both gradients of each come of one operator."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), norm(4)
        self.second, self.after = nn.Conv2d(4, 4, 3, padding=1), norm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.norm(self.first(images)))
        inner = inner + torch.relu(self.after(self.second(inner)))
        return self.head(inner.mean((2, 3)))


class Patches(nn.Module):
    """A patch embedding with a bias, and one layer of attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(images).flatten(2).transpose(1, 2)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, 6), kind(6, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens))[0])


class Attending(nn.Module):
    """A GPT of one block: causal attention by its fused operator, GELU, layer norms."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, WORDS)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.embed(tokens)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.project(self.norm(inner)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        inner = inner + nn.functional.dropout(self.out(mixed), self.dropout, self.training)
        return self.head(inner + self.narrow(nn.functional.gelu(self.wide(inner))))


class Rows(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


class Gated(nn.Module):
    """A norm and an activation that are written as several operators, and a gate: backward computes them again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up, self.head = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, CLASSES)
        self.scale, self.dropout = nn.Parameter(torch.ones(6)), nn.Dropout(dropout)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.scale * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5))
        inner = self.gate(rows)
        inner = 0.5 * inner * (1.0 + torch.tanh(0.8 * (inner + 0.04 * inner**3)))
        return self.head(self.dropout(nn.functional.silu(inner) * self.up(rows)))


class Around(nn.Module):
    """A model around another one, which it checkpoints, or runs in 16 bits."""

    def __init__(self, inner: nn.Module, case: Case) -> None:
        super().__init__()
        self.inner, self.case = inner, case

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            if self.case.checkpoints:
                return checkpoint(self.inner, inputs, use_reentrant=False).float()
            return self.inner(inputs).float()


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "mlp": Rows,
    "conv": lambda _: Convolutions(),
    "groups": lambda _: Convolutions(lambda channels: nn.GroupNorm(2, channels)),
    "gpt": Attending,
    "lstm": lambda _: Recurrent(nn.LSTM),
    "gru": lambda _: Recurrent(nn.GRU),
    "vit": Patches,
    "tied": Transformer,
    "gated": Gated,
}
IMAGES, TOKENS, RECURRENT = ("conv", "groups", "vit"), ("gpt", "lstm", "gru", "tied"), ("lstm", "gru")

PLANS = {
    "dense": "all_reduce@world",
    "bf16": "compress(bf16)@gpu > all_gather@world > decompress@gpu",
    "int8": "compress(int8)@gpu > all_gather@world > decompress@gpu",
    "int4 twice": "compress(int4)@gpu > all_to_all@world > decompress@gpu"
    " > compress(int4)@gpu > all_gather@world > decompress@gpu",
    "powersgd": "propose(powersgd(2))@gpu > all_reduce@world > compress(powersgd(2))@gpu > all_reduce@world"
    " > decompress@gpu",
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3),
}


@dataclass(frozen=True)
class Case:
    """A combination of options."""

    model: str
    plan: str
    ranks: int
    per_bucket: int
    optimizer: str
    varies: bool
    drops: bool
    autocast: bool
    checkpoints: bool
    accumulates: bool
    scales: bool
    clips: bool

    def __str__(self) -> str:
        claims = [each.name for each in fields(self) if getattr(self, each.name) is True]
        return "-".join(map(str, [self.model, self.plan.replace(" ", "_"), self.ranks, *claims]))


CHOICES: dict[str, Sequence[Any]] = {
    "model": tuple(MODELS),
    "plan": tuple(PLANS),
    "ranks": (2, 4),
    "per_bucket": (2, 4),
    "optimizer": tuple(OPTIMIZERS),
    **dict.fromkeys(("varies", "drops", "autocast", "checkpoints", "accumulates", "scales", "clips"), (False, True)),
}


def pairwise(choices: dict[str, Sequence[Any]], seed: int = 0, tries: int = 60) -> Iterator[Case]:
    """Draw cases until every two choices have met; each is the best of some draws."""
    generator, names = random.Random(seed), list(choices)
    missing = {
        (a, x, b, y)
        for (a, b) in itertools.combinations(range(len(names)), 2)
        for x, y in itertools.product(choices[names[a]], choices[names[b]])
    }
    while missing:
        a, x, b, y = min(missing, key=repr)
        drawn = [[generator.choice(choices[name]) for name in names] for _ in range(tries)]
        for each in drawn:
            each[a], each[b] = x, y
        best = max(drawn, key=lambda each: len(_pairs(each) & missing))
        missing -= _pairs(best)
        yield Case(*best)


def _pairs(values: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(range(len(values)), 2)}


def build(case: Case) -> nn.Module:
    torch.manual_seed(5)
    return Around(MODELS[case.model](0.2 if case.drops else 0.0), case)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Sizes that are equal while they are traced, where rows and length vary; recurrent models are unrolled."""
    generator = torch.Generator().manual_seed(3)
    rows = [4, 5, 6, 3] if case.varies else [4] * 4
    lengths = [2] * 4 if case.model in RECURRENT else [4, 5, 6, 7] if case.varies else [4] * 4
    sizes = zip(rows, lengths, strict=True)
    return [_batch(case, generator, *size) for size in sizes]


def _batch(case: Case, generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    if case.model in TOKENS:
        inputs, targets = torch.randint(0, WORDS, (2, rows, length), generator=generator)
        return inputs, targets
    shape = (3, 8, 8) if case.model in IMAGES else (6,)
    return torch.randn(rows, *shape, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


@dataclass
class Trained:
    """The results of a few steps."""

    losses: list[float]
    parameters: list[Tensor]
    regions: int = 0


def step_by(case: Case, backend: str) -> Trained:
    """Train by a compiled step whose regions are run by `backend`: inductor, or eager."""
    model = build(case)
    optimizer, given = OPTIMIZERS[case.optimizer](model), batches(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if case.scales else None
    hosts = Cluster(case.ranks, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))

    devices = ("cpu",) if backend == "inductor" else ()
    fixed = SYMBOLIC_FROM if case.varies else 0  # captures of one size are other cases'
    with mirrored(hosts, () if fixed else devices):
        step = fxcomp.compile_step(
            model,
            cross_entropy,
            optimizer,
            given[0],
            costs=table(2.0),
            accumulate=2 if case.accumulates else 1,
            scaler=scaler,
            max_grad_norm=1.0 if case.clips else None,
            compress=plan_in_turns(model, _strategies(case), case.per_bucket),
            checks=fxcomp.Checks(race="off", replan="off", verify="never"),
        )
        torch.manual_seed(1)
        losses = list[float]()
        for number, batch in enumerate(given):
            with patch.object(program, "INDUCTOR_DEVICES", devices if number >= fixed else ()):
                losses.append(float(step(batch)))
            if scaler is not None and len(losses) % (2 if case.accumulates else 1) == 0:
                scaler.update()
    regions = step.source.count("def region_")
    return Trained(losses, [p.detach().clone() for p in model.parameters()], regions)


def _strategies(case: Case) -> list[Strategy]:
    """Compressed buckets and dense ones in turns."""
    chosen = Strategy.parse(PLANS[case.plan])
    return [chosen] if case.plan == "dense" else [chosen, chosen, Strategy.parse(PLANS["dense"])]


def eagerly(case: Case) -> Trained:
    """Train as plain PyTorch does, which is what dense ranks with the same gradients come to."""
    model = build(case)
    optimizer, losses = OPTIMIZERS[case.optimizer](model), list[float]()
    group = 2 if case.accumulates else 1
    torch.manual_seed(1)
    for number, batch in enumerate(batches(case), 1):
        loss = cross_entropy(model, batch)
        (loss / group).backward()
        losses.append(loss.item())
        if number % group == 0:
            if case.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, [p.detach().clone() for p in model.parameters()])


def missed(one: Trained, other: Trained, case: Case) -> float:
    """Return the distance between two ends, as a share of the way that one has gone."""
    start = nn.utils.parameters_to_vector(build(case).parameters()).detach()
    ends = [torch.cat([each.flatten() for each in found.parameters]) for found in (one, other)]
    return float((ends[1] - ends[0]).norm() / (ends[0] - start).norm())


def met(cases: Sequence[Case]) -> set[tuple[int, Any, int, Any]]:
    """Return the choices that meet. A plan's own lines lie between regions: a model meets dense and compressed ones."""
    pairs = {pair for case in cases for pair in _pairs(astuple(case))}
    return {(a, x, b, y == "dense" if (a, b) == (0, 1) else y) for a, x, b, y in pairs}


def _price(case: Case) -> tuple[Any, ...]:
    return case.model in RECURRENT, case.model != "mlp", case.varies, case.autocast, str(case)


def cases() -> list[Case]:
    """Draw cases, the cheap ones first, and leave out those, the dearest first, without which the same choices meet."""
    kept = sorted(pairwise(CHOICES), key=_price)
    every = met(kept)
    for case in reversed(kept):
        others = [other for other in kept if other != case]
        kept = others if met(others) == every else kept
    return kept
