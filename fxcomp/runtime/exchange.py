"""Run a collective that the loss function itself asks for, such as the all_gather of a contrastive loss.

Eager code has tensors filled in place. Here `sent` goes out, and what comes back is new, one tensor for each that eager
code would have filled; `received` says their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import StepChanged


class ExchangeKind(Enum):
    """A collective of torch.distributed, in its spelling."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"  # into a list
    ALL_GATHER_SINGLE = "all_gather_single"  # into one tensor
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_SINGLE = "reduce_scatter_single"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    BARRIER = "barrier"


IN_PLACE = (ExchangeKind.ALL_REDUCE, ExchangeKind.BROADCAST, ExchangeKind.REDUCE)
"""Collectives that overwrite what is sent."""


def filled(kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Sequence[Tensor]:
    """Choose the tensors that eager code would fill."""
    return sent if ExchangeKind(kind) in IN_PLACE else received


def exchange(
    kind: str, sent: Sequence[Tensor], received: Sequence[Tensor], group: str, how: str, numbers: Sequence[int]
) -> list[Tensor]:
    """Communicate with a group, named as torch names it, and wait. Returns what eager code would have in its tensors.

    `how` is a reduction's operation. `numbers` is a root's place in the group, or for all_to_all_single the sizes of
    the parts that come and go.
    """
    chosen, handle = ExchangeKind(kind), _group(group)
    shaped = [value.contiguous() for value in sent]
    if chosen in IN_PLACE:
        out = [value.clone() if value is given else value for value, given in zip(shaped, sent, strict=True)]
    else:
        out = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in received]
    _RUN[chosen](out, shaped, handle, how, numbers)
    return out


_dist: Any = dist  # half of its arguments have no types

Run = Callable[[list[Tensor], list[Tensor], Any, str, Sequence[int]], object]


def _all_reduce(out: list[Tensor], _: list[Tensor], group: Any, how: str, __: Sequence[int]) -> None:
    for value in out:
        _dist.all_reduce(value, _operation(how), group)


def _broadcast(out: list[Tensor], _: list[Tensor], group: Any, __: str, numbers: Sequence[int]) -> None:
    for value in out:
        _dist.broadcast(value, _root(group, numbers), group)


def _reduce(out: list[Tensor], _: list[Tensor], group: Any, how: str, numbers: Sequence[int]) -> None:
    for value in out:
        _dist.reduce(value, _root(group, numbers), _operation(how), group)


def _all_gather(out: list[Tensor], sent: list[Tensor], group: Any, _: str, __: Sequence[int]) -> None:
    _dist.all_gather(out, sent[0], group)


def _all_gather_single(out: list[Tensor], sent: list[Tensor], group: Any, _: str, __: Sequence[int]) -> None:
    for whole, part in zip(out, sent, strict=True):
        compat.all_gather(whole, part, group=group)


def _reduce_scatter(out: list[Tensor], sent: list[Tensor], group: Any, how: str, _: Sequence[int]) -> None:
    _dist.reduce_scatter(out[0], sent, _operation(how), group)


def _reduce_scatter_single(out: list[Tensor], sent: list[Tensor], group: Any, how: str, _: Sequence[int]) -> None:
    for part, whole in zip(out, sent, strict=True):
        compat.reduce_scatter(part, whole, _operation(how), group=group)


def _gather(out: list[Tensor], sent: list[Tensor], group: Any, _: str, numbers: Sequence[int]) -> None:
    _dist.gather(sent[0], out or None, _root(group, numbers), group)  # the root alone has a list


def _scatter(out: list[Tensor], sent: list[Tensor], group: Any, _: str, numbers: Sequence[int]) -> None:
    _dist.scatter(out[0], sent or None, _root(group, numbers), group)


def _all_to_all(out: list[Tensor], sent: list[Tensor], group: Any, _: str, __: Sequence[int]) -> None:
    _dist.all_to_all(out, sent, group)


def _all_to_all_single(out: list[Tensor], sent: list[Tensor], group: Any, _: str, numbers: Sequence[int]) -> None:
    half = len(numbers) // 2
    coming, going = list(numbers[:half]), list(numbers[half:])
    _dist.all_to_all_single(out[0], sent[0], coming or None, going or None, group)


def _barrier(out: list[Tensor], sent: list[Tensor], group: Any, _: str, __: Sequence[int]) -> None:  # noqa: ARG001
    _dist.barrier(group)


_RUN: Mapping[ExchangeKind, Run] = {
    ExchangeKind.ALL_REDUCE: _all_reduce,
    ExchangeKind.BROADCAST: _broadcast,
    ExchangeKind.REDUCE: _reduce,
    ExchangeKind.ALL_GATHER: _all_gather,
    ExchangeKind.ALL_GATHER_SINGLE: _all_gather_single,
    ExchangeKind.REDUCE_SCATTER: _reduce_scatter,
    ExchangeKind.REDUCE_SCATTER_SINGLE: _reduce_scatter_single,
    ExchangeKind.GATHER: _gather,
    ExchangeKind.SCATTER: _scatter,
    ExchangeKind.ALL_TO_ALL: _all_to_all,
    ExchangeKind.ALL_TO_ALL_SINGLE: _all_to_all_single,
    ExchangeKind.BARRIER: _barrier,
}


def _group(name: str) -> Any:
    try:
        return compat.process_group(name)
    except RuntimeError as error:
        raise StepChanged(
            f"the process group {name!r}, which the loss function communicated with when the step was compiled, exists"
            " no more.\n  Make groups once, before compile_step, and keep them."
        ) from error


def _operation(how: str) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, how.upper())


def _root(group: Any, numbers: Sequence[int]) -> int:
    """The root's number among all ranks."""
    return _dist.get_global_rank(group, numbers[0])
