"""Train a small network on several ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = make()
    model = DistributedDataParallel(model)
    for index in range(200):
        optimizer.zero_grad()
        loss = loss_fn(model, batch_at(index, rank))
        loss.backward()
        optimizer.step()
        if rank == 0 and (index + 1) % 50 == 0:
            print(f"step {index + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
