"""Run an emitted step with profiler names: `fxcomp: region_3`, `fxcomp: bucket 2, compress int8, compress_2`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import GraphModule, Node
from torch.profiler import record_function

from fxcomp.codegen.load import rebound
from fxcomp.graph.edit import collective_kind, level_of
from fxcomp.graph.info import info
from fxcomp.graph.lines import compressor_at, timed_lines
from fxcomp.graph.regions import Region, cut
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.stopwatch import Call, WatchedLines

_NAMES: WeakKeyDictionary[ModuleType, Mapping[Call, str]] = WeakKeyDictionary()
"""Profiler names of runtime calls, per module."""


def run_named(module: ModuleType, graph: GraphModule, runtime: Runtime, arguments: Sequence[Any]) -> Any:
    names = _NAMES.get(module)
    if names is None:
        names = _NAMES[module] = dict(names_of(graph))
    counts = Counter[str]()
    line = ""

    def named_line(method: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def named(*arguments: Any, **options: Any) -> Any:
            nonlocal line
            line = names.get((method, counts[method]), method)
            counts[method] += 1
            return _within(line, run)(*arguments, **options)

        return named

    methods = dict.fromkeys(method for method, _ in names if hasattr(runtime, method))
    lines = WatchedLines(runtime, methods, named_line)
    runtime.pool.watch = lambda work: _within(line, work)
    try:
        return rebound(module, lambda name, run: _within(names.get((name, 0), name), run))(lines, *arguments)
    finally:
        runtime.pool.watch = None


def _within(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return run(*arguments, **options)

    return named


def names_of(graph: GraphModule) -> Iterator[tuple[Call, str]]:
    """Yield the runtime call and the profiler name of every region and runtime line."""
    pieces = cut(graph)
    for piece in pieces:
        if isinstance(piece, Region):
            yield (piece.name, 0), f"fxcomp: {piece.name}"
    for node, call, line in timed_lines(pieces):
        bucket = info(node).bucket
        whose = "" if bucket is None else f"bucket {bucket}, "
        yield call, f"fxcomp: {whose}{_leg(node, line.method)}, {node.name}"


def _leg(node: Node, method: str) -> str:
    """Return a line's operation: `compress int8` or `all_gather@inter`."""
    if method in ("propose", "compress", "decompress"):
        return f"{method} {compressor_at(node)}"
    if method == "launch":
        return f"{collective_kind(node).value}@{level_of(node).value}"
    return method
