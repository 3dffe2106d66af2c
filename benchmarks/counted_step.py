"""Count what an emitted step hands to a device that is not here.

The source that would run there runs here once more, line by line, on tensors without memory, which play the device;
what the host keeps is on the CPU. Operators are counted as they are called, kernels where they are launched. Regions
of forward and backward do not run: what they make is there when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from launch_counter import LaunchCounter
from torch import Tensor

from fxcomp import compat
from fxcomp.codegen.load import observed
from fxcomp.codegen.program import Program
from fxcomp.compressors.triton.language import launches_told
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
"""The number in the host's counters: with 0, corrections for a start at zero would be divided by zero."""

_KIND = {
    **dict.fromkeys(("pack", "cast", "in_place", "turn", "save"), "pack"),
    **dict.fromkeys(("propose", "compress"), "encode"),
    **dict.fromkeys(("decompress", "keep"), "decode"),
    **dict.fromkeys(("launch", "wait"), "collective"),
    "all_finite": "check",
}
"""The kind of work of each line; of others it is `other`."""

_RANDOM = ("rng_state", "set_rng_state", "seed_rng")
"""Lines about the random generator of a device that is not here; they hand the device nothing."""


KINDS = ("pack", "encode", "collective", "decode", "check", "unpack", "clip", "update", "other")
"""The kinds of work, in the order in which a step comes to them."""


@dataclass(frozen=True, slots=True)
class Launches:
    """The work of one kind in one step."""

    launches: int = 0
    """Kernels that are started; of collectives, collectives."""
    touched_bytes: int = 0
    """Bytes of device memory that these read and write."""
    reads: int = 0
    """Values that the host asks the device for, and waits."""
    copies: int = 0
    """Other copies between host and device that the host waits for."""

    @property
    def waits(self) -> int:
        """The calls that do not return before the device has come so far."""
        return self.reads + self.copies


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """The work of one step, by kind."""

    kinds: Mapping[str, Launches]
    operators: int
    """Operators of forward and backward."""

    def of(self, kind: str) -> Launches:
        return self.kinds.get(kind, Launches())

    @property
    def total(self) -> Launches:
        """All kinds together."""
        found = self.kinds.values()
        sums = (sum(getattr(each, name) for each in found) for name in Launches.__slots__)
        return Launches(*sums)

    def lines(self) -> Iterator[str]:
        """Write the counts as plain lines."""
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
    """Count one step of a program after its first; None where something in it cannot run without values.

    So are compressors without kernels for a device whose references ask for values, and offloads to the host.
    """
    if nodes_on_host(program.graph):
        return None
    runtime = Runtime(_NoNetwork(), DEVICE)
    counter = LaunchCounter(lambda tensor: tensor.is_meta)
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
    with torch.no_grad(), launches_told(counter.add), counter, counter.counting("other"):
        step(lines, *_arguments(program))


def _counted(kind: str, run: Callable[..., Any], counter: LaunchCounter) -> Callable[..., Any]:
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

    def __init__(self, runtime: Runtime, counter: LaunchCounter) -> None:
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
