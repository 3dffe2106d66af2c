"""Find where the side stream and the compute stream of a step wait for each other.

    pack_0 = rt.pack(...)
    with rt.aside(pack_0):                      the side stream waits for compute, %pack_0 included
        payload_0 = rt.compress(...)
        all_gather_0 = rt.launch(...)
    ...                                         compute continues
    with rt.aside():
        payloads_0 = rt.wait(all_gather_0)
        mean_0 = rt.decompress(...)
    rt.join(mean_0)                             compute waits for the side stream
    update_0(...)

`passes/assign_streams.py` chooses the lines of the side stream, which run in program order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fxcomp.graph.info import Role, info
from fxcomp.graph.lines import line_of
from fxcomp.graph.regions import Region


@dataclass(frozen=True, slots=True)
class Crossing:
    """Wait of one stream for the other, if any, before a piece (region or line) or at the end of a step."""

    is_aside: bool
    """True if the piece runs on the side stream."""
    waits: bool
    values: tuple[Node, ...] = ()
    """Values made on the other stream that this piece is the first to use."""


def crossings(gm: GraphModule, pieces: Sequence[Region | Node]) -> list[Crossing]:
    """Return the crossing before each piece of a step, and at the end.

    The first line of the side stream waits for compute, because a residual may have changed since the last step. At the
    end compute waits for the side stream, so that steps never overlap.
    """
    found: list[Crossing] = []
    made_aside: dict[Node, None] = {}
    taken: set[Node] = set()
    is_ahead = False
    """True while the side stream has work that compute has not waited for."""
    for piece in pieces:
        is_aside = goes_aside(piece)
        takes = piece.inputs if isinstance(piece, Region) else piece.all_input_nodes
        if is_aside:
            assert isinstance(piece, Node), "a region runs on the compute stream"
            own = (n for n in takes if n not in made_aside and (n.op == "call_function" or not made_aside))
            values = [n for n in own if n not in taken]
            made_aside[piece] = None
            is_ahead = is_ahead or line_of(piece) is not None
        else:
            values = [n for n in takes if n in made_aside and n not in taken]
            is_ahead = is_ahead and not values
        if isinstance(piece, Node) and info(piece).role is Role.COMMIT:
            assert not is_ahead, "a step may end here, so compute has waited for the side stream"
            taken.update(made_aside)  # compute has waited for all of them
        taken.update(values)
        found.append(Crossing(is_aside, bool(values), tuple(values)))
    outputs: Any = gm.graph.output_node().args[0]
    loss, aux = outputs[:2]
    left = tuple(n for n in (loss, *aux) if n in made_aside and n not in taken)
    return [*found, Crossing(False, is_ahead or bool(left), left)]


def goes_aside(piece: Region | Node) -> bool:
    return isinstance(piece, Node) and info(piece).is_aside
