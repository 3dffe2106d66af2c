"""Collectives between late devices, as NCCL's: a stream for each group, and a wait that a stream does, not the host.

They are gloo's, over the same memory, begun when the group's stream comes to them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._C._distributed_c10d import PythonCallbackWork

from helpers.late.backend import NAME, is_late
from helpers.late.machine import MACHINE, Job
from helpers.late.memory import on_host

_NAMES = (
    *("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("alltoall_base_", "alltoall_", "send", "recv_", "reduce_", "gather_", "scatter_", "allreduce_coalesced_"),
)

_streams: weakref.WeakKeyDictionary[Any, torch.Stream] = weakref.WeakKeyDictionary()
_library: list[torch.library.Library] = []


def start() -> None:
    """Let process groups of gloo take the late device's tensors."""
    if _library:
        return
    library = torch.library.Library("c10d", "IMPL", "PrivateUse1")
    _library.append(library)
    with warnings.catch_warnings(action="ignore"):  # torch has kernels there that ask for a backend in C++
        for name in _NAMES:
            library.impl(name, _late(getattr(torch.ops.c10d, name).default), allow_override=True)


def _late(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if is_late(each)]
        device, late = tensors[0].device.index, torch.late
        stream = _stream_of(args, device)
        on_cpu = pytree.tree_map(lambda each: on_host(MACHINE, each) if is_late(each) else each, (args, kwargs))
        works: list[Any] = []

        def begin() -> None:
            result = op(*on_cpu[0], **on_cpu[1])
            boxed = result[-1] if isinstance(result, tuple) else result
            works.append(dist.Work.unbox(boxed))

        def is_over() -> bool:
            if not works[0].is_completed():
                return False
            try:
                works[0].wait()
            except RuntimeError as error:
                MACHINE.failure = error
            return True

        stream.wait_stream(late.current_stream(device))
        MACHINE.give(device, stream.stream_id, Job(begin, is_over=is_over))
        done = late.Event()
        done.record(stream)
        held = [tensors]

        def wait(_: timedelta) -> bool:
            late.current_stream(device).wait_event(done)
            held.clear()
            return True

        work = dist.Work.boxed(PythonCallbackWork(wait))
        return _returned(op, args, work)

    return run


def _returned(op: Any, args: Any, work: Any) -> Any:
    returns = op._schema.returns
    if len(returns) == 1:
        return work
    return args[0], work


def _stream_of(args: Any, device: int) -> torch.Stream:
    group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
    if group not in _streams:
        _streams[group] = torch.Stream(device=torch.device(NAME, device))
    return _streams[group]
