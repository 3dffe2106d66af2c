"""The callback for a trainer's library hands over what the library has made."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from fxcomp.frontends import trainer as under_test


class Wrapped:
    """A model in the wrapper."""

    def register_comm_hook(self, _: object, hook: Any) -> None:
        self.hook = hook


class Hook:
    """A hook with some metrics."""

    def __init__(self, **metrics: Any) -> None:
        self._metrics = metrics

    def metrics(self, *, residuals: bool) -> dict[str, Any]:
        return {**self._metrics, "residual_norm": 0.5} if residuals else self._metrics


class Writer(TrainerCallback):
    """A writer of logs, as the library's own for TensorBoard."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        self.written.append(dict(logs))


def trainer_of(scaler: Any = None, *callbacks: Any) -> Any:
    handler = CallbackHandler(list(callbacks), *[None] * 4)
    return SimpleNamespace(
        model_wrapped=Wrapped(), accelerator=SimpleNamespace(scaler=scaler), callback_handler=handler
    )


def hook_options(monkeypatch: pytest.MonkeyPatch, scaler: Any, **options: Any) -> dict[str, Any]:
    """The options with which the callback makes a hook, for a trainer whose library has made this scaler."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(under_test, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(under_test, "ddp_hook", lambda **given: made.update(given))
    trainer = trainer_of(scaler)
    under_test.FxcompCallback(trainer, **options).on_train_begin(None, SimpleNamespace(global_step=0))
    return made


def test_the_trainers_scaler_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    scaler = torch.amp.GradScaler("cpu")
    made = hook_options(monkeypatch, scaler, compress="lossless")
    assert made == {"scaler": scaler, "compress": "lossless", "cluster": None, "costs": None}


def test_without_loss_scaling_there_is_none(monkeypatch: pytest.MonkeyPatch):
    assert hook_options(monkeypatch, None)["scaler"] is None


def logged(monkeypatch: pytest.MonkeyPatch, hook: Any, logs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log as a trainer does, whose writer was there before the callback: what the writer and the history get."""
    monkeypatch.setattr(under_test, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(under_test, "ddp_hook", lambda **_: hook)
    writer = Writer()
    trainer = trainer_of(None, writer)
    callback, state, handler = under_test.FxcompCallback(trainer), TrainerState(), trainer.callback_handler
    handler.add_callback(callback)
    control = TrainerControl()
    handler.on_train_begin(None, state, control)
    state.global_step = 7
    state.log_history.append({**logs, "step": 7})
    handler.on_log(None, state, control, logs)
    return writer.written[0], state.log_history[0]


def test_logs_of_training_get_the_hooks_metrics_before_they_are_written(monkeypatch: pytest.MonkeyPatch):
    hook = Hook(sent_mb=1.5, ratio=float("nan"), plan="0123")
    written, history = logged(monkeypatch, hook, {"loss": 2.0})
    assert written == {"loss": 2.0, "fxcomp/sent_mb": 1.5, "fxcomp/residual_norm": 0.5}
    assert history == {**written, "step": 7}


def test_logs_of_an_evaluation_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    written, history = logged(monkeypatch, Hook(sent_mb=1.5), {"eval_loss": 2.0})
    assert (written, history) == ({"eval_loss": 2.0}, {"eval_loss": 2.0, "step": 7})


@pytest.mark.parametrize("gone", ["transformers", "safetensors"])
def test_without_its_libraries_the_callback_says_how_to_get_them(gone: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.setitem(sys.modules, f"{gone}.torch", None)
    spec = importlib.util.spec_from_file_location("trainer_again", under_test.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"(?s)FxcompCallback needs {gone}.*pip install 'fxcomp\[trainer\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
