"""A 14.3 M parameter GPT that learns Python from Python's own standard library.

    fxcomp explain examples/gpt.py:job --cluster 2x1 --inter 1gbit
    python examples/gpt.py                    # trains on one rank; under torchrun, on all of them

The model is in `fxcomp/commands/demo/gpt.py`, because the demo and the benchmark train it too.
"""

import os

import torch.distributed as dist

import fxcomp
from fxcomp.commands.demo.gpt import gpt_job as job


def main(steps: int = 100) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    gpt = job()
    step = fxcomp.compile_step(gpt.model, gpt.loss_fn, gpt.optimizer, gpt.batch, max_grad_norm=gpt.max_grad_norm)
    for index in range(steps):
        loss = step(gpt.batch_at(index, rank))
        if rank == 0 and index % 10 == 0:
            print(f"step {index:4}  loss {loss.item():.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
