"""The smallest job: a perceptron that learns to add up its inputs.

Copy this to describe a model of your own.

    fxcomp explain examples/mlp.py:job --cluster 2x1 --inter 1gbit
"""

import torch
from torch import nn

from fxcomp.frontends.job import Job

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def next_batch(step: int, rank: int) -> Batch:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs.sum(1, keepdim=True)


def job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Job(model, loss_fn, optimizer, next_batch(0, 0), next_batch=next_batch)
