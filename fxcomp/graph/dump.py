"""Print a graph as text that is the same on every machine, for reading and for comparison.

%mm           gradient    f32[4,2]  1.2 us   aten.mm(%a, %x)                fc.weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.graph.info import has_info, info
from fxcomp.graph.run_passes import check
from fxcomp.graph.work import is_sequence, operator_text, type_text


def dump(gm: GraphModule, *, costs: bool = True) -> str:
    """Return one line per node, followed by violated invariants."""
    return "\n".join([*aligned(rows(gm, costs=costs)), *(f"! {problem}" for problem in check(gm))])


def rows(gm: GraphModule, *, costs: bool = True) -> list[tuple[str, ...]]:
    """Return the columns of each text line; the last line, for the output node, has one column."""
    output = f"output({_argument(gm.graph.output_node().args[0], bare=True)})"
    return [*(_row(node, costs) for node in gm.graph.nodes if node.op != "output"), (output,)]


WIDEST = (48, 16, 40, 24, 80)
"""Maximum column widths, in characters. A longer cell does not widen its column."""


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    nodes = [row for row in rows if len(row) > 1]
    widths = [max((len(row[i]) for row in nodes if len(row[i]) <= most), default=0) for i, most in enumerate(WIDEST)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + list(row[5:]) for row in rows]
    return [("  ".join(cells) if len(cells) > 1 else cells[0]).rstrip() for cells in padded]


def _row(node: Node, costs: bool) -> tuple[str, ...]:
    label = info(node) if has_info(node) else None
    cost = f"{label.cost_us:.1f} us" if costs and label and label.cost_us else ""
    stream = f" @{label.stream.value}" if costs and label and label.stream and label.cost_us else ""
    call = "" if node.op == "placeholder" else _call(node)
    if node.op == "placeholder" and label and label.source:
        call = str(label.source)
    parameter = (label.parameter or "") if label and node.op != "placeholder" else ""
    role = label.role.value if label else "?"
    return (f"%{node.name}", role, type_text(node.meta.get("val")), cost + stream, call, parameter)


def _call(node: Node) -> str:
    if node.op == "get_attr":
        return str(node.target)
    if getattr(node.target, "__name__", "") == "getitem":
        return f"{_argument(node.args[0])}[{node.args[1]}]"
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{operator_text(node.target)}({', '.join(arguments)})"


def _argument(value: Any, *, bare: bool = False) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if is_sequence(value):
        inner = ", ".join(_argument(item) for item in value)
        if bare:
            return inner
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return str(value)
