"""Walk the legs of a bucket's route on all ranks in one process: payloads are real, the network is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import Decode, Encode, Route, Send
from fxcomp.testing.rounds import Replica, decode, encode


@dataclass
class Walker:
    """One rank on its way: what it holds of the bucket, and what it keeps for each slot."""

    route: Route
    held: Tensor
    replicas: dict[int, Replica]
    agreed: Tensor | None = None
    dense: Tensor | None = field(default=None)
    """The value that is compressed once the ranks have agreed."""


def walk(walkers: Sequence[Walker], cluster: Cluster) -> list[Tensor]:
    """Each rank's mean of what all of them hold; residuals and states change as a step changes them."""
    for walker in walkers:
        walker.held = walker.held * float(walker.route.scale)
    for legs in zip(*(walker.route.legs for walker in walkers), strict=True):
        if isinstance(legs[0], Send):
            before = [walker.held for walker in walkers]
            for rank, (walker, leg) in enumerate(zip(walkers, legs, strict=True)):
                group = cluster.group(leg.level, rank)
                _arrive(walker, _received(leg, [before[k] for k in group], [_leg(legs[k]) for k in group]))
        else:
            for walker, leg in zip(walkers, legs, strict=True):
                _encode(walker, leg) if isinstance(leg, Encode) else _decode(walker, leg)
    return [walker.held for walker in walkers]


def _leg(leg: object) -> Send:
    assert isinstance(leg, Send), "ranks are at the same leg"
    return leg


# Compressing: each piece by itself


def _encode(walker: Walker, leg: Encode) -> None:
    replica = walker.replicas.get(leg.slot, Replica(None, None))
    assert walker.held.numel() == leg.elements, f"{walker.held.numel()} values for {leg.pieces}"
    if leg.is_proposal:
        walker.dense, (segments,) = walker.held, leg.segments
        out = torch.zeros(leg.compressor.proposal_elements(segments), dtype=leg.compressor.facts.proposal_dtype)
        if segments:
            leg.compressor.propose(walker.held, replica.residual, segments, replica.state, out)
        walker.held = out
        return
    residuals, states = _by_piece(leg, replica)
    payloads = [torch.empty(0, dtype=leg.compressor.payload_dtype)]
    values = torch.split(walker.held, list(map(len, leg.pieces)))
    for value, residual, state, segments in zip(values, residuals, states, leg.segments, strict=True):
        if segments:
            payloads.append(encode(leg.compressor, value, Replica(residual, state), segments, walker.agreed))
    walker.held = torch.cat(payloads)
    assert walker.held.numel() == leg.payload_elements


def _by_piece(leg: Encode, replica: Replica) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Views of what is kept for each piece."""
    nothing = [None] * len(leg.pieces)
    residuals = nothing if replica.residual is None else torch.split(replica.residual, list(map(len, leg.pieces)))
    if replica.state is None:
        return residuals, nothing
    if len(leg.pieces) == 1:
        return residuals, [replica.state]
    sizes = [sum(map(leg.compressor.state_elements, segments)) for segments in leg.segments]
    return residuals, torch.split(replica.state, sizes)


def _decode(walker: Walker, leg: Decode) -> None:
    replica = walker.replicas.get(leg.slot, Replica(None, None))
    compressor, means, offset = leg.compressor, [torch.empty(0)], 0
    for segments in filter(None, leg.segments):
        length = leg.payloads * compressor.payload_elements(segments)
        payload, offset = walker.held[offset : offset + length], offset + length
        if compressor.facts.state_from_payload and replica.state is not None:
            replica.state.copy_(payload)
        means.append(decode(compressor, payload, leg.payloads, segments, walker.agreed, replica.state))
    assert offset == walker.held.numel(), f"{walker.held.numel() - offset} elements are left over"
    walker.held, walker.agreed = torch.cat(means), None


# Sending


def _arrive(walker: Walker, value: Tensor) -> None:
    if walker.dense is None:
        walker.held = value
    else:
        walker.agreed, walker.held, walker.dense = value, walker.dense, None


def _received(leg: Send, values: Sequence[Tensor], legs: Sequence[Send]) -> Tensor:
    if leg.kind is CollectiveKind.ALL_REDUCE:
        return torch.stack(list(values)).amax(dim=0) if leg.how == "max" else _sum(values)
    if not leg.kind.splits:
        return torch.cat(list(values))
    dealt = [_parts(each, value)[leg.place] for each, value in zip(legs, values, strict=True)]
    return _sum(dealt) if leg.kind.sums else torch.cat(dealt)


def _parts(leg: Send, value: Tensor) -> list[Tensor]:
    """The part for each rank of the group."""
    if leg.turned is not None:
        rows = value.view(leg.turned.outer, -1).split(leg.turned.sizes, dim=1)
        value = torch.cat([row.reshape(-1) for row in rows])
    return list(torch.split(value, list(leg.parts)))


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for other in values[1:]:
        total += other
    return total
