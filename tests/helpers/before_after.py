"""Show what a pass did: the lines of the graph that it changed, with some context."""

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from torch.fx import GraphModule

from fxcomp.graph.dump import aligned, rows
from fxcomp.graph.edit import clone
from fxcomp.graph.run_passes import check

CONTEXT = 2
"""So many unchanged lines stand around changed ones."""


def before_after(pass_: Callable[..., GraphModule], gm: GraphModule, *args: Any) -> tuple[str, GraphModule]:
    """The changed lines, and the graph after the pass, which has been checked."""
    before = rows(gm)
    after = pass_(clone(gm), *args)
    after.graph.lint()
    assert not check(after)
    return changes(before, rows(after)), after


def changes(before: list[tuple[str, ...]], after: list[tuple[str, ...]]) -> str:
    """Unchanged, removed and new lines, in one alignment; dots for what is far from any change."""
    marked: list[tuple[str, tuple[str, ...]]] = []
    for group in SequenceMatcher(a=before, b=after, autojunk=False).get_grouped_opcodes(CONTEXT):
        if marked or group[0][1] > 0:
            marked.append(("...", ("",)))
        for kind, i, j, k, m in group:
            if kind == "equal":
                marked += [("  ", row) for row in before[i:j]]
            else:
                marked += [*(("- ", row) for row in before[i:j]), *(("+ ", row) for row in after[k:m])]
    texts = aligned([row for _, row in marked])
    return "\n".join((mark + text).rstrip() for (mark, _), text in zip(marked, texts, strict=True))
