"""Train with DistributedDataParallel; a job that is preempted or dies goes on from its newest checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each start gets a store of its own
torchrun --nproc-per-node 2 --max-restarts 3 examples/recipes/plain_ddp.py checkpoints
"""

import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 50
AGAIN = 75  # exit status of a rank that is stopped: after 0, torchrun takes the job for finished


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def batch_at(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return inputs, inputs.sum(1, keepdim=True)


def newest(folder: Path) -> tuple[int, Path] | None:
    """The last whole checkpoint: the file .metadata is written when everything else is there."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(((int(path.name.removeprefix("step-")), path) for path in whole), default=None)


def on_any_rank(mine: bool) -> bool:
    """A signal comes to ranks at different steps: they agree to stop after the same one."""
    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def main(folder: Path, steps: int) -> nn.Module:
    rank, first = dist.get_rank(), 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(rank)  # every rank has dropout of its own
    parts, found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), newest(folder)
    if found is not None:
        first, path = found
        dcp.load(parts, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    preempted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: preempted.set())
    for index in range(first, steps):
        optimizer.zero_grad()
        loss = loss_fn(ddp, batch_at(index, rank))
        loss.backward()
        optimizer.step()
        stops = on_any_rank(preempted.is_set())
        if stops or (index + 1) % SAVE_EVERY == 0 or index + 1 == steps:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(parts, checkpoint_id=folder / f"step-{index + 1}")
            if rank == 0:
                print(f"step {index + 1}: loss {loss.item():.4f}, saved", flush=True)
        if stops and index + 1 < steps:
            sys.exit(AGAIN)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    dist.destroy_process_group()
