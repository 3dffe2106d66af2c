"""Show what a pass did: the graph before and behind it, as one text."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from fxcomp.graph.check import check
from fxcomp.graph.dump import dump
from fxcomp.graph.edit import clone


def before_after(pass_: Callable[..., GraphModule], gm: GraphModule, *args: Any) -> tuple[str, GraphModule]:
    """The text, and the graph behind the pass, which has been checked."""
    before = dump(gm)
    after = pass_(clone(gm), *args)
    after.graph.lint()
    assert not check(after)
    return f"{before}\n\n-->\n\n{dump(after)}", after
