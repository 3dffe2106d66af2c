"""One rank of the demo: train with DDP, with fxcomp, and without communication, in turns.

All three take turns in the same processes, so that a machine that drifts drifts for all. The third shows what a step
would cost without a network. `run.py` starts it as a module of its own; rank 0 prints lines for it.
"""

# Much of torch has no types of its own:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxcomp.commands.demo.gpt import gpt_job, training_text, validation_loss
from fxcomp.commands.demo.launch_ranks import join
from fxcomp.commands.demo.result import Contestant
from fxcomp.commands.demo.run import MARK
from fxcomp.commands.demo.shaped_hosts import sent_by_this_host
from fxcomp.frontends.compile_step import compile_step
from fxcomp.frontends.job import Job
from fxcomp.step.compiled_step import CompiledStep

MODE = "balanced"
WARM_UP_STEPS = 2  # counted as training, not as time
BLOCK_STEPS = 2  # of one contestant, before the next has its turn
LOSS_STEPS = 10  # the train loss is the mean of the last ones

Step = Callable[[Any], torch.Tensor]


def main(steps: int) -> None:
    """Train all contestants in turns; rank 0 tells the parent."""
    join()
    rank, interface = dist.get_rank(), os.environ["GLOO_SOCKET_IFNAME"]
    jobs = {name: gpt_job() for name in ("ddp", "fxcomp", "free")}
    _tell(rank, note="fxcomp measures the link and plans")
    compiled = _compile(jobs["fxcomp"])
    take: dict[str, Step] = {
        "ddp": _eager_step(jobs["ddp"], DistributedDataParallel(jobs["ddp"].model)),
        "fxcomp": compiled,
        "free": _eager_step(jobs["free"], jobs["free"].model),
    }
    contestants = {name: Contestant(name) for name in take}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in take}
    sent = dict.fromkeys(take, 0)
    total = WARM_UP_STEPS + steps
    for first in range(0, total, BLOCK_STEPS):
        order = list(take)
        random.Random(first).shuffle(order)
        for name in order:
            dist.barrier()
            before = sent_by_this_host(interface)
            for step in range(first, min(first + BLOCK_STEPS, total)):
                _tell(rank, note=f"step {step + 1} of {total}: {name}")
                batch = jobs[name].batch_at(step, rank)
                if name == "free":
                    dist.barrier()  # nothing in its step makes the ranks wait for each other
                start = time.perf_counter()
                losses[name].append(take[name](batch))
                contestants[name].step_s.append(time.perf_counter() - start)
            sent[name] += sent_by_this_host(interface) - before
    _tell(rank, note="validating")
    for name, each in contestants.items():
        slowest = torch.tensor(each.step_s[WARM_UP_STEPS:])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        each.step_s = cast("list[float]", slowest.tolist())
        senders = dist.get_world_size() if interface == "lo" else 1  # on loopback all ranks are one host
        each.wire_bytes = sent[name] // total // senders
        if name != "free":  # its ranks have drifted apart, so it has no loss to speak of
            recent = torch.stack([loss.detach() for loss in losses[name][-LOSS_STEPS:]]).mean()
            dist.all_reduce(recent)
            each.train_loss = recent.item() / dist.get_world_size()
            each.validation_loss = validation_loss(jobs[name].model, training_text())
    contestants["fxcomp"].exposed_ms = compiled.exposed_ms
    _tell(rank, contestants=[asdict(each) for each in contestants.values()])
    dist.destroy_process_group()


def _compile(job: Job) -> CompiledStep:
    return compile_step(job.model, job.loss_fn, job.optimizer, job.batch, mode=MODE, max_grad_norm=job.max_grad_norm)


def _eager_step(job: Job, model: nn.Module) -> Step:
    def step(batch: Any) -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss_fn(model, batch)
        loss.backward()
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm)
        job.optimizer.step()
        return loss

    return step


def _tell(rank: int, **content: object) -> None:
    if rank == 0:
        print(MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
