"""Train a sharded model in torchtitan's shape: replicas are averaged by a plan, and saved by DCP.

torchrun --nproc-per-node 4 examples/recipes/hsdp.py checkpoints
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxcomp

SAVE_EVERY = 20


class Model(nn.Module):
    """Blocks that add to what goes through, and a head."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def parallelize(model: Model, mesh: DeviceMesh, compress: str) -> fxcomp.ReplicaAverage:
    """Shard within a replica, and average replicas by a plan; the order is torchtitan's."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])  # not the mesh of two dimensions: it would average replicas dense
    return fxcomp.average_replicas(model, mesh["replicate"], compress=compress)


def batches(start: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for index in range(start, sys.maxsize):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(index * 1000 + rank))
        yield inputs, inputs.sum(1, keepdim=True)


def newest(folder: Path) -> tuple[int, Path] | None:
    """The last whole checkpoint: the file .metadata is written when everything else is there."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(((int(path.name.removeprefix("step-")), path) for path in whole), default=None)


def main(folder: Path, steps: int, compress: str = "balanced") -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Model()
    outer = parallelize(model, mesh, compress)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    first, found = 0, newest(folder)
    if found is not None:
        first, path = found
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        parts["scheduler"] = scheduler.state_dict()
        dcp.load(parts, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        scheduler.load_state_dict(parts["scheduler"])
        outer.load_state_dict(fxcomp.read_checkpoint(path, under="replicas"))
    for index, (inputs, targets) in zip(range(first, steps), batches(first, dist.get_rank()), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (index + 1) % SAVE_EVERY == 0 or index + 1 == steps:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            parts |= {"scheduler": scheduler.state_dict(), "replicas": outer.checkpoint()}
            dcp.save(parts, checkpoint_id=folder / f"step-{index + 1}")
            if dist.get_rank() == 0:
                print(f"step {index + 1}: loss {loss.item():.4f}", flush=True)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    dist.destroy_process_group()
