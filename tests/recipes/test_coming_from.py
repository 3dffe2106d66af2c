"""Each setting of the page for people who come from another library compiles a step, and mistakes are told."""

from __future__ import annotations

import re
from typing import Any

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.recipes import ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.plan.compress import Compress

PAGE = (ROOT / "docs" / "recipes" / "coming_from.md").read_text()
SETTINGS = sorted(set(re.findall(r"\| `compress=(.+?)` \|", PAGE)))
COMPILED_ALONE = ("warmup=", "momentum", "steps=")
"""Parts of settings that need the optimizer, or whole steps."""


def meant(setting: str) -> Any:
    return eval(setting, {"fxcomp": fxcomp})


def test_the_page_has_settings():
    assert len(SETTINGS) >= 15
    assert PAGE.count("`compress=") == 1 + len(re.findall(r"\| `compress=", PAGE))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_can_be_written(setting: str):
    Compress.of(meant(setting))


@pytest.mark.parametrize("setting", [each for each in SETTINGS if not any(text in each for text in COMPILED_ALONE)])
def test_the_hook_takes_what_needs_no_optimizer(setting: str):
    fxcomp.ddp_hook(compress=meant(setting))


@pytest.mark.parametrize("setting", ['fxcomp.Compress(plan="int8", warmup=fxcomp.Warmup(dense_steps=9))'])
def test_the_hook_refuses_what_needs_one(setting: str):
    with pytest.raises(fxcomp.FxcompError, match=r"compile_step"):
        fxcomp.ddp_hook(compress=meant(setting))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def trained() -> list[str]:
    """Take two steps under each setting; return those under which ranks differ."""
    apart = []
    for setting in SETTINGS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
        is_adam = 'at="momentum", warmup=' in setting or "aggressive" in setting
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if is_adam else sgd
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        with fxcomp.compile_step(model, loss_fn, optimizer, batch, compress=meant(setting)) as step:
            for _ in range(2):
                step(batch)
            if "plan=" in setting and "Warmup" not in setting:
                assert not step.plan.is_dense, setting
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine)
        apart += [] if torch.equal(*others) else [setting]
    return apart


@pytest.mark.slow
def test_two_ranks_train_under_each_setting():
    assert run_ranks(2, trained) == [[], []]


def mistakes() -> list[str]:
    said = []

    def told(work: Any) -> None:
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(16, 16))

    def trained(model: nn.Module) -> None:
        for _ in range(8):
            model(torch.ones(4, 16)).square().mean().backward()

    model, batch = wrapped(), torch.ones(4, 16)
    told(lambda: fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch))
    hook = fxcomp.ddp_hook(compress="int8")
    model.register_comm_hook(None, hook)
    told(lambda: model.register_comm_hook(None, fxcomp.ddp_hook(compress="int8")))
    trained(model)
    other = DistributedDataParallel(nn.Linear(8, 16))
    other.register_comm_hook(None, hook)
    told(lambda: other(torch.ones(4, 8)).square().mean().backward())
    told(lambda: fxcomp.compile_step(model.module, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch))
    return said


def test_mistakes_are_told():
    for wrapped, twice, shared, both in run_ranks(2, mistakes):
        assert wrapped.startswith("Unsupported")
        assert "Give compile_step the plain model" in wrapped
        assert "can only be called once" in twice
        assert shared.startswith("Unsupported: this hook serves another model already.")
        assert both == "nothing"
