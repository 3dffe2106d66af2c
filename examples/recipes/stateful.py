"""Train with fxcomp and save with `dcp.async_save`: steps go on while a checkpoint is written.

torchrun --nproc-per-node 2 examples/recipes/stateful.py checkpoints
"""

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import fxcomp

SAVE_EVERY = 20


class AppState(Stateful):
    """The model and its optimizer, as `torch.distributed.checkpoint` saves and loads them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batch_at(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs.sum(1, keepdim=True)


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint: the file .metadata is written when everything else is there."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main(folder: Path, steps: int, compress: str = "balanced") -> nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch_at(0, rank), compress=compress)
    torch.manual_seed(rank)
    app, path = AppState(model, optimizer), newest(folder)
    if path is not None:
        dcp.load({"app": app}, checkpoint_id=path)
        step.load_state_dict(fxcomp.read_checkpoint(path))  # not in AppState: its sizes are known to the file alone
    writers = dist.new_group(backend="gloo")  # for the thread that writes: the loop's own group is in use meanwhile
    saving: Future[Any] | None = None
    while step.steps < steps:
        loss = step(batch_at(step.steps, rank))
        if step.steps % SAVE_EVERY == 0 or step.steps == steps:
            if saving is not None:
                saving.result()  # one at a time; an error of the one before is raised here
            parts = {"app": app, "step": step.checkpoint()}
            saving = dcp.async_save(parts, checkpoint_id=folder / f"step-{step.steps}", process_group=writers)
            if rank == 0:
                print(f"step {step.steps}: loss {loss.item():.4f}", flush=True)
    if saving is not None:
        saving.result()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    dist.destroy_process_group()
