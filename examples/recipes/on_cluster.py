"""Train where a scheduler starts, stops and restarts jobs: by slurm.sh, kubernetes.yaml, torchx or torchrun.

torchrun --nproc-per-node 2 -m fxcomp calibrate -o costs.json
torchrun --nproc-per-node 2 examples/recipes/on_cluster.py checkpoints costs.json
"""

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain import batch_at, loss_fn, newest, on_any_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxcomp

SAVE_EVERY = 50
AGAIN = 75
"""The exit status of a job that was preempted: start it again."""


def main(folder: Path, costs: str | None, steps: int) -> bool:
    """Train from the newest checkpoint on; True at the end, False where a signal came before."""
    rank, found = dist.get_rank(), newest(folder)
    saved = fxcomp.read_checkpoint(found[1]) if found is not None else {}
    compress: list[Any] = [fxcomp.saved_plan(saved) or "balanced"]
    dist.broadcast_object_list(compress)  # a rank that is new has no saved plan
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = fxcomp.compile_step(model, loss_fn, optimizer, batch_at(0, rank), costs=costs, compress=compress[0])
    torch.manual_seed(rank)
    if found is not None:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=found[1])
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        step.load_state_dict(saved)
    preempted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: preempted.set())
    while step.steps < steps:
        loss = step(batch_at(step.steps, rank))
        stops = on_any_rank(preempted.is_set())
        if stops or step.steps % SAVE_EVERY == 0 or step.steps == steps:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            parts["step"] = step.checkpoint()
            dcp.save(parts, checkpoint_id=folder / f"step-{step.steps}")
            if rank == 0:
                print(f"step {step.steps}: loss {loss.item():.4f}, saved", flush=True)
        if stops:
            break
    return step.steps >= steps


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" on GPUs, with torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    costs = sys.argv[2] if len(sys.argv) > 2 else None
    is_done = main(Path(sys.argv[1]), costs, int(sys.argv[3]) if len(sys.argv) > 3 else 200)
    dist.destroy_process_group()
    sys.exit(0 if is_done else AGAIN)
