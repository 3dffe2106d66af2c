"""The communication hooks that DistributedDataParallel offers, for comparison."""

# DDP reads a hook's annotations, so this file must not postpone them.
# Much of torch has no types of its own, or not those that it has:
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWERSGD_RANK = 4
POWERSGD_STARTS = 2  # steps; the least that the hook takes with error feedback
_ONE_BUCKET_MB = 1000


def with_bf16(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model so that gradients travel as bf16."""
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, bf16_hook)
    return parallel


def with_powersgd(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model so that matrices travel as products of two thin ones.

    With two PowerSGD buckets in flight gloo's threads wait for each other for ever, so there is one.
    """
    parallel = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_STARTS)
    parallel.register_comm_hook(state, powerSGD_hook)
    return parallel


def bf16_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what torch's bf16_compress_hook does, which refuses gloo although gloo can add bf16."""
    payload = bucket.buffer().div(dist.get_world_size()).to(torch.bfloat16)

    def decompress(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return bucket.buffer().copy_(future.value()[0])

    work = cast(dist.Work, dist.all_reduce(payload, async_op=True))
    return work.get_future().then(decompress)
