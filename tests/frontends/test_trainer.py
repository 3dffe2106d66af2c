"""The callback for a trainer's library hands over what the library has made."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fxcomp.frontends import trainer as under_test


class Wrapped:
    """A model in the wrapper."""

    def register_comm_hook(self, _: object, hook: Any) -> None:
        self.hook = hook


def hook_options(monkeypatch: pytest.MonkeyPatch, scaler: Any, **options: Any) -> dict[str, Any]:
    """The options with which the callback makes a hook, for a trainer whose library has made this scaler."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(under_test, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(under_test, "ddp_hook", lambda **given: made.update(given))
    trainer = SimpleNamespace(model_wrapped=Wrapped(), accelerator=SimpleNamespace(scaler=scaler))
    under_test.FxcompCallback(trainer, **options).on_train_begin(None, SimpleNamespace(global_step=0))
    return made


def test_the_trainers_scaler_is_handed_over(monkeypatch: pytest.MonkeyPatch):
    scaler = torch.amp.GradScaler("cpu")
    made = hook_options(monkeypatch, scaler, compress="lossless")
    assert made == {"scaler": scaler, "compress": "lossless", "cluster": None, "costs": None}


def test_without_loss_scaling_there_is_none(monkeypatch: pytest.MonkeyPatch):
    assert hook_options(monkeypatch, None)["scaler"] is None


@pytest.mark.parametrize("gone", ["transformers", "safetensors"])
def test_without_its_libraries_the_callback_says_how_to_get_them(gone: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.setitem(sys.modules, f"{gone}.torch", None)
    spec = importlib.util.spec_from_file_location("trainer_again", under_test.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"(?s)FxcompCallback needs {gone}.*pip install 'fxcomp\[trainer\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
