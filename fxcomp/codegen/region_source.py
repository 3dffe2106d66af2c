"""Write each region as a function; what most parameters are updated by is written once, as `optimizer_step_0`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxcomp.codegen.expressions import OWN_NAMES, Names, call_text, wrapped
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.names import free_name
from fxcomp.graph.regions import Region


class OptimizerSteps:
    """The optimizer's rules, each written once: parameters are updated by the same lines, with other tensors."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    def call(self, group: Sequence[Node]) -> str:
        """Write a call that does what these nodes do."""
        inputs = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in group))
        names = {node: _role_name(node) for node in inputs}
        taken = set(names.values())
        for node in group:
            stem = free_name(str(node.name).rstrip("0123456789").rstrip("_") or node.name)
            numbered = (stem, *(f"{stem}_{k}" for k in range(len(group))))
            names[node] = next(name for name in numbered if name not in taken)
            taken.add(names[node])
        lines = _statements([[node] for node in group], (), names, None)
        body = ("(" + ", ".join(names[n] for n in inputs) + "):", *lines)
        name = self._names.setdefault(body, f"optimizer_step_{len(self._names)}")
        return f"{name}({', '.join(node.name for node in inputs)})"

    def functions(self) -> list[str]:
        return ["\n    ".join((f"def {name}{body[0]}", *body[1:])) for body, name in self._names.items()]


def _role_name(node: Node) -> str:
    """Name an input by its role in the rule: a parameter, a gradient, a state by its key, a live number."""
    source = info(node).source
    if source is None:
        return "gradient"
    return "parameter" if source.kind is InputKind.PARAMETER else source.key


def region_function(region: Region, steps: OptimizerSteps) -> str:
    lines = _statements(_update_groups(region.nodes), region.outputs, OWN_NAMES, steps)
    if region.outputs:
        lines.append("return " + ", ".join(node.name for node in region.outputs))
    head = wrapped(f"def {region.name}(", [node.name for node in region.inputs], "):", indent="")
    return head + "\n" + "\n".join(f"    {line}" for line in lines)


def _statements(
    groups: Sequence[Sequence[Node]], keep: Sequence[Node], names: Names, steps: OptimizerSteps | None
) -> list[str]:
    """Write a statement for each group; values are deleted after their last use."""
    place = {node: k for k, group in enumerate(groups) for node in group}
    kept = set(keep)
    last_use: dict[Node, int] = {}
    for k, group in enumerate(groups):
        for used in (used for node in group for used in node.all_input_nodes):
            if place.get(used, k) != k and used not in kept:
                last_use[used] = k
    dead_after: dict[int, list[str]] = {}
    for used, k in last_use.items():
        dead_after.setdefault(k, []).append(names.get(used, used.name))
    lines: list[str] = []
    for k, group in enumerate(groups):
        node = group[-1]
        dead = dead_after.get(k)
        if steps is not None and info(node).role is Role.UPDATE and not node.users:
            line = steps.call(group)
        else:
            line = (f"{names.get(node, node.name)} = " if node.users else "") + call_text(node, names)
        lines.append(line + (f"; del {', '.join(dead)}" if dead else ""))
    return lines


def _update_groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Group consecutive nodes that update the same parameter; every other node is alone."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = info(groups[-1][-1]) if groups else None
        same = last is not None and last.role is Role.UPDATE and last.parameter == info(node).parameter
        if same and info(node).role is Role.UPDATE:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups
