"""Contestants to compare with fxcomp: plain DDP, its communication hooks, and steps without a network.

A *contestant* owns a fresh copy of the job's model and optimizer, and runs one training step per call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fixed_plans import AT_ONCE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.commands.demo.contest import with_bf16, with_powersgd
from fxcomp.frontends.job import Job
from fxcomp.plan.compress import GivenCompress
from fxcomp.runtime.transport import NullTransport

BASELINES = ("ddp_fp32", "ddp_fp16", "ddp_bf16", "ddp_powersgd")
HOOKS = {"fxcomp_hook": "balanced", "fxcomp_hook_lossy": "lossy"}
FXCOMP = {
    "fxcomp": "balanced",
    "fxcomp_lossless": "lossless",
    "fxcomp_aggressive": "aggressive",
    "fxcomp_lossy": "lossy",
    **HOOKS,
}
"""fxcomp's contestants and their modes: DDP hooks and compiled steps."""
FREE = ("free", "free_emitted")  # eager, and the emitted dense step without transport


@dataclass
class Contestant:
    name: str
    model: nn.Module
    step: Callable[[Any], torch.Tensor]
    plan: object = None
    predicted_ms: float | None = None
    predicted_free_ms: float | None = None
    race: Mapping[str, Any] | None = None
    hook: fxcomp.DdpHook | None = None
    steps_taken: int = 0

    @property
    def is_racing(self) -> bool:
        """True while plans race; only the winner is measured."""
        return self.hook.is_racing if self.hook else isinstance(self.step, fxcomp.CompiledStep) and self.step.is_racing

    def settle(self) -> None:
        if isinstance(self.step, fxcomp.CompiledStep) and self.plan is not None:
            self.plan, self.predicted_ms = self.step.plan, self.step.timeline.step_time_us / 1e3
            self.race = self.step.raced.to_json() if self.step.raced else None
        if self.hook is not None and self.hook.timeline is not None:
            self.plan, self.predicted_ms = self.hook.plan, self.hook.timeline.step_time_us / 1e3

    @property
    def is_synchronised(self) -> bool:
        """True if ranks wait for each other inside the step."""
        return self.name not in FREE

    def next_step(self) -> int:
        self.steps_taken += 1
        return self.steps_taken - 1


def make_contestant(name: str, job: Job, *, plan: object = None) -> Contestant:
    """Build a contestant; every rank calls it, because DDP and fxcomp communicate."""
    if name == "free_emitted":
        return Contestant(name, job.model, _without_transport(job))
    if name in FREE:
        return Contestant(name, job.model, _eager_step(job, job.model))
    if name in BASELINES:
        return Contestant(name, job.model, _eager_step(job, _data_parallel(name, job.model)))
    return _hooked(name, job, plan) if name in HOOKS else _compiled(name, job, plan)


def _data_parallel(name: str, model: nn.Module) -> DistributedDataParallel:
    if name == "ddp_bf16":
        return with_bf16(model)
    if name == "ddp_powersgd":
        return with_powersgd(model)
    parallel = DistributedDataParallel(model)
    if name == "ddp_fp16":
        parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


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
        job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm, compress="dense"
    )
    step.in_force.runtime.transport = NullTransport(step.in_force.runtime.transport)
    return step


def _hooked(name: str, job: Job, plan: Any) -> Contestant:
    parallel = DistributedDataParallel(job.model)
    hook = fxcomp.ddp_hook(compress=FXCOMP[name] if plan is None else plan)
    parallel.register_comm_hook(None, hook)
    return Contestant(name, job.model, _eager_step(job, parallel), hook=hook)


def _asked(mode: str) -> GivenCompress:
    """Return the request for a mode; `aggressive` as in a job of 3,000 steps after the warm-up."""
    return fxcomp.Compress(within=mode, steps=3000, warmup=AT_ONCE) if mode == "aggressive" else mode


def _compiled(name: str, job: Job, plan: Any) -> Contestant:
    step = fxcomp.compile_step(
        job.model,
        job.loss_fn,
        job.optimizer,
        job.batch,
        max_grad_norm=job.max_grad_norm,
        compress=_asked(FXCOMP[name]) if plan is None else plan,
    )
    timeline = step.timeline
    return Contestant(
        name,
        job.model,
        step,
        plan=step.plan,
        predicted_ms=timeline.step_time_us / 1e3,
        predicted_free_ms=step.in_force.decision.workload.free_us / 1e3,
    )
