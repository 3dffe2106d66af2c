"""Train with a Lightning Trainer and its DDPStrategy; it goes on from its last checkpoint.

torchrun --nproc-per-node 2 examples/recipes/with_lightning_ddp.py out
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    """Adds up its inputs, once it has learnt to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, every_n_train_steps=8, save_last="link", save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=steps, max_epochs=-1, gradient_clip_val=1.0,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[saving], logger=False, enable_progress_bar=False,
    )  # fmt: skip
    last = Path(folder) / "last.ckpt"
    trainer.fit(Regression(), batches(), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
