"""Lightning trains with fxcomp's strategy, goes on from its checkpoints bit for bit, and says what is done wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import under_torchrun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

MAIN = """
import sys

import with_lightning as recipe

strategy = recipe.FxcompStrategy
recipe.FxcompStrategy = lambda compress, **options: strategy(compress="powersgd(2)", **options)
recipe.main(sys.argv[1], int(sys.argv[2]))
"""


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.mark.slow
def test_a_trainer_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path):
    """Batches of the first epoch end at step 16, where the second job begins."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    under_torchrun(MAIN, straight, 32)
    under_torchrun(MAIN, resumed, 16)
    under_torchrun(MAIN, resumed, 32)
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
from fxcomp.frontends.lightning import FxcompStrategy

assert issubclass(FxcompStrategy, DDPStrategy)
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


BESIDES = """
import sys, warnings

import torch
import with_lightning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

import fxcomp
from fxcomp.frontends.lightning import FxcompStrategy

warnings.simplefilter("ignore")


class Compiled(with_lightning.Regression):
    automatic_optimization = False

    def on_train_start(self):
        optimizer, batch = self.optimizers(use_pl_optimizer=False), next(iter(self.trainer.train_dataloader))
        self.step = fxcomp.compile_step(self.net, self.loss_of, optimizer, batch)

    def loss_of(self, net, batch):
        return torch.nn.functional.mse_loss(net(batch[0]), batch[1])

    def training_step(self, batch, _):
        self.optimizers().step(lambda: self.step(batch))


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
for kind in (DDPStrategy, FxcompStrategy):
    fit(kind(**gloo), Compiled())
module = with_lightning.Regression()
strategy = FxcompStrategy(compress="int4", **gloo)
trainer = fit(strategy, module)
trainer.save_checkpoint(sys.argv[1] + "/after.ckpt")
if trainer.global_rank == 0:
    print("plan", strategy.hook.plan is not None, flush=True)
again = fit(FxcompStrategy(compress="int4", **gloo), with_lightning.Regression(), sys.argv[1] + "/after.ckpt", 12)
if trainer.global_rank == 0:
    print("went on", again.strategy.hook.plan is not None, again.global_step, flush=True)
"""


@pytest.mark.slow
def test_a_compiled_step_under_a_wrapper_and_a_checkpoint_after_training(tmp_path: Path):
    output = under_torchrun(BESIDES, tmp_path)
    said = [line for line in output.splitlines() if line.startswith("said")]
    assert said == ["said trained"] * 4, "the first two had a wrapper that nothing went through"
    assert "plan True" in output
    assert "went on True 12" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "after.ckpt", "after.ckpt.fxcomp-rank0.pt", "after.ckpt.fxcomp-rank1.pt",
    ]  # fmt: skip
