"""Train a small network on several ranks."""

import torch
import torch.distributed as dist
from torch import nn

import fxcomp

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batch_at(step: int, rank: int) -> Batch:
    inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs[:, :8].sum(1, keepdim=True)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def job() -> fxcomp.Job:
    model, optimizer = make()
    return fxcomp.Job(model, loss_fn, optimizer, batch_at(0, 0))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = make()
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch_at(0, rank))
    for index in range(200):
        loss = step(batch_at(index, rank))
        if rank == 0 and (index + 1) % 50 == 0:
            print(f"step {index + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
