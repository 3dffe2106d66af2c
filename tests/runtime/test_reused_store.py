"""Ranks that are started again on the store that they had before are told so, before they read old answers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks, try_ranks

import fxcomp
from fxcomp import compat

ELASTIC = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}


def compiled() -> None:
    model = JOBS["mlp"].build()
    fxcomp.compile_step(
        model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), JOBS["mlp"].batch(0), compress="dense"
    )


def second_start() -> None:
    compat.default_store().set(f"process/{dist.get_rank()}", "the process before")
    compiled()


def test_the_second_start_on_a_store_is_refused():
    for outcome in try_ranks(2, second_start):
        assert outcome.error == "RanksApart", outcome.trace
        assert "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in outcome.text


def twice() -> None:
    compiled()
    compiled()


def test_one_process_compiles_as_often_as_it_likes():
    run_ranks(2, twice)


def test_a_store_that_outlives_restarts_is_noticed_at_the_first_start(monkeypatch: pytest.MonkeyPatch):
    for name in (*ELASTIC, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert not compat.outlives_restarts()
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    assert compat.outlives_restarts() == "torchrun --max-restarts"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not compat.outlives_restarts()
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert not compat.outlives_restarts()
