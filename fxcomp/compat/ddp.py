"""DistributedDataParallel: the wrapper that a bucket's parameters belong to."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
"""The argument of a communication hook."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model under DistributedDataParallel."""

    module: nn.Module
    """The model inside."""
    group: Any
    """The ranks that it averages over."""
    finds_unused: bool
    """Parameters may go without a gradient in some passes."""


def wrapper_of(parameter: Tensor, given: object) -> Wrapper | None:
    """Find the wrapper that reduces a parameter's gradient. torch hands its hooks buckets, and not whose they are.

    `given` is a wrapper that somebody named, or anything else.
    """
    if isinstance(given, DistributedDataParallel):
        return _described(given)
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and any(p is parameter for p in each.parameters()):
            return _described(each)
    return None


def _described(wrapper: Any) -> Wrapper:
    finds_unused = bool(wrapper.find_unused_parameters) and not wrapper.static_graph
    return Wrapper(wrapper.module, wrapper.process_group, finds_unused)
