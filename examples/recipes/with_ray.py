"""Train with Ray Train's TorchTrainer and a compiled step; it goes on from its last checkpoint.

python examples/recipes/with_ray.py storage
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import fxcomp

SAVE_EVERY = 20


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batch_at(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs.sum(1, keepdim=True)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Ray has called init_process_group; `prepare_model` would wrap the model in DDP, so it is left out."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch_at(0, rank), compress=config["compress"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            begun = torch.load(Path(folder) / "model.pt", weights_only=True)
            model.load_state_dict(begun["model"])
            optimizer.load_state_dict(begun["optimizer"])
            mine = Path(folder) / f"step-rank{rank}.pt"
            step.load_state_dict(torch.load(mine, weights_only=True) if mine.exists() else None)
    while step.steps < config["steps"]:
        loss = step(batch_at(step.steps, rank))
        if step.steps % SAVE_EVERY == 0 or step.steps == config["steps"]:
            with tempfile.TemporaryDirectory() as folder:  # every rank reports its files, and Ray puts them together
                if rank == 0:
                    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(whole, Path(folder) / "model.pt")
                torch.save(step.checkpoint(), Path(folder) / f"step-rank{rank}.pt")
                metrics = {"loss": loss.item(), "steps": step.steps}
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    step.close()


def main(storage: str, steps: int, compress: str = "balanced") -> ray.train.Result:
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": steps, "compress": compress},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(Path(storage).resolve())),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100).metrics)
