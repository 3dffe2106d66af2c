"""Lightning trains with fxcomp's strategies, goes on from its checkpoints bit for bit, and says what is done wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import under_torchrun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

MAIN = """
import functools, sys

import fxcomp, {recipe} as recipe

fxcomp.compile_step = functools.partial(fxcomp.compile_step, compress={plan!r})
if hasattr(recipe, "FxcompStrategy"):
    strategy = recipe.FxcompStrategy
    recipe.FxcompStrategy = lambda compress, **options: strategy(compress={plan!r}, **options)
recipe.main(sys.argv[1], int(sys.argv[2]))
"""


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["with_lightning", "with_lightning_compiled"])
def test_a_trainer_goes_on_from_its_checkpoint_bit_for_bit(recipe: str, tmp_path: Path):
    """Batches of the first epoch end at step 16, where the second job begins."""
    script = MAIN.format(recipe=recipe, plan="powersgd(2)")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    under_torchrun(script, straight, 32)
    under_torchrun(script, resumed, 16)
    under_torchrun(script, resumed, 32)
    for folder in (straight, resumed):
        kept = sorted(path.name for path in folder.iterdir())
        assert len(kept) == 7, "two checkpoints, two ranks' files of each, and the link; older ones are gone"
    one, other = (read(folder / "last.ckpt") for folder in (straight, resumed))
    assert one["global_step"] == other["global_step"] == 32
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    for rank in range(2):
        [one], [other] = (list(folder.glob(f"*step=32.ckpt.fxcomp-rank{rank}.pt")) for folder in (straight, resumed))
        before, after = read(one), read(other)
        assert any("residuals" in name for name in before)
        # a hook counts passes since the start, and Lightning draws when it begins with a loader
        others = (f"rank{rank}.about", f"rank{rank}.generators.cpu")
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items() if name not in others)


BY_NAME = """
import {name}
from {name} import Trainer
from {name}.strategies import DDPStrategy

import fxcomp
from fxcomp.frontends.lightning import CompiledStrategy, FxcompStrategy

assert issubclass(FxcompStrategy, DDPStrategy) and issubclass(CompiledStrategy, DDPStrategy)
try:
    FxcompStrategy(ddp_comm_hook=fxcomp.ddp_hook())
except fxcomp.FxcompError as error:
    print(error)
try:
    FxcompStrategy(compress="int5")
except fxcomp.FxcompError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_strategy_is_of_the_library_that_the_script_imports(name: str):
    output = under_torchrun(BY_NAME.format(name=name), ranks=1)
    assert "FxcompStrategy registers a hook of its own; ddp_comm_hook= would be another one." in output
    assert "int5" in output


MISTAKES = """
import sys, warnings

import torch
import with_lightning, with_lightning_compiled
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

import fxcomp
from fxcomp.frontends.lightning import CompiledStrategy, FxcompStrategy

warnings.simplefilter("ignore")


def fit(strategy, module, folder=None, steps=9):
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=steps, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )
    try:
        trainer.fit(module, with_lightning.batches(), ckpt_path=folder)
    except Exception as error:
        trainer.said = f"{type(error).__name__}: {error}"
    else:
        trainer.said = "trained"
    if trainer.global_rank == 0:
        print("said", str(trainer.said).replace(chr(10), " "), flush=True)
    return trainer


gloo = dict(process_group_backend="gloo")
fit(CompiledStrategy(**gloo), with_lightning.Regression())
fit(FxcompStrategy(**gloo), with_lightning_compiled.Regression())
module = with_lightning.Regression()
strategy = FxcompStrategy(compress="int4", **gloo)
trainer = fit(strategy, module)
trainer.save_checkpoint(sys.argv[1] + "/after.ckpt")
if trainer.global_rank == 0:
    print("plan", strategy.kept.plan is not None, flush=True)
again = fit(FxcompStrategy(compress="int4", **gloo), with_lightning.Regression(), sys.argv[1] + "/after.ckpt", 12)
if trainer.global_rank == 0:
    print("went on", again.strategy.kept.plan is not None, again.global_step, flush=True)
"""


@pytest.mark.slow
def test_mistakes_and_a_checkpoint_after_training(tmp_path: Path):
    output = under_torchrun(MISTAKES, tmp_path)
    said = [line for line in output.splitlines() if line.startswith("said")]
    assert said[0].startswith("said BadOption: under CompiledStrategy nobody averages gradients but a compiled step")
    assert said[1:] == ["said trained"] * 3, "the second one had a wrapper that nothing went through"
    assert "plan True" in output
    assert "went on True 12" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "after.ckpt", "after.ckpt.fxcomp-rank0.pt", "after.ckpt.fxcomp-rank1.pt",
    ]  # fmt: skip
