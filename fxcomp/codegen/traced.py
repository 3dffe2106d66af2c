"""Add a program to torch's structured trace: TORCH_TRACE=folder, then `tlparse folder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.cost.timeline import Timeline
from fxcomp.graph.dump import dump
from fxcomp.plan.plan import Plan


def trace_program(
    plan: Plan, source: str, timeline: Timeline | None, graphs: Callable[[], Mapping[str, GraphModule]]
) -> None:
    """If TORCH_TRACE is set, write the graph after each pass, the plan, the predicted timeline and the source."""
    if not compat.is_traced():
        return
    for number, (name, graph) in enumerate(graphs().items(), 1):
        compat.trace_artifact(f"graph_{number:02d}_{name}", dump(graph))
    compat.trace_artifact("plan", plan.to_json())
    if timeline is not None:
        compat.trace_artifact("timeline", {"step_ms": timeline.step_time_us / 1e3, "tasks": timeline.to_json()})
    compat.trace_artifact("source", source)
