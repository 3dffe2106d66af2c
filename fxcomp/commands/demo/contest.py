"""One rank of the demo: train with DDP, its hooks, fxcomp, and without communication.

Contestants take turns in the same processes, so that changes of the machine's speed affect all alike.
"""

# DDP reads a hook's annotations, so this file must not postpone them. Types of torch are incomplete:
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fxcomp.commands.demo.gpt import GPTConfig, gpt_job, training_text, validation_loss
from fxcomp.commands.demo.launch_ranks import join
from fxcomp.commands.demo.run import BLOCK_STEPS, DDP, FREE, FXCOMP, LABELS, MARK, Contestant
from fxcomp.commands.demo.shaped_hosts import sent_by_this_host
from fxcomp.frontends.compile_step import compile_step
from fxcomp.frontends.job import Job, compile_arguments
from fxcomp.options import Checks
from fxcomp.plan.plan import Plan
from fxcomp.report.document import count, short

POWERSGD_RANK = 4
POWERSGD_STARTS = 2  # steps; the hook's minimum with error feedback
_ONE_BUCKET_MB = 1000


def with_bf16(model: nn.Module) -> DistributedDataParallel:
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, bf16_hook)
    return parallel


def with_powersgd(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model with PowerSGD, in one bucket: with two buckets in flight, gloo's threads deadlock."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_STARTS)
    parallel.register_comm_hook(state, powerSGD_hook)
    return parallel


def bf16_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bf16. torch's bf16_compress_hook raises with gloo, although gloo can add bf16."""
    payload = bucket.buffer().div(dist.get_world_size()).to(torch.bfloat16)

    def decompress(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return bucket.buffer().copy_(future.value()[0])

    work = cast(dist.Work, dist.all_reduce(payload, async_op=True))
    return work.get_future().then(decompress)


CONFIG = GPTConfig(layers=4, heads=5, width=320)  # 5.1 M parameters, small enough for the time budget
WARM_UP_STEPS = 4  # whole blocks, not measured, because hooks start late and DDP rebuilds its buckets
LOSS_STEPS = 10  # last steps, whose mean is the train loss
LEAST_BLOCKS = 4

Step = Callable[[Any], torch.Tensor]


def main(steps: int, budget_s: float) -> None:
    """Train all contestants in turns, for `steps` measured steps each. Rank 0 reports to the parent process.

    In a round, each contestant runs `BLOCK_STEPS` steps. After `budget_s` seconds, no round begins once `LEAST_BLOCKS`
    are measured.
    """
    until = time.monotonic() + budget_s
    join()
    rank = dist.get_rank()
    jobs = {name: gpt_job(CONFIG) for name in LABELS}
    size = sum(parameter.numel() for parameter in jobs[FXCOMP].model.parameters())
    _tell(rank, parameters=size, note="fxcomp captures the step, measures the machine and the link, and plans")
    # A race would last longer than the demo.
    compiled = compile_step(**compile_arguments(jobs[FXCOMP]), checks=Checks(race="off"))
    wrapped: dict[str, Callable[[nn.Module], nn.Module]] = {
        DDP: DistributedDataParallel,
        "bf16_hook": with_bf16,
        "powersgd_hook": with_powersgd,
        FREE: lambda model: model,
    }
    steps_of: dict[str, Step] = {
        name: _eager_step(jobs[name], wrap(jobs[name].model)) for name, wrap in wrapped.items()
    } | {FXCOMP: compiled}
    contestants = [Contestant(name) for name in LABELS]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in LABELS}
    total = WARM_UP_STEPS + steps
    for first in range(0, total, BLOCK_STEPS):
        for each in random.Random(first).sample(contestants, len(contestants)):
            _tell(rank, note=f"step {first + 1} of {total}: {LABELS[each.name]}")
            block = range(first, min(first + BLOCK_STEPS, total))
            _take(each, jobs[each.name], steps_of[each.name], losses[each.name], block)
        if first >= WARM_UP_STEPS + BLOCK_STEPS * (LEAST_BLOCKS - 1) and _time_is_up(until):
            break
    _tell(rank, note="validating")
    for each in contestants:
        _finish(each, jobs[each.name], losses[each.name])
    _tell(rank, contestants=list(map(asdict, contestants)), plan=_summary(compiled.plan))
    steps_of.clear()  # DDP would end gloo's threads while it holds the GIL, which they may wait for (torch 2.13)
    dist.destroy_process_group()


def _take(each: Contestant, job: Job, step: Step, losses: list[torch.Tensor], steps: range) -> None:
    """Run a block of steps. After the warm-up, also count the bytes that this host sends."""
    dist.barrier()
    before = sent_by_this_host(_interface())
    for number in steps:
        batch = job.batch_at(number, dist.get_rank())
        if each.name == FREE:
            dist.barrier()  # its step does not synchronize ranks
        start = time.perf_counter()
        losses.append(step(batch).detach())
        each.step_s.append(time.perf_counter() - start)
    if steps.start >= WARM_UP_STEPS:
        each.wire_bytes += sent_by_this_host(_interface()) - before


def _finish(each: Contestant, job: Job, losses: Sequence[torch.Tensor]) -> None:
    slowest = torch.tensor(each.step_s[WARM_UP_STEPS:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    each.step_s = cast("list[float]", slowest.tolist())
    senders = dist.get_world_size() if _interface() == "lo" else 1  # on loopback, all ranks are one host
    each.wire_bytes = each.wire_bytes // len(each.step_s) // senders
    if each.name == FREE:  # its replicas differ, so its loss means nothing
        return
    recent = torch.stack(list(losses[-LOSS_STEPS:])).mean()
    dist.all_reduce(recent)
    each.train_loss = recent.item() / dist.get_world_size()
    each.validation_loss = validation_loss(job.model, training_text())


def _interface() -> str:
    return os.environ["GLOO_SOCKET_IFNAME"]


def _summary(plan: Plan) -> str:
    """Return each strategy's share of gradient elements: `96.0 % int4, 4.0 % dense, in 5 buckets`."""
    elements = Counter[str]()
    for bucket in plan.buckets:
        elements[short(bucket.strategy)] += bucket.elements
    shares = [f"{100 * size / elements.total():.1f} % {name}" for name, size in elements.most_common()]
    return f"{', '.join(shares)}, in {count(len(plan.buckets), 'bucket')}"


def _eager_step(job: Job, model: nn.Module) -> Step:
    optimizer = cast(torch.optim.Optimizer, job.optimizer)
    assert job.max_grad_norm is not None, "the GPT's job clips by norm"

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = job.loss_fn(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm or 0.0)
        optimizer.step()
        return loss

    return step


def _time_is_up(until: float) -> bool:
    """Return True on all ranks if rank 0's clock is past `until`, so that all ranks stop after the same step."""
    is_up = torch.tensor([float(time.monotonic() > until)])
    dist.broadcast(is_up, src=0)
    return bool(is_up.item())


def _tell(rank: int, **content: object) -> None:
    if rank == 0:
        print(MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
