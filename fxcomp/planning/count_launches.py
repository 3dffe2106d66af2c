"""Count what an emitted step hands to a device that is not here.

The source that would run there runs here once more, line by line, on tensors without memory, which play the device;
what the host keeps is on the CPU. Operators are counted as they are called, kernels where they are launched. Regions
of forward and backward do not run: what they make is there when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat
from fxcomp.codegen.load import observed
from fxcomp.codegen.program import Program
from fxcomp.compressors.triton import launches_told
from fxcomp.graph.edit import nodes_on_host
from fxcomp.graph.info import InputKind, Role, arguments_of, info
from fxcomp.graph.regions import Region, regions
from fxcomp.graph.work import is_free
from fxcomp.report.launches import Launches, StepLaunches
from fxcomp.runtime.group import Done, Work
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Transfer

DEVICE = torch.device("meta")

STEPS_TAKEN = 2
"""The number in the host's counters: with 0, corrections for a start at zero would be divided by zero."""

_KIND = {
    **dict.fromkeys(("pack", "cast", "in_place", "turn", "save", "accumulate", "mask_velocity"), "pack"),
    **dict.fromkeys(("propose", "compress"), "encode"),
    **dict.fromkeys(("decompress", "keep"), "decode"),
    **dict.fromkeys(("launch", "wait"), "collective"),
    "all_finite": "check",
}
"""The kind of work of each line; of others it is `other`."""

_RANDOM = ("rng_state", "set_rng_state", "seed_rng")
"""Lines about the random generator of a device that is not here; they hand the device nothing."""


def count_launches(program: Program) -> StepLaunches | None:
    """Count one step of a program after its first; None where something in it cannot run without values.

    So are compressors without kernels for a device whose references ask for values, and offloads to the host.
    """
    if nodes_on_host(program.graph):
        return None
    runtime = Runtime(_NoNetwork(), DEVICE)
    counter = compat.LaunchCounter(lambda tensor: tensor.is_meta)
    runtime.transport.counter = counter  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for _ in range(2):  # the first makes buffers and tables, which stay
            counter.found.clear()
            _run(program, runtime, counter)
    except (ArithmeticError, RuntimeError, ValueError):
        return None
    finally:
        runtime.close()
    kinds = {
        kind: Launches(each.launches, each.touched_bytes, each.reads, each.copies)
        for kind, each in counter.found.items()
        if each.launches or each.reads or each.copies
    }
    body = [node for region in regions(program.graph) if not region.updates for node in region.nodes]
    return StepLaunches(kinds, sum(not is_free(node) for node in body))


def _run(program: Program, runtime: Runtime, counter: compat.LaunchCounter) -> None:
    by_name = {region.name: region for region in regions(program.graph)}

    def update(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        clips = any(info(node).role is Role.CLIP for node in by_name[name].nodes)
        return _counted("clip" if clips else "unpack", run, counter)

    def rule(_: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return _counted("update", run, counter)

    step = observed(program.module, rule=rule, update=update)
    for name, region in by_name.items():
        if not region.updates:
            step.__globals__[name] = _made(region)
    lines = _CountedLines(runtime, counter)
    with torch.no_grad(), launches_told(counter.add), counter, counter.counting("other"):
        step(lines, *_arguments(program))


def _counted(kind: str, run: Callable[..., Any], counter: compat.LaunchCounter) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        with counter.counting(kind):
            return run(*arguments, **options)

    return counted


def _made(region: Region) -> Callable[..., Any]:
    """Stand in for a region: make what it would return."""
    values = [_without_memory(node.meta["val"]) for node in region.outputs]
    return lambda *_: values[0] if len(values) == 1 else values


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not compat.is_accelerator(value.device):
        return torch.full(value.shape, STEPS_TAKEN, dtype=value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


def _arguments(program: Program) -> list[Any]:
    given: dict[InputKind, list[Any]] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        source = info(node).source
        assert source is not None, "an input has a source"
        given.setdefault(source.kind, []).append(_without_memory(node.meta["val"]))
    return list(arguments_of(given))


class _CountedLines:
    """A runtime whose lines are counted by their kinds."""

    def __init__(self, runtime: Runtime, counter: compat.LaunchCounter) -> None:
        self._runtime, self._counter = runtime, counter

    def __getattr__(self, name: str) -> Any:
        if name in _RANDOM:
            return _nothing
        found = getattr(self._runtime, name)
        return _counted(_KIND.get(name, "other"), found, self._counter) if callable(found) else found


def _nothing(*_: Any) -> None:
    """Stand in for a line of the random generator."""


class _NoNetwork:
    """Counts collectives, and sends nothing."""

    counter: compat.LaunchCounter

    def place(self, level: str) -> int:  # noqa: ARG002
        return 0

    def all_reduce(self, value: Tensor, level: str, lane: str, how: str = "sum") -> Work:  # noqa: ARG002
        return self._counted(value)

    def broadcast(self, value: Tensor, source: int, level: str, lane: str) -> Work:  # noqa: ARG002
        return self._counted(value)

    def start(self, transfer: Transfer) -> Work:
        return self._counted(transfer.value, transfer.out)

    def settle(self) -> None:
        return

    def _counted(self, *tensors: Tensor) -> Work:
        with self.counter.counting("collective"):
            self.counter.add(tensors)
        return Done()
