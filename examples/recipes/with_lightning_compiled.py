"""Train with a Lightning Trainer and a step that fxcomp has compiled; it goes on from its last checkpoint.

torchrun --nproc-per-node 2 examples/recipes/with_lightning_compiled.py out
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxcomp
from fxcomp.frontends.lightning import CompiledStrategy


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


class Regression(LightningModule):
    """Adds up its inputs, once it has learnt to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def on_train_start(self) -> None:
        optimizer, batch = self.optimizers(use_pl_optimizer=False), next(iter(self.trainer.train_dataloader))
        self.step = fxcomp.compile_step(self.net, loss_fn, optimizer, batch, max_grad_norm=1.0)
        self.trainer.strategy.keep(self.step)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        # Lightning counts the step; its optimizer finds no gradients, and updates nothing
        loss = self.optimizers().step(lambda: self.step(batch))
        self.log("loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, every_n_train_steps=8, save_last="link", save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=steps, max_epochs=-1,
        strategy=CompiledStrategy(process_group_backend="gloo"),
        callbacks=[saving], logger=False, enable_progress_bar=False,
    )  # fmt: skip
    last = Path(folder) / "last.ckpt"
    trainer.fit(Regression(), batches(), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
