"""Surroundings of a step that may change its operators: entered at the first step, later, or in turn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


class Halving(TorchFunctionMode):
    """Halve what `torch.tanh` gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func in (torch.tanh, Tensor.tanh) else result


class Watching(TorchFunctionMode):
    """Change nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Negating(TorchDispatchMode):
    """Negate what the operator of tanh gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.ops.aten.tanh.default else result


class Seeing(TorchDispatchMode):
    """Change nothing, one floor below."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _set(change: Callable[[Any], Any], to: Any, back: Any) -> Any:
    change(to)
    try:
        yield
    finally:
        change(back)


def _default_dtype() -> AbstractContextManager[Any]:
    return _set(torch.set_default_dtype, torch.float64, torch.float32)


def _saved_hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "halving": Halving,
    "watching": Watching,
    "negating": Negating,
    "seeing": Seeing,
    "flops": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
    "device_meta": lambda: torch.device("meta"),
    "default_device": lambda: _set(torch.set_default_device, "cpu", None),
    "default_dtype": _default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "autocast_uncached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "anomaly": torch.autograd.detect_anomaly,
    "anomaly_plain": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "saved_hooks": _saved_hooks,
    "saved_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
    "sdpa_math": lambda: sdpa_kernel(SDPBackend.MATH),
    "sdpa_flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "no_mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "matmul_precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": lambda: _set(torch.set_num_threads, 2, 1),
    "flush": lambda: _set(torch.set_flush_denormal, True, False),
    "one_thread_backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "profiled": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward_ad": lambda: torch.autograd.forward_ad.dual_level(),
    "allow_mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "no_function": torch._C.DisableTorchFunction,
    "no_function_subclass": torch._C.DisableTorchFunctionSubclass,
    "view_replay": lambda: torch.autograd._force_original_view_tracking(True),  # type: ignore[attr-defined]
    "recorded": lambda: torch.profiler.record_function("step"),
    "fill": lambda: _set(_fill_uninitialized, False, True),
    "unsafe_swap": lambda: _set(torch.__future__.set_swap_module_params_on_conversion, True, False),
    "fastpath": lambda: _set(torch.backends.mha.set_fastpath_enabled, False, True),
}


def _fill_uninitialized(on: Any) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[assignment]


class Surrounded(nn.Module):
    """Attention, a function that modes may change, tensors made on the way, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        y = y * torch.linspace(0.5, 1.5, WIDTH) + torch.ones(WIDTH) * 0.1
        return self.last(self.dropout(y))


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "grad_enabled": lambda v: v * 3 if torch.is_grad_enabled() else v,
    "autocast": lambda v: v * 3 if torch.is_autocast_enabled("cpu") else v,
    "inference": lambda v: v * 3 if torch.is_inference_mode_enabled() else v,
    "default_dtype": lambda v: v * torch.tensor(0.1).to(v.dtype),
    "anomaly": lambda v: v * 3 if torch.is_anomaly_enabled() else v,
    "deterministic": lambda v: v * 3 if torch.are_deterministic_algorithms_enabled() else v,
    "threads": lambda v: v * torch.get_num_threads(),
    "device": lambda v: v * (3 if torch.empty(0).device.type == "cpu" else 1),
    "empty": lambda v: v + torch.zeros(1).sum(),
    "double": lambda v: v * torch.full((), 1 / 3).to(v.dtype),
    "precision": lambda v: v * (3 if torch.get_float32_matmul_precision() == "medium" else 1),
}


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
        self.within = [f.name for f in self.program.all("within")] if self._is_inside(step) else []
        chosen = [n for n in self.within if not eager or n not in _AUTOCASTS]
        return _entered(chosen)

    def forward_around(self) -> AbstractContextManager[Any]:
        return _entered([name for name in self.within if name in _AUTOCASTS])

    def _is_inside(self, step: int) -> bool:
        order = self.program.get("order", "first")
        return {"first": True, "second": step > 0, "alternating": step % 2 == 1, "now": step % 2 == 0}[order]


_AUTOCASTS = ("autocast", "autocast_half", "autocast_off", "autocast_uncached")


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
