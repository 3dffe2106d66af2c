"""Train by typical scripts, compiled and eagerly; `gpu_all.py` runs them on a GPU.

Each script trains a small GPT-like network with one feature: a dtype, a scaler, micro-batches, checkpointed dropout,
another optimizer. A check compares the largest difference of parameters after some steps with a bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fxcomp

Batch = tuple[Tensor, Tensor]
WIDTH, TOKENS, WORDS = 32, 12, 50
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


class Block(nn.Module):
    """Attention and MLP with dropout, optionally checkpointed."""

    def __init__(self, dropout: float, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop, self.checkpoints = nn.Dropout(dropout), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.whole, x, use_reentrant=False)
        return self.whole(x)

    def whole(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(self.first(x)).chunk(3, dim=-1)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.drop(self.mix(self.second(x)))


@dataclass(frozen=True)
class Script:
    """Training script, and the bound on the compiled step's difference."""

    bound: float
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    dropout: float = 0.0
    checkpoints: bool = False
    scales: bool = False
    micro_batches: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(1)
        blocks = [Block(self.dropout, self.checkpoints) for _ in range(2)]
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).to(device, self.dtype)

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.context(batch[0].device):
            return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3, enabled=self.scales)


SCRIPTS = {
    "fp32, updates over lists": Script(1e-5),
    "parameters in bf16": Script(2e-2, torch.bfloat16),
    "autocast in bf16": Script(1e-3, autocast=torch.bfloat16),
    "autocast in fp16 with a scaler": Script(1e-3, autocast=torch.float16, scales=True),
    "three micro-batches": Script(1e-4, micro_batches=3),
    "dropout": Script(1e-5, dropout=0.1),
    "checkpointed dropout": Script(1e-5, dropout=0.1, checkpoints=True),
    "clipping by value": Script(1e-5, options={"max_grad_value": 1e-3}),
    "NAdam": Script(1e-5, optimizer=partial(torch.optim.NAdam, lr=1e-3, eps=1e-4)),
    "Nesterov's momentum": Script(1e-5, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
}


def batches(device: torch.device, count: int) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(2)
    for _ in range(count):
        tokens = torch.randint(0, WORDS, (4, TOKENS + 1), generator=draw).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def largest_distance(name: str, device: torch.device, steps: int) -> tuple[bool, str]:
    """Train a script both ways; return whether parameters are within the bound, and the difference."""
    script = SCRIPTS[name]
    model = script.model(device)
    twin = copy.deepcopy(model)
    start, scaler = next(batches(device, 1)), script.scaler(device)
    step = fxcomp.compile_step(
        model, script.loss, script.optimizer(model.parameters()), start,
        compress="dense", checks=fxcomp.Checks(verify=1),
        accumulate=script.micro_batches, scaler=scaler, **script.options,
    )  # fmt: skip
    torch.manual_seed(3)
    for number, batch in enumerate(batches(device, steps * script.micro_batches), 1):
        step(batch)
        if number % script.micro_batches == 0:
            scaler.update()
    torch.manual_seed(3)
    _train_eagerly(script, twin, device, steps)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    apart = max((one - other).abs().max().item() for one, other in pairs)
    return apart <= script.bound, f"{apart:.3g} after {steps} steps, at most {script.bound:g}"


SHARDED = {"dense": 0.0, "int8": 3e-3, "int4": 1e-2, "topk(0.1)": 5e-2}
"""Parameter tolerances of fully_shard models against native training after 20 steps, by plan."""


def sharded_distance(plan: str, device: torch.device, steps: int) -> tuple[bool, str]:
    """Train a fully sharded model natively and with compressed gradients; every rank calls it."""
    script = SCRIPTS["fp32, updates over lists"]
    trained: list[Tensor] = []
    for ours in (False, True):
        model = script.model(device)
        for layer in list(model.children())[1:3]:
            fully_shard(layer)
        fully_shard(model)
        scatter = fxcomp.compress_reduce_scatter(model, compress=plan) if ours else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for tokens, targets in batches(device, steps):
            optimizer.zero_grad()
            script.loss(model, (tokens.roll(dist.get_rank(), 0), targets)).backward()
            optimizer.step()
        parts = [parameter.detach().to_local().flatten() for parameter in model.parameters()]
        trained.append(torch.cat(parts))
        if scatter is not None:
            scatter.close()
    apart = (trained[0] - trained[1]).abs().max().item()
    return apart <= SHARDED[plan], f"{apart:.3g} after {steps} steps, at most {SHARDED[plan]:g}"


def _train_eagerly(script: Script, model: nn.Module, device: torch.device, steps: int) -> None:
    optimizer, scaler = script.optimizer(model.parameters()), script.scaler(device)
    for number, batch in enumerate(batches(device, steps * script.micro_batches), 1):
        scaler.scale(script.loss(model, batch) / script.micro_batches).backward()
        if number % script.micro_batches == 0:
            scaler.unscale_(optimizer)
            if limit := script.options.get("max_grad_value"):
                nn.utils.clip_grad_value_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
