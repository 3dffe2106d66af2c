"""Count the work that an emitted step launches on an absent device.

The step's source runs line by line on meta tensors, which represent the device; host tensors are on the CPU. Operators
are counted when called and kernels when launched. Forward and backward do not run; placeholders replace their results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from launch_counter import LaunchCounter
from torch import Tensor

from fxcomp import compat
from fxcomp.codegen.load import observed
from fxcomp.codegen.program import Program
from fxcomp.compressors.triton import dispatch, language
from fxcomp.graph.edit import nodes_on_host
from fxcomp.graph.info import InputKind, Role, arguments_of, info
from fxcomp.graph.regions import Region, regions
from fxcomp.graph.work import is_free
from fxcomp.report.document import mb
from fxcomp.runtime.group import Done, Work
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Transfer

DEVICE = torch.device("meta")

STEPS_TAKEN = 2
"""Value of host counters; 0 would divide bias corrections by zero."""

_KIND = {
    **dict.fromkeys(("pack", "cast", "in_place", "turn", "save"), "pack"),
    **dict.fromkeys(("propose", "compress"), "encode"),
    **dict.fromkeys(("decompress", "keep"), "decode"),
    **dict.fromkeys(("launch", "wait"), "collective"),
    "all_finite": "check",
}
"""Kind of each runtime line; `other` if missing."""

_RANDOM = ("rng_state", "set_rng_state", "seed_rng")
"""Random-generator lines, which launch no work."""


KINDS = ("pack", "encode", "collective", "decode", "check", "unpack", "clip", "update", "other")
"""Kinds of work in step order."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Work of one kind in one step."""

    launches: int = 0
    """Started kernels, or collectives."""
    touched_bytes: int = 0
    """Bytes of device memory read and written."""
    reads: int = 0
    """Blocking reads of device values by the host."""
    copies: int = 0
    """Other blocking copies between host and device."""

    @property
    def waits(self) -> int:
        return self.reads + self.copies


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """Work of one step, by kind."""

    kinds: Mapping[str, Launches]
    operators: int
    """Operators of forward and backward."""

    def of(self, kind: str) -> Launches:
        return self.kinds.get(kind, Launches())

    @property
    def total(self) -> Launches:
        found = self.kinds.values()
        sums = (sum(getattr(each, name) for each in found) for name in Launches.__slots__)
        return Launches(*sums)

    def lines(self) -> Iterator[str]:
        yield f"forward and backward: {self.operators} operators, before any is joined with another"
        for kind, each in (*self._known, ("in all", self.total)):
            yield (
                f"{kind}: {each.launches} launches, {mb(each.touched_bytes)} MB of device memory,"
                f" {each.reads} reads by the host, {each.waits} synchronising calls"
            )

    @property
    def _known(self) -> list[tuple[str, Launches]]:
        return [(kind, self.kinds[kind]) for kind in KINDS if kind in self.kinds]


def count_launches(program: Program) -> StepLaunches | None:
    """Count a program's second step; None if it cannot run without values.

    Compressors without device kernels whose references read values, and offloads to the host, need values.
    """
    if nodes_on_host(program.graph):
        return None
    runtime = Runtime(_NoNetwork(), DEVICE)
    counter = LaunchCounter(lambda tensor: tensor.is_meta)
    runtime.transport.counter = counter  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for _ in range(2):  # the first step makes persistent buffers and tables
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


def _run(program: Program, runtime: Runtime, counter: LaunchCounter) -> None:
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
    with torch.no_grad(), kernels_counted(counter.add), counter, counter.counting("other"):
        step(lines, *_arguments(program))


@contextmanager
def kernels_counted(count: Callable[[Sequence[Tensor]], object]) -> Generator[None]:
    """Within this context, pass the tensors of each launch of a Triton kernel to `count`, and run no kernel."""

    def start(_kernel: Any, _programs: Any, arguments: Sequence[Any], *_: Any) -> None:
        count([each for each in arguments if isinstance(each, Tensor)])

    with patch.object(language, "start", start), patch.object(dispatch, "can_run_on", lambda each: each.is_meta):
        yield


def _counted(kind: str, run: Callable[..., Any], counter: LaunchCounter) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        with counter.counting(kind):
            return run(*arguments, **options)

    return counted


def _made(region: Region) -> Callable[..., Any]:
    """Replace a region by a function that returns empty results."""
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
    def __init__(self, runtime: Runtime, counter: LaunchCounter) -> None:
        self._runtime, self._counter = runtime, counter

    def __getattr__(self, name: str) -> Any:
        if name in _RANDOM:
            return _nothing
        found = getattr(self._runtime, name)
        return _counted(_KIND.get(name, "other"), found, self._counter) if callable(found) else found


def _nothing(*_: Any) -> None:
    """Replace a random-generator line."""


class _NoNetwork:
    """Transport that counts collectives and sends nothing."""

    counter: LaunchCounter

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
