"""Say what a strategy means, in plain torch: what the ranks of a cluster make of their gradients.

This is the specification that bound, lowered and emitted strategies are compared with. All ranks live in one process
and take every step together. A rank holds values of one range of the bucket, dense, or payloads of pieces of it; and
with them how much of which rank's gradient is inside:

    reduce_scatter@intra     2x2, gradients of 8 values

    rank 0   [0, 8)  {0: 1/4}         [0, 4)  {0: 1/4, 1: 1/4}
    rank 1   [0, 8)  {1: 1/4}   -->   [4, 8)  {0: 1/4, 1: 1/4}
    rank 2   [0, 8)  {2: 1/4}         [0, 4)  {2: 1/4, 3: 1/4}
    rank 3   [0, 8)  {3: 1/4}         [4, 8)  {2: 1/4, 3: 1/4}

No gradient may get into a sum twice, and all must be in it by the same share in the end. The network adds in the order
of the group. A compressor sees one piece at a time: the ranges in which its payload will be dealt out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor, ProposalReduction
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.legs import cut_points
from fxcomp.plan.strategy import Collective, Compress, Decompress, Propose, Step, Strategy

Inside = Mapping[int, Fraction]
"""The share of each rank's gradient in a value."""

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Payload:
    """One payload of one piece, or the sum of several ranks' payloads."""

    piece: range
    data: Tensor
    inside: Inside


