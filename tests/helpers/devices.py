"""One round of two ranks on a device, to compare with the same in plain torch on the processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, ProposalReduction
from fxcomp.testing.rounds import Replica, replicas_of
from fxcomp.testing.samples import gaussian

RANKS = 2


def round_on(
    device: torch.device, compressor: Compressor, bucket: Tensor, segments: Sequence[int], *, feedback: bool
) -> dict[str, Tensor]:
    """All that two ranks make of this bucket and another: by name, on the processor."""
    bound = compressor.bound_to((), 1)
    buckets = [bucket.to(device), gaussian(sum(segments), 5).to(device)]
    replicas = replicas_of(bound, segments, RANKS, feedback=feedback)
    for rank, replica in enumerate(replicas):
        if replica.residual is not None:
            replica.residual = 0.1 * gaussian(sum(segments), 7 + rank).to(device)
        if replica.state is not None:
            replica.state = replica.state.to(device)
    made: dict[str, Tensor] = {}
    proposals = [_propose(bound, b, r, segments) for b, r in zip(buckets, replicas, strict=True)]
    agreed = _reduce(bound, proposals)
    payloads: list[Tensor] = []
    for rank, (one, replica) in enumerate(zip(buckets, replicas, strict=True)):
        payload = torch.full((bound.payload_elements(segments),), 77, dtype=bound.payload_dtype, device=device)
        bound.encode(one, replica.residual, payload, segments, replica.state, agreed)
        payloads.append(payload)
        made |= {f"rank {rank}'s proposal": proposals[rank], f"rank {rank}'s payload": payload}
        if replica.residual is not None:
            made[f"rank {rank}'s residual"] = replica.residual
        if replica.state is not None:
            made[f"rank {rank}'s state"] = replica.state
    for ranks in (1,) if bound.is_linear else (1, RANKS):
        out = torch.full((sum(segments),), 77.0, device=device)
        state = replicas[0].state if bound.facts.decode_needs_state else None
        bound.decode(torch.cat(payloads[:ranks]), ranks, segments, out, agreed, state)
        made[f"mean of {ranks}"] = out
    return {name: tensor.cpu() for name, tensor in made.items()}


def _propose(bound: Compressor, bucket: Tensor, replica: Replica, segments: Sequence[int]) -> Tensor:
    proposal = bucket.new_full((bound.proposal_elements(segments),), 77, dtype=bound.facts.proposal_dtype)
    if bound.facts.agreement is not None:
        bound.propose(bucket, replica.residual, segments, replica.state, proposal)
    return proposal


def _reduce(bound: Compressor, proposals: Sequence[Tensor]) -> Tensor | None:
    if bound.facts.agreement is None:
        return None
    is_sum = bound.facts.agreement is ProposalReduction.SUM
    return proposals[0] + proposals[1] if is_sum else torch.maximum(proposals[0], proposals[1])
