"""Say where lines that go aside follow compute, and where compute follows them.

    pack_0 = rt.pack(...)
    with rt.aside(pack_0):                      after what compute has been given so far, which makes %pack_0
        payload_0 = rt.compress(...)
        all_gather_0 = rt.launch(...)
    ...                                         compute goes on
    with rt.aside():
        payloads_0 = rt.wait(all_gather_0)
        mean_0 = rt.decompress(...)
    rt.join(mean_0)                             compute waits for what has gone aside so far
    update_0(...)

`passes/assign_streams.py` says which lines go aside. They run there in their order. The emitter writes what stands
here, and `effects.py` takes it for what orders events.
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
    """A wait, or none, in front of a piece of a step or of its end."""

    is_aside: bool
    """The piece goes aside."""
    waits: bool
    """Its stream waits for all that the other one has been given so far."""
    values: tuple[Node, ...] = ()
    """Values that it takes from there for the first time."""


def crossings(gm: GraphModule, pieces: Sequence[Region | Node]) -> list[Crossing]:
    """List the crossing in front of each piece of a graph's step, and one in front of its end.

    The first line that goes aside waits for compute whatever it takes: a residual may have changed between two steps.
    In the end compute waits for the last one, so that nothing of a step is under way beside the next.
    """
    found: list[Crossing] = []
    made_aside: dict[Node, None] = {}
    taken: set[Node] = set()
    is_ahead = False
    """Something has gone aside that compute has not waited for."""
    for piece in pieces:
        is_aside = goes_aside(piece)
        takes = piece.inputs if isinstance(piece, Region) else piece.all_input_nodes
        if is_aside:
            assert isinstance(piece, Node), "regions do not go aside"
            own = (n for n in takes if n not in made_aside and (n.op == "call_function" or not made_aside))
            values = [n for n in own if n not in taken]
            made_aside[piece] = None
            is_ahead = is_ahead or line_of(piece) is not None
        else:
            values = [n for n in takes if n in made_aside and n not in taken]
            is_ahead = is_ahead and not values
        if isinstance(piece, Node) and info(piece).role is Role.COMMIT:
            assert not is_ahead, "a step may end here, so compute has waited for all that has gone aside"
            taken.update(made_aside)  # by what is done where parameters may not change
        taken.update(values)
        found.append(Crossing(is_aside, bool(values), tuple(values)))
    outputs: Any = gm.graph.output_node().args[0]
    loss, aux = outputs[:2]
    left = tuple(n for n in (loss, *aux) if n in made_aside and n not in taken)
    return [*found, Crossing(False, is_ahead or bool(left), left)]


def goes_aside(piece: Region | Node) -> bool:
    """Return whether a piece of a step is a line that goes aside."""
    return isinstance(piece, Node) and info(piece).is_aside
