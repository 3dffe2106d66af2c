"""Make a program: one captured step, rewritten for one plan, emitted as source and loaded.

captured step ─► final graph ─emit─► source ─load─► module
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.cluster.cluster import Level
from fxcomp.codegen.compiled_regions import regions_of_capture
from fxcomp.codegen.emit import emit
from fxcomp.codegen.load import compile_regions, load
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import BadOption
from fxcomp.graph.captured import Captured
from fxcomp.graph.edit import value_bytes
from fxcomp.graph.info import Role, Source, info
from fxcomp.graph.lines import line_of, numbers_of
from fxcomp.runtime.buffers import AS_WRITTEN, Numbers
from fxcomp.runtime.transfers import Pattern, pattern_of


def carriers_of(gm: GraphModule) -> frozenset[str]:
    """Return the names of collectives that also send a small digest, which ranks compare.

    One collective over all ranks is enough, else one per level. The first all_reduce is preferred, because it needs no
    copy and precedes most updates; otherwise the smallest gather is used.
    """
    found: dict[str, tuple[int, str]] = {}
    for node in gm.graph.nodes:
        line = line_of(node)
        if line is None or line.method != "launch":
            continue
        kind, _, cut, level, *_ = line.arguments(node)
        copied = _copied_bytes(node, kind, cut)
        if copied is not None and (level not in found or copied < found[level][0]):
            found[level] = copied, node.name
    world = found.get(Level.WORLD.value)
    return frozenset(name for _, name in ([world] if world is not None else found.values()))


def _copied_bytes(node: Node, kind: str, cut: Any) -> int | None:
    """Return the bytes that a collective copies to carry the digest; None if it cannot carry one."""
    if kind == "all_reduce":
        # preferred: an all_reduce of counts precedes all changes
        return -1 if info(node).role is Role.COUNT else 0
    if cut == 1 or pattern_of(kind) is not Pattern.ALL_GATHER:
        return None
    return max(1, value_bytes(node))


Replay = Callable[[], Mapping[str, GraphModule]]
"""Function that returns the graph after each pass, by pass name."""

INDUCTOR_DEVICES = ("cuda",)
"""Devices for which Inductor compiles the regions. On the CPU, Inductor's code was slower than eager on the example GPT
and took minutes to compile (measured, 2026-11); on an H200 it took a third of the eager time (2026-11).
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A captured step that follows one plan. Immutable."""

    captured: Captured
    graph: GraphModule
    replay: Replay
    """Function that repeats the passes, because storing every graph would take ten times the memory."""
    module: ModuleType
    emitted: str
    timeline: Timeline
    inputs: tuple[Source, ...]
    numbers: Numbers = AS_WRITTEN
    """Values that replace the numbers in the emitted source."""
    carriers: frozenset[str] = frozenset()
    """Names of the collectives that send a digest."""

    @property
    def source(self) -> str:
        """Python source of the step, with its current numbers."""
        return self.emitted if self.numbers is AS_WRITTEN else emit(self.graph)

    def graph_after(self, name: str | None) -> GraphModule:
        """Return the graph after a pass, by default the last. Raises BadOption for an unknown pass."""
        if name is None:
            return self.graph
        history = self.replay()
        if name not in history:
            raise BadOption(f"there is no pass {name!r}; the passes are {', '.join(history)}")
        return history[name]

    def retuned(self, graph: GraphModule, replay: Replay, timeline: Timeline) -> Program:
        """Return the program for a graph that emits the same lines, but with other constants in them."""
        return replace(self, graph=graph, replay=replay, timeline=timeline, numbers=numbers_of(graph))


def load_program(captured: Captured, graph: GraphModule, replay: Replay, timeline: Timeline) -> Program:
    source = emit(graph)
    module = load(source, graph, compat.cache_directory() / "steps")
    if captured.device.type in INDUCTOR_DEVICES and not captured.is_imagined:
        compile_regions(module, graph, regions_of_capture(captured.graph))
    inputs = tuple(s for n in graph.graph.nodes if n.op == "placeholder" and (s := info(n).source) is not None)
    return Program(captured, graph, replay, module, source, timeline, inputs, carriers=carriers_of(graph))
