"""Count the bytes that each collective of a route is priced by: one rank's part for a gather, else the whole."""

from __future__ import annotations

from fxcomp.plan.legs import Decode, Encode, Route, Send


def sent_bytes(route: Route) -> list[tuple[Send, int]]:
    """List the collectives in order, with their sizes on the route's rank: shards may differ between ranks."""
    dense = route.element_type.itemsize
    held, proposal = dense * len(route.whole), None
    found: list[tuple[Send, int]] = []
    for leg in route.legs:
        match leg:
            case Encode() if leg.is_proposal:
                proposal = sum(map(leg.compressor.proposal_bytes, leg.segments))
            case Encode():
                held = leg.payload_elements * leg.compressor.payload_dtype.itemsize
            case Decode():
                held = dense * leg.elements
            case Send() if proposal is not None:
                found.append((leg, proposal))
                proposal = None
            case Send():
                found.append((leg, leg.works_on(held)))
                held = leg.leaves(held)
    return found
