"""Run a collective that the loss function calls, such as the all_gather of a contrastive loss.

Eager code fills tensors in place. Here new tensors of the same shapes are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.errors import StepChanged


class ExchangeKind(Enum):
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


def filled(kind: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors that eager code would fill."""
    return sent if ExchangeKind(kind) in IN_PLACE else received


def exchange(
    kind: str, sent: Sequence[Tensor], received: Sequence[Tensor], group: str, how: str, numbers: Sequence[int]
) -> list[Tensor]:
    """Run a collective on the group that torch names `group`.

    `how` is the reduction. `numbers` holds the root's index in the group, or all_to_all_single's received, then sent
    sizes.
    """
    chosen, handle = ExchangeKind(kind), _group(group)
    shaped = [value.contiguous() for value in sent]
    if chosen in IN_PLACE:
        out = [value.clone() if value is given else value for value, given in zip(shaped, sent, strict=True)]
    else:
        out = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in received]
    _run(chosen, out, shaped, handle, how, numbers)
    return out


_dist: Any = dist  # partly untyped


def _run(
    kind: ExchangeKind, out: list[Tensor], sent: list[Tensor], group: Any, how: str, numbers: Sequence[int]
) -> None:
    match kind:
        case ExchangeKind.ALL_REDUCE:
            for value in out:
                _dist.all_reduce(value, _operation(how), group)
        case ExchangeKind.BROADCAST:
            for value in out:
                _dist.broadcast(value, _root(group, numbers), group)
        case ExchangeKind.REDUCE:
            for value in out:
                _dist.reduce(value, _root(group, numbers), _operation(how), group)
        case ExchangeKind.ALL_GATHER:
            _dist.all_gather(out, sent[0], group)
        case ExchangeKind.ALL_GATHER_SINGLE:
            for whole, part in zip(out, sent, strict=True):
                compat.all_gather(whole, part, group=group)
        case ExchangeKind.REDUCE_SCATTER:
            _dist.reduce_scatter(out[0], sent, _operation(how), group)
        case ExchangeKind.REDUCE_SCATTER_SINGLE:
            for part, whole in zip(out, sent, strict=True):
                compat.reduce_scatter(part, whole, _operation(how), group=group)
        case ExchangeKind.GATHER:
            _dist.gather(sent[0], out or None, _root(group, numbers), group)  # only the root has a list
        case ExchangeKind.SCATTER:
            _dist.scatter(out[0], sent or None, _root(group, numbers), group)
        case ExchangeKind.ALL_TO_ALL:
            _dist.all_to_all(out, sent, group)
        case ExchangeKind.ALL_TO_ALL_SINGLE:
            half = len(numbers) // 2
            coming, going = list(numbers[:half]), list(numbers[half:])
            _dist.all_to_all_single(out[0], sent[0], coming or None, going or None, group)
        case ExchangeKind.BARRIER:
            _dist.barrier(group)


def _group(name: str) -> Any:
    try:
        return compat.process_group(name)
    except RuntimeError as error:
        raise StepChanged(
            f"the process group {name!r}, which the loss function communicated with when the step was compiled, no"
            " longer exists.\n  Make groups once, before compile_step, and keep them."
        ) from error


def _operation(how: str) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, how.upper())


def _root(group: Any, numbers: Sequence[int]) -> int:
    return _dist.get_global_rank(group, numbers[0])
