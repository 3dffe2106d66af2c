"""Capture the loss function's own collectives, such as gathered embeddings or counted tokens.

    dist.all_reduce(count)           user code, torch.distributed.nn and similar libraries
 -->
    %e  exchange  (i64[],)  exchange("all_reduce", [%count], [], "0", "sum", [])
    %i  compute   i64[]     %e[0]
    copy_(%count, %i)

Eager collectives cannot be traced, and would communicate even on fake tensors. While tracing, the operator `exchange`
replaces them and sends nothing, so a rank can capture alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.errors import BadCall, Unsupported
from fxcomp.graph.ops import EXCHANGE
from fxcomp.runtime.exchange import IN_PLACE, ExchangeKind


@contextlib.contextmanager
def keeping_collectives(model: nn.Module) -> Generator[None]:
    """Turn collectives into nodes of the trace instead of communicating."""
    if not (dist.is_available() and dist.is_initialized()):
        with _explaining_no_group():
            yield
        return
    _check_batch_norm(model)
    with compat.without_hidden_communication(_refuse), _Keeping():
        yield


@contextlib.contextmanager
def _explaining_no_group() -> Generator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error):
            raise
        raise BadCall(
            "the loss function uses torch.distributed, which is not initialised in this process.\n"
            f"  {_where(error)}{str(error).splitlines()[0]}\n"
            "  Call torch.distributed.init_process_group first. To ask about a cluster on one process, let the job make"
            " a group of one: init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)."
        ) from error


def _check_batch_norm(model: nn.Module) -> None:
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, nn.SyncBatchNorm) and module.training and dist.get_world_size(module.process_group) > 1:
            raise Unsupported(
                f"{name or 'the model'} is a SyncBatchNorm, whose statistics over all ranks leave out ranks with no"
                " samples: it decides by values.\n"
                "  Use BatchNorm, whose running statistics are rank 0's on all ranks, or GroupNorm or LayerNorm."
            )


# Eager collectives


@dataclass(frozen=True, slots=True)
class _CollectiveCall:
    """An in-place collective with the tensors it sends and fills."""

    kind: ExchangeKind
    sent: Sequence[Tensor]
    received: Sequence[Tensor] = ()
    numbers: Sequence[int] = ()

    @property
    def filled(self) -> Sequence[Tensor]:
        return self.sent if self.kind in IN_PLACE else self.received


def _gather(a: Mapping[str, Any]) -> _CollectiveCall:
    received = list(chain.from_iterable(a["output_tensors"]))
    return _CollectiveCall(ExchangeKind.GATHER, a["input_tensors"], received, [a["root_rank"]])


def _scatter(a: Mapping[str, Any]) -> _CollectiveCall:
    sent = list(chain.from_iterable(a["input_tensors"]))
    return _CollectiveCall(ExchangeKind.SCATTER, sent, a["output_tensors"], [a["root_rank"]])


def _all_to_all_single(a: Mapping[str, Any]) -> _CollectiveCall:
    splits = [*a["output_split_sizes"], *a["input_split_sizes"]]
    return _CollectiveCall(ExchangeKind.ALL_TO_ALL_SINGLE, [a["input"]], [a["output"]], splits)


_READ: Mapping[str, Callable[[Mapping[str, Any]], _CollectiveCall]] = {
    "allreduce_": lambda a: _CollectiveCall(ExchangeKind.ALL_REDUCE, a["tensors"]),
    "allreduce_coalesced_": lambda a: _CollectiveCall(ExchangeKind.ALL_REDUCE, a["tensors"]),
    "broadcast_": lambda a: _CollectiveCall(ExchangeKind.BROADCAST, a["tensors"], numbers=[a["root_rank"]]),
    "reduce_": lambda a: _CollectiveCall(ExchangeKind.REDUCE, a["tensors"], numbers=[a["root_rank"]]),
    "allgather_": lambda a: _CollectiveCall(ExchangeKind.ALL_GATHER, a["input_tensors"], a["output_tensors"][0]),
    "_allgather_base_": lambda a: _CollectiveCall(
        ExchangeKind.ALL_GATHER_SINGLE, [a["input_tensor"]], [a["output_tensor"]]
    ),
    "allgather_into_tensor_coalesced_": lambda a: _CollectiveCall(
        ExchangeKind.ALL_GATHER_SINGLE, a["inputs"], a["outputs"]
    ),
    "reduce_scatter_": lambda a: _CollectiveCall(
        ExchangeKind.REDUCE_SCATTER, a["input_tensors"][0], a["output_tensors"]
    ),
    "_reduce_scatter_base_": lambda a: _CollectiveCall(
        ExchangeKind.REDUCE_SCATTER_SINGLE, [a["input_tensor"]], [a["output_tensor"]]
    ),
    "reduce_scatter_tensor_coalesced_": lambda a: _CollectiveCall(
        ExchangeKind.REDUCE_SCATTER_SINGLE, a["inputs"], a["outputs"]
    ),
    "gather_": _gather,
    "scatter_": _scatter,
    "alltoall_": lambda a: _CollectiveCall(ExchangeKind.ALL_TO_ALL, a["input_tensors"], a["output_tensors"]),
    "alltoall_base_": _all_to_all_single,
    "barrier": lambda a: _CollectiveCall(ExchangeKind.BARRIER, [a["tensor"]]),
    "monitored_barrier_": lambda a: _CollectiveCall(ExchangeKind.BARRIER, [a["tensor"]]),
}

_FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
_KEPT = ("wait_tensor", *_FUNCTIONAL, *(f"{name}_coalesced" for name in _FUNCTIONAL))


class _Keeping(compat.DispatchMode):
    """Dispatch mode that handles every operator before the tracer does, in the forward and backward pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not compat.communicates(func) or func is EXCHANGE:
            return func(*args, **(kwargs or {}))
        name = compat.bare_name(func)
        if compat.is_functional_collective(func):
            if name not in _KEPT:
                _refuse(f"{name} of functional collectives")
            return func(*args, **(kwargs or {}))
        if compat.carries_objects():
            _refuse(compat.OBJECTS)
        named = compat.named_arguments(func, args, kwargs or {})
        if name not in _READ or named.get("sparse_indices") is not None:
            _refuse(f"torch.distributed's {name.strip('_')}")
        _record(_READ[name](named), named)
        return compat.finished_work(func, args)


def _record(collective: _CollectiveCall, named: Mapping[str, Any]) -> None:
    how = ""
    if "reduce_op" in named:
        how = compat.reduction(named["reduce_op"]) or _refuse("a reduction with a factor (premul_sum)")
    if not all(map(compat.is_fake, collective.filled)):
        _refuse("a collective that fills a tensor which outlives the step")
    group = compat.group_name(named["process_group"])
    results = EXCHANGE(collective.kind.value, collective.sent, collective.received, group, how, collective.numbers)
    for tensor, result in zip(collective.filled, results, strict=True):
        tensor.copy_(result)


def _refuse(what: str) -> Any:
    raise Unsupported(
        f"the loss function uses {what}, which a compiled step cannot repeat.\n"
        f"  {_where()}"
        "Exchange tensors (all_reduce, all_gather, broadcast, reduce_scatter, gather, scatter, all_to_all), or do it"
        " around step(batch) and pass the result in the batch."
    )


def _where(error: BaseException | None = None) -> str:
    line = compat.users_line(error)
    return f"at {line}: " if line else ""
