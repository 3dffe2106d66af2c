"""What fxcomp is compared with: plain data parallelism, its communication hooks, and no network at all.

A *contestant* owns a fresh copy of the job's model and optimizer, and makes one training step when called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.frontends.job import Job
from fxcomp.runtime.transport import NullTransport

BASELINES = ("ddp_fp32", "ddp_fp16", "ddp_bf16", "ddp_powersgd")
FXCOMP = {"fxcomp": "balanced", "fxcomp_lossless": "lossless", "fxcomp_aggressive": "aggressive"}  # and their modes
FREE = ("free", "free_emitted")  # steps without a network: eager, and the emitted dense one without transport


@dataclass
class Contestant:
    """Something that trains its own model. What nobody predicted or planned is None."""

    name: str
    model: nn.Module
    step: Callable[[Any], torch.Tensor]
    plan: object = None
    predicted_ms: float | None = None
    predicted_free_ms: float | None = None
    steps_taken: int = 0

    @property
    def is_synchronised(self) -> bool:
        """Whether ranks wait for each other inside the step."""
        return self.name not in FREE

    def next_step(self) -> int:
        """Count a step, and return its number."""
        self.steps_taken += 1
        return self.steps_taken - 1


def make_contestant(name: str, job: Job, *, plan: object = None) -> Contestant:
    """Build a contestant on every rank at once: DDP and fxcomp communicate while they are built."""
    if name == "free_emitted":
        return Contestant(name, job.model, _without_transport(job))
    if name in FREE:
        return Contestant(name, job.model, _eager_step(job, job.model))
    if name in BASELINES:
        return Contestant(name, job.model, _eager_step(job, _data_parallel(name, job.model)))
    return _compiled(name, job, plan)


def _data_parallel(name: str, model: nn.Module) -> DistributedDataParallel:
    # With two PowerSGD buckets in flight gloo's threads wait for each other for ever, so it gets one.
    parallel = DistributedDataParallel(model, bucket_cap_mb=1000 if name == "ddp_powersgd" else 25)
    if name == "ddp_fp16":
        parallel.register_comm_hook(None, fp16_compress_hook)
    elif name == "ddp_bf16":
        parallel.register_comm_hook(None, _bf16_hook)
    elif name == "ddp_powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook)
    return parallel


# DDP reads a hook's annotations, so this file must not postpone them.
def _bf16_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook, which refuses gloo although gloo can add bf16."""
    payload = bucket.buffer().div(dist.get_world_size()).to(torch.bfloat16)

    def decompress(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(payload, async_op=True).get_future().then(decompress)


def _eager_step(job: Job, model: nn.Module) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        job.optimizer.zero_grad(set_to_none=True)
        loss = job.loss_fn(model, batch)
        loss.backward()
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm)
        job.optimizer.step()
        return loss.detach()

    return step


def _without_transport(job: Job) -> Callable[[Any], torch.Tensor]:
    step = fxcomp.compile_step(
        job.model, job.loss_fn, job.optimizer, job.batch, plan="dense", max_grad_norm=job.max_grad_norm
    )
    step.in_force.runtime.transport = NullTransport(step.in_force.runtime.transport)
    return step


def _compiled(name: str, job: Job, plan: Any) -> Contestant:
    step = fxcomp.compile_step(
        job.model,
        job.loss_fn,
        job.optimizer,
        job.batch,
        plan=plan,
        mode=FXCOMP[name],
        max_grad_norm=job.max_grad_norm,
    )
    timeline = step.timeline
    return Contestant(
        name,
        job.model,
        step,
        plan=step.plan,
        predicted_ms=timeline.step_time_us / 1e3,
        predicted_free_ms=step.predicted_free_ms,
    )
