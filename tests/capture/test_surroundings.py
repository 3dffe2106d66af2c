"""Modes of torch around a step: what tracing bakes in is captured again, what cannot take part is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers.followed import compile_alone, count_captures
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, graph
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils._debug_mode import DebugMode

from fxcomp import errors
from fxcomp.capture.step_guard import READ, surroundings

ROWS = torch.linspace(-1, 1, 18).view(3, 6)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def compiled() -> Any:
    torch.manual_seed(0)
    return compile_alone(nn.Linear(6, 4), loss, batch=ROWS, verify="never")


REFUSED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    r"TorchDispatchMode FakeTensorMode is on": FakeTensorMode,
    r"hooks for saved tensors.*inside loss_fn": graph.save_on_cpu,
    r"forward-mode differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_mode_that_would_not_take_part_is_refused_at_first_and_later(text: str):
    step = compiled()
    with REFUSED[text](), pytest.raises(errors.Unsupported, match=f"(?s){text}"):
        step(ROWS)
    with REFUSED[text](), pytest.raises(errors.Unsupported, match=f"(?s){text}"):
        compiled()
    step(ROWS)


@pytest.mark.parametrize("mode", [LoggingTensorMode, DebugMode])
def test_a_mode_of_torchs_that_looks_on_changes_nothing(mode: Callable[[], AbstractContextManager[Any]]):
    expected = [compiled()(ROWS), *map(compiled(), [ROWS, ROWS[:2]])]
    with mode():
        inside = compiled()(ROWS)
    step = compiled()
    with mode():
        assert [inside, *map(step, [ROWS, ROWS[:2]])] == expected


SET: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the cache of autocast": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "the default device": lambda: torch.device("cpu"),
    "which libraries the CPU may use": lambda: torch.backends.mkldnn.flags(enabled=False),
    "how subclasses of tensors are asked": torch._C.DisableTorchFunctionSubclass,
    "which kernels attention may use": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
}


BESIDE = {"which kernels attention may use": {"the order of attention's kernels"}}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", SET)
def test_a_setting_that_tracing_bakes_in_is_read(name: str):
    before = dict(zip(READ, surroundings(), strict=True))
    with SET[name]():
        inside = dict(zip(READ, surroundings(), strict=True))
    assert {key for key in READ if before[key] != inside[key]} == {name} | BESIDE.get(name, set())
    assert dict(zip(READ, surroundings(), strict=True)) == before


def test_settings_without_a_context_are_read():
    def changed(setter: Callable[[Any], Any], to: Any, back: Any) -> set[str]:
        before = surroundings()
        setter(to)
        try:
            return {key for key, was, now in zip(READ, before, surroundings(), strict=True) if was != now}
        finally:
            setter(back)
            assert surroundings() == before

    def warns_only(is_on: bool) -> None:
        torch.use_deterministic_algorithms(is_on, warn_only=True)

    def fills(is_on: bool) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = is_on

    def repeats_views(is_on: bool) -> None:
        torch._C._set_view_replay_enabled(is_on)

    deterministic = {"torch.use_deterministic_algorithms"}
    assert changed(warns_only, True, False) == deterministic
    assert changed(torch.use_deterministic_algorithms, True, False) == deterministic
    assert changed(fills, False, True) == deterministic
    assert changed(repeats_views, True, False) == {"how subclasses of tensors are asked"}
    torch.set_float32_matmul_precision("highest")
    assert changed(torch.set_float32_matmul_precision, "medium", "highest") == {"the precision of float32"}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_change_is_captured_again_and_comes_back_for_nothing():
    step = compiled()
    built = count_captures(step)
    for _ in range(2):
        with torch.backends.mkldnn.flags(enabled=False):
            step(ROWS)
        step(ROWS)
    assert len(built) == 1