@dataclass(frozen=True, slots=True)
class Holding:
    """The state of one rank between two steps: dense values of its range, or payloads."""

    extent: range
    values: Tensor | None
    inside: Inside
    """Of dense values."""
    payloads: tuple[Payload, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """The residuals of one compression, on every rank."""

    extents: tuple[range, ...]
    """The values of the bucket that each rank compressed."""
    insides: tuple[Inside, ...]
    """Whose gradients were in them."""
    residuals: tuple[Tensor, ...]
    weights: tuple[Fraction, ...]
    """Add up weight x residual over ranks and slots: what the applied mean lacks."""

    def missing(self, size: int) -> Tensor:
        """Add up what this slot keeps from the mean of a bucket, in fp64."""
        total = torch.zeros(size, dtype=torch.float64)
        for extent, residual, weight in zip(self.extents, self.residuals, self.weights, strict=True):
            total[extent.start : extent.stop] += float(weight) * residual.double()
        return total


@dataclass(frozen=True, slots=True)
class Meaning:
    results: tuple[Tensor, ...]
    """The mean gradient, as each rank has it."""
    slots: tuple[Slot, ...]


def meaning(
    strategy: Strategy,
    shapes: Shapes,
    cluster: Cluster,
    gradients: Sequence[Tensor],
    residuals: Sequence[Sequence[Tensor]] | None = None,
) -> Meaning:
    """Take one step with a flat gradient for each rank, and the residuals of each slot (all zero if not given)."""
    # Decoding gives a mean, the network a sum: packing scales so that both together end with the mean. The scales do
    # not depend on the gradients, so a bucket of one value tells them.
    ranks = range(cluster.world_size)
    begin = [_dense_holding(range(1), torch.zeros(1), {rank: Fraction(1)}) for rank in ranks]
    shares = _Walk(strategy, [(1,)], cluster, None).walk(begin)[-1][0].inside
    assert shares.keys() == set(ranks), f"the gradients of {sorted(set(ranks) - shares.keys())} do not arrive"
    scales = [Fraction(1, cluster.world_size) / shares[rank] for rank in ranks]

    extent = range(sum(map(math.prod, shapes)))
    begin = [_dense_holding(extent, gradients[r] * float(scales[r]), {r: scales[r]}) for r in ranks]
    walk = _Walk(strategy, shapes, cluster, residuals)
    ends = walk.walk(begin)[-1]
    equal = dict.fromkeys(ranks, Fraction(1, cluster.world_size)) if extent else {}
    assert all(end.inside == equal for end in ends), "gradients do not count alike"
    return Meaning(tuple(map(_dense, ends)), tuple(walk.slots))


def holdings_of(strategy: Strategy, shapes: Shapes, cluster: Cluster) -> list[list[Holding]]:
    """Return what each rank holds before each step, and at the end. Values are zero: this is about whose they are."""
    size = sum(map(math.prod, shapes))
    begin = [_dense_holding(range(size), torch.zeros(size), {r: Fraction(1)}) for r in range(cluster.world_size)]
    return _Walk(strategy, shapes, cluster, None).walk(begin)


class _Walk:
    """All ranks, step by step."""

    def __init__(
        self, strategy: Strategy, shapes: Shapes, cluster: Cluster, residuals: Sequence[Sequence[Tensor]] | None
    ) -> None:
        self.strategy, self.shapes, self.cluster, self.residuals = strategy, shapes, cluster, residuals
        self.edges = (0, *accumulate(map(math.prod, shapes)))
        self.grain = math.lcm(*(compressor.grain for compressor in strategy.compressors))
        """The grain of shards, but for the dense ones that a strategy begins with."""
        self.open: list[tuple[Collective, list[range]]] = []
        """The collectives that have split the bucket, and what each rank had before."""
        self.bound: Compressor | None = None
        self.proposals: list[Tensor] = []
        self.agreed: list[Tensor | None] = [None] * cluster.world_size
        self.slots: list[Slot] = []

    def walk(self, holdings: list[Holding]) -> list[list[Holding]]:
        """Return what ranks hold before each step, and at the end."""
        found = [holdings]
        for number, step in enumerate(self.strategy.steps):
            match step:
                case Propose():
                    self._propose(holdings, step)
                case Compress():
                    holdings = self._compress(holdings, step, _splits_of_payload(self.strategy.steps[number + 1 :]))
                case Decompress():
                    holdings = [self._decompress(rank, holding) for rank, holding in enumerate(holdings)]
                    self.agreed = [None] * len(holdings)
                case Collective() if self.proposals:
                    self._agree(step)
                case Collective():
                    holdings = self._meet(holdings, step)
            found.append(holdings)
        return found

    # Compressing

    def _propose(self, holdings: Sequence[Holding], step: Propose) -> None:
        bound = self._bound(step.compressor, holdings)
        for rank, holding in enumerate(holdings):
            given = EncoderInput(_dense(holding), self._residual(rank, holding), self._segments(holding.extent))
            self.proposals.append(bound.propose_reference(given))

    def _agree(self, step: Collective) -> None:
        assert self.bound is not None, "ranks agree on what has been proposed"
        takes_largest = self.bound.facts.agreement is ProposalReduction.MAX
        for group in self.cluster.groups(step.level):
            proposals = [self.proposals[rank] for rank in group]
            agreed = torch.stack(proposals).amax(dim=0) if takes_largest else _sum(proposals)
            for rank in group:
                self.agreed[rank] = agreed
        self.proposals = []

    def _compress(self, holdings: Sequence[Holding], step: Compress, splits: Sequence[Collective]) -> list[Holding]:
        bound = self._bound(step.compressor, holdings)
        assert not bound.has_state, f"{bound} has a state, which is not told here"
        found: list[Holding] = []
        residuals: list[Tensor] = []
        for rank, holding in enumerate(holdings):
            residual = self._residual(rank, holding)
            payloads: list[Payload] = []
            left_out = [torch.empty(0)]
            for piece in self._pieces(rank, holding.extent, splits):
                of_extent = slice(piece.start - holding.extent.start, piece.stop - holding.extent.start)
                values, before = _dense(holding)[of_extent], residual[of_extent]
                given = EncoderInput(values, before, self._segments(piece), None, self.agreed[rank])
                made = bound.compress_reference(given)
                assert made.residual is not None, "a residual goes in and comes out"
                payloads.append(Payload(piece, made.payload, holding.inside))
                left_out.append(made.residual)
            found.append(Holding(holding.extent, None, {}, tuple(payloads)))
            residuals.append(torch.cat(left_out))
        extents = tuple(holding.extent for holding in holdings)
        weights = tuple(self._weight(holding, holdings) for holding in holdings)
        insides = tuple(holding.inside for holding in holdings)
        self.slots.append(Slot(extents, insides, tuple(residuals), weights))
        return found

    def _decompress(self, rank: int, holding: Holding) -> Holding:
        """Take the mean of the payloads of each piece, in the order in which they came."""
        assert self.bound is not None, "a decompressed value has been compressed"
        decoded = [torch.empty(0)]
        insides: list[Inside] = []
        for piece, payloads in _by_piece(holding.payloads).items():
            data = torch.cat([payload.data for payload in payloads])
            received = DecoderInput(data, len(payloads), self._segments(piece), self.agreed[rank])
            decoded.append(self.bound.decompress_reference(received))
            inside = _together(payload.inside for payload in payloads)
            insides.append({rank: share / len(payloads) for rank, share in inside.items()})
        return _dense_holding(holding.extent, torch.cat(decoded), _alike(insides))

    def _bound(self, compressor: Compressor, holdings: Sequence[Holding]) -> Compressor:
        """Fill in what a compressor computes from shapes, and from the number of sums that are still to be added."""
        added = max(len(holding.inside) for holding in holdings)
        self.bound = compressor.bound_to(self.shapes, self.cluster.world_size // added)
        return self.bound

    def _residual(self, rank: int, holding: Holding) -> Tensor:
        if self.residuals is None:
            return torch.zeros(len(holding.extent))
        return self.residuals[len(self.slots)][rank]

    def _weight(self, holding: Holding, holdings: Sequence[Holding]) -> Fraction:
        """Say by how much to multiply what this rank holds to get its share of the mean."""
        if not holding.inside:
            return Fraction(0)
        share = next(iter(holding.inside.values()))  # of every gradient in it, as they end with the same share
        same = sum(other.extent == holding.extent and other.inside == holding.inside for other in holdings)
        return Fraction(1, self.cluster.world_size) / share / same

    # Sending

    def _meet(self, holdings: Sequence[Holding], step: Collective) -> list[Holding]:
        met = list(holdings)
        before: list[range] | None = None
        if self.open and self.open[-1][0].level is step.level and not step.kind.splits:
            before = self.open.pop()[1]
        elif step.kind.splits:
            self.open.append((step, [holding.extent for holding in holdings]))
        for group in self.cluster.groups(step.level):
            mine = [holdings[rank] for rank in group]
            if before is not None:
                after = _joined(mine, step.kind, before[group[0]])
            elif step.kind.splits:
                parts = self._split(mine[0].extent, step, len(group))
                after = [_summed([_part(each, part) for each in mine], step.kind) for part in parts]
            else:
                after = [_summed(mine, step.kind)] * len(group)
            for rank, holding in zip(group, after, strict=True):
                met[rank] = holding
        return met

    # Ranges

    def _split(self, extent: range, split: Collective, ranks: int) -> list[range]:
        if split.kind.is_rooted:
            return [extent, *[range(extent.stop, extent.stop)] * (ranks - 1)]
        is_leading = split in self.strategy.steps[: self.strategy.leading_splits]
        cuts = cut_points(self._segments(extent), ranks, 1 if is_leading else self.grain)
        return [range(extent.start + start, extent.start + stop) for start, stop in pairwise(cuts)]

    def _pieces(self, rank: int, extent: range, splits: Sequence[Collective]) -> list[range]:
        """Cut a range as the collectives will that deal its payload out; nothing is made of empty pieces."""
        pieces = [extent]
        for split in splits:
            group = self.cluster.group(split.level, rank)
            pieces = [part for piece in pieces for part in self._split(piece, split, len(group))]
            rank = group[0] if split.kind.is_rooted else rank  # which deals out what it has got
        return [piece for piece in pieces if piece]

    def _segments(self, piece: range) -> tuple[int, ...]:
        """List how many values of each parameter are in a range."""
        overlaps = (range(max(start, piece.start), min(stop, piece.stop)) for start, stop in pairwise(self.edges))
        return tuple(len(overlap) for overlap in overlaps if overlap)


def _splits_of_payload(steps: Sequence[Step]) -> list[Collective]:
    """List the splits before the next decompression."""
    splits: list[Collective] = []
    for step in steps:
        if isinstance(step, Decompress):
            break
        if isinstance(step, Collective) and step.kind.splits:
            splits.append(step)
    return splits


def _part(holding: Holding, part: range) -> Holding:
    """Cut out of what a rank holds what it sends to the owner of a part."""
    if holding.values is None:
        inside = tuple(p for p in holding.payloads if part.start <= p.piece.start and p.piece.stop <= part.stop)
        return replace(holding, extent=part, payloads=inside)
    start = part.start - holding.extent.start
    return _dense_holding(part, holding.values[start : start + len(part)], holding.inside)


def _summed(holdings: Sequence[Holding], kind: CollectiveKind) -> Holding:
    """Add what several ranks hold of one range, or lay their payloads beside each other."""
    extent = holdings[0].extent
    assert all(holding.extent == extent for holding in holdings), "ranks add up different values"
    if kind.sums and holdings[0].values is not None:
        return _dense_holding(extent, _sum(list(map(_dense, holdings))), _together(h.inside for h in holdings))
    payloads = tuple(payload for holding in holdings for payload in holding.payloads)
    if kind.sums:
        payloads = tuple(
            Payload(piece, _sum([p.data for p in same]), _together(p.inside for p in same))
            for piece, same in _by_piece(payloads).items()
        )
    return Holding(extent, None, {}, payloads)


def _joined(holdings: Sequence[Holding], kind: CollectiveKind, extent: range) -> list[Holding]:
    """Give every rank what the first one has, or all shards."""
    owners = holdings[:1] if kind is CollectiveKind.BROADCAST else holdings
    payloads = tuple(payload for owner in owners for payload in owner.payloads)
    if holdings[0].values is None:
        joined = Holding(extent, None, {}, payloads)
    else:
        values = torch.cat(list(map(_dense, owners)))
        joined = _dense_holding(extent, values, _alike(owner.inside for owner in owners if owner.extent))
    return [joined] * len(holdings)


def _by_piece(payloads: Iterable[Payload]) -> dict[range, list[Payload]]:
    found: dict[range, list[Payload]] = {}
    for payload in payloads:
        found.setdefault(payload.piece, []).append(payload)
    return dict(sorted(found.items(), key=lambda item: item[0].start))


def _together(insides: Iterable[Inside]) -> Inside:
    """Unite what is inside several values that are added."""
    found: dict[int, Fraction] = {}
    for inside in insides:
        twice = sorted(found.keys() & inside.keys())
        assert not twice, f"the gradients of ranks {twice} count twice"
        found |= inside
    return dict(sorted(found.items()))


def _alike(insides: Iterable[Inside]) -> Inside:
    """Return what is inside every one of several shards."""
    found = list(insides)
    assert all(inside == found[0] for inside in found), "shards are of different sums"
    return found[0] if found else {}


def _dense_holding(extent: range, values: Tensor, inside: Inside) -> Holding:
    assert len(values) == len(extent), "a rank holds the values of its range"
    return Holding(extent, values, inside if extent else {})


def _dense(holding: Holding) -> Tensor:
    assert holding.values is not None, "these are payloads"
    return holding.values


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
