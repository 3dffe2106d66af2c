"""Watched modes and settings of torch around a step: entered at the first step, later, or in turn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


@contextlib.contextmanager
def _set(change: Callable[[Any], Any], to: Any, back: Any) -> Any:
    change(to)
    try:
        yield
    finally:
        change(back)


AUTOCASTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
}

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **AUTOCASTS,
    "default_device": lambda: _set(torch.set_default_device, "cpu", None),
    "default_dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "sdpa_math": lambda: sdpa_kernel(SDPBackend.MATH),
    "sdpa_flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "matmul_precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": lambda: _set(torch.set_num_threads, 2, 1),
}

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "grad_enabled": lambda v: v * 3 if torch.is_grad_enabled() else v,
    "autocast": lambda v: v * 3 if torch.is_autocast_enabled("cpu") else v,
    "default_dtype": lambda v: v * torch.tensor(0.1).to(v.dtype),
    "deterministic": lambda v: v * 3 if torch.are_deterministic_algorithms_enabled() else v,
    "threads": lambda v: v * torch.get_num_threads(),
    "precision": lambda v: v * (3 if torch.get_float32_matmul_precision() == "medium" else 1),
}


class Surrounded(nn.Module):
    """Attention, tensors made on the way, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        y = y * torch.linspace(0.5, 1.5, WIDTH) + torch.ones(WIDTH) * 0.1
        return self.last(self.dropout(y))


class Around(World):
    """A step that runs inside of something."""

    def build(self) -> tuple[Any, Any, Any]:
        look = LOOKS[self.program.get("look", "none")]

        def compute(model: nn.Module, batch: Any) -> Any:
            x, y = batch
            return look((model(x).squeeze(1).float() - y).square().mean())

        return Surrounded(), compute, lambda _: None

    def batch(self, step: int) -> Any:
        g = torch.Generator()
        g.manual_seed(1000 * self.program.seed + 10 * step + self.rank)
        return torch.randn(3, WIDTH, generator=g), torch.randn(3, generator=g)

    def around(self, step: int, *, eager: bool) -> AbstractContextManager[Any]:
        """Enter this step's surroundings, but for autocast around eager's backward pass."""
        order = self.program.get("order", "first")
        is_inside = {"first": True, "second": step > 0, "alternating": step % 2 == 1, "now": step % 2 == 0}[order]
        self.within = [f.name for f in self.program.all("within")] if is_inside else []
        return _entered([name for name in self.within if not eager or name not in AUTOCASTS])

    def forward_around(self) -> AbstractContextManager[Any]:
        return _entered([name for name in self.within if name in AUTOCASTS])


def _entered(names: list[str]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for name in names:
        stack.enter_context(SURROUNDINGS[name]())
    return stack


def draw_around(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    for number in range(r.choice((1, 1, 2))):
        add(f"within.{number}", tuple(SURROUNDINGS))
    add("order", ("first", "second", "alternating", "now"))
    add("look", tuple(LOOKS), 0.4)
    return r.choice((3, 4))
