"""Simulate compressed averaging over several ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, ProposalReduction
from fxcomp.compressors.randomness import key_of


@dataclass(slots=True)
class Replica:
    """Residual and compressor state of one rank."""

    residual: Tensor | None
    state: Tensor | None


def replicas_of(
    compressor: Compressor, segments: Sequence[int], ranks: int = 1, *, feedback: bool, seed: int = 0
) -> list[Replica]:
    return [
        Replica(
            torch.zeros(sum(segments)) if feedback else None, fresh_state(compressor, segments, rank=rank, seed=seed)
        )
        for rank in range(ranks)
    ]


def fresh_state(compressor: Compressor, segments: Sequence[int], *, rank: int = 0, seed: int = 0) -> Tensor | None:
    """Return a bucket's first state; None if the compressor has no state. Keys are made from parameter indices."""
    if not compressor.has_state:
        return None
    owners = [compressor.of_segment(place) for place in range(len(segments))]
    parts = [
        owner.fresh_state(size, key_of(seed, str(place)), rank)
        for place, (owner, size) in enumerate(zip(owners, segments, strict=True))
        if owner.state_elements(size)
    ]
    return torch.cat([torch.empty(0, dtype=compressor.facts.state_dtype), *parts])


def average(
    compressor: Compressor,
    buckets: Sequence[Tensor],
    replicas: Sequence[Replica],
    segments: Sequence[int],
    shapes: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Return the mean of all ranks' buckets after compression. Residuals and states of `replicas` are updated."""
    ranks = len(buckets)
    bound = compressor.bound_to(shapes, ranks)
    if bound.is_linear:
        buckets = [bucket * (1.0 / ranks) for bucket in buckets]
    agreed = agree(bound, buckets, replicas, segments)
    payloads = [
        encode(bound, bucket, replica, segments, agreed) for bucket, replica in zip(buckets, replicas, strict=True)
    ]
    payload = _sum(payloads) if bound.is_linear else torch.cat(payloads)
    if bound.facts.state_from_payload:
        for replica in replicas:
            replica.state = payload.clone()
    return decode(bound, payload, 1 if bound.is_linear else ranks, segments, agreed, replicas[0].state)


@dataclass(slots=True)
class Shard:
    """Part of a bucket that one rank averages, with the states of its encoders."""

    segments: tuple[int, ...]
    workers: list[Replica]
    """Each rank's state for encoding its own gradient."""
    owner: Replica
    """State of the rank that encodes the mean. Its residual has the scale of the mean."""


def shards_of(
    first: Compressor,
    second: Compressor,
    segments: Sequence[int],
    borders: Sequence[int],
    *,
    owner_feedback: bool = True,
    seed: int = 0,
) -> list[Shard]:
    """Return each rank's shard with new states. `first` encodes gradients with error feedback, `second` the mean."""
    ranks = len(borders) - 1
    found: list[Shard] = []
    for number, (low, high) in enumerate(pairwise(borders)):
        inside, key = _segments_between(segments, low, high), key_of(seed, "shard", number)
        owner = Replica(
            torch.zeros(high - low) if owner_feedback else None, fresh_state(second, inside, rank=ranks, seed=key)
        )
        found.append(Shard(inside, replicas_of(first, inside, ranks, feedback=True, seed=key), owner))
    return found


def average_in_two_shots(
    first: Compressor, second: Compressor, buckets: Sequence[Tensor], shards: Sequence[Shard]
) -> Tensor:
    """Return the mean, compressed twice. Residuals and states of `shards` are updated.

    Every rank encodes each shard separately with `first`. The shard's owner decodes, averages in rank order, and
    encodes the mean with `second`.
    """
    sizes = [sum(shard.segments) for shard in shards]
    decoded: list[Tensor] = []
    parts = [torch.split_with_sizes(bucket, sizes) for bucket in buckets]
    for number, shard in enumerate(shards):
        mean = average(first, [part[number] for part in parts], shard.workers, shard.segments)
        decoded.append(average(second, [mean], [shard.owner], shard.segments))
    return torch.cat(decoded)


def agree(
    compressor: Compressor, buckets: Sequence[Tensor], replicas: Sequence[Replica], segments: Sequence[int]
) -> Tensor | None:
    """Return the values that ranks agree on before they encode; None if the compressor needs no agreement."""
    if compressor.facts.agreement is None:
        return None
    proposals: list[Tensor] = []
    for bucket, replica in zip(buckets, replicas, strict=True):
        out = torch.full((compressor.proposal_elements(segments),), 77, dtype=compressor.facts.proposal_dtype)
        compressor.propose(bucket, replica.residual, segments, replica.state, out)
        proposals.append(out)
    return (
        _sum(proposals) if compressor.facts.agreement is ProposalReduction.SUM else torch.stack(proposals).amax(dim=0)
    )


def encode(
    compressor: Compressor, bucket: Tensor, replica: Replica, segments: Sequence[int], agreed: Tensor | None
) -> Tensor:
    payload = torch.full((compressor.payload_elements(segments),), 77, dtype=compressor.payload_dtype)
    compressor.encode(bucket, replica.residual, payload, segments, replica.state, agreed)
    return payload


def decode(
    compressor: Compressor,
    payloads: Tensor,
    ranks: int,
    segments: Sequence[int],
    agreed: Tensor | None,
    state: Tensor | None,
) -> Tensor:
    out = torch.full((sum(segments),), 77.0)
    compressor.decode(payloads, ranks, segments, out, agreed, state if compressor.facts.decode_needs_state else None)
    return out


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def _segments_between(segments: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    found: list[int] = []
    start = 0
    for size in segments:
        inside = min(start + size, high) - max(start, low)
        if inside > 0:
            found.append(inside)
        start += size
    return tuple(found)
