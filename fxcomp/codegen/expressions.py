"""Write values, calls and long lines as Python source."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from fxcomp import compat
from fxcomp.compressors import Compressor
from fxcomp.graph.work import is_sequence

WIDTH = 120

Names = Mapping[Any, str]
"""Names of compressors and renamed nodes."""

OWN_NAMES: Names = {}

_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
    operator.floordiv: "//",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
    operator.mod: "%",
    operator.pow: "**",  # pyright: ignore[reportUnknownMemberType]  # untyped in typeshed
}


def call_text(node: Node, names: Names) -> str:
    target, arguments = node.target, [text(arg, names) for arg in node.args]
    if target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if target in _INFIX and len(arguments) == 2:
        return f"{arguments[0]} {_INFIX[target]} {arguments[1]}"
    if target is operator.neg:
        return f"-{arguments[0]}"
    arguments += [f"{key}={text(value, names)}" for key, value in node.kwargs.items()]
    return f"{function_text(target)}({', '.join(arguments)})"


def function_text(target: Any) -> str:
    if compat.is_operator(target):
        return str(target) if target.namespace == "aten" else f"torch.ops.{target}"
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    if module == "builtins":
        return target.__name__
    assert module in ("operator", "math", "torch"), f"cannot write a call of {module}.{target.__name__}"
    return f"{module}.{target.__name__}"


def text(value: Any, names: Names = OWN_NAMES) -> str:
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, Compressor):
        return names[value]
    if compat.is_operator(value):
        return function_text(value)
    if is_sequence(value):
        inner = ", ".join(text(item, names) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, slice):
        bounds = cast("slice[Any, Any, Any]", value)
        return f"slice({', '.join(text(part, names) for part in (bounds.start, bounds.stop, bounds.step))})"
    for kind in (bool, int, float):  # the repr of a subclass may not be source
        if isinstance(value, kind):
            return repr(kind(value))
    if isinstance(value, complex):
        return f"complex({text(value.real)}, {text(value.imag)})"
    plain = torch.dtype | torch.layout | torch.memory_format
    assert value is None or isinstance(value, plain), f"cannot write {value!r} as source"
    return repr(value)


def wrapped(head: str, items: Sequence[str], tail: str, *, indent: str) -> str:
    """Join `head`, items and `tail` on one line, or wrap the items."""
    joined = ", ".join(items)
    if len(head.splitlines()[-1]) + len(joined) + len(tail) <= WIDTH:
        return f"{head}{joined}{tail}"
    inner = indent + "    "
    body = _filled(joined, WIDTH - len(inner) - 1)
    return f"{head.rstrip()}\n" + "\n".join(inner + line for line in body) + f",\n{indent}{tail.lstrip(',')}"


_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^ "])+')
"""Text that is never wrapped. Quoted text is one word, because parameter names may contain spaces."""


def _filled(joined: str, width: int) -> list[str]:
    lines = [""]
    for word in _WORD.findall(joined):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines
