"""Bind a strategy to a bucket, a cluster and a rank: its operations (legs) with sizes.

    compress(int4) > all_to_all@world > decompress > compress(int8) > all_gather@world > decompress      4 ranks, rank 1

    Encode   slot 0, pieces [0, 25) [25, 50) [50, 75) [75, 100)      one payload for each owner
    Send     all_to_all, cut (20, 20, 20, 20)                        payload bytes per rank
    Decode   slot 0, pieces [25, 50), 4 payloads                     mean of this rank's shard
    Encode   slot 1, pieces [25, 50)
    Send     all_gather, cut (29, 29, 29, 29)
    Decode   slot 1, pieces [0, 25) [25, 50) [50, 75) [75, 100)

Legs are lowered to nodes and priced. A *slot* is one compression of the bucket, with its own residual and state. A
*piece* is a range of the bucket's values that is compressed separately. Decoding averages payloads, but the network
only adds: packing scales values such that the result is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.plan.interpret import Collective, Compress, Decompress, Propose, Standing
from fxcomp.plan.kinds import CollectiveKind, ElementType
from fxcomp.plan.legs import (
    Cut,
    Decode,
    Encode,
    Leg,
    Piece,
    Route,
    Send,
    Turn,
    Unit,
    payload_elements_of,
    segments_of,
    shards,
)
from fxcomp.plan.strategy import Strategy


def route_of(
    strategy: Strategy,
    shapes: Sequence[Sequence[int]],
    cluster: Cluster,
    rank: int = 0,
    element_type: ElementType = ElementType.F32,
) -> Route:
    """Return one rank's route, for a bucket of parameters of these shapes."""
    return _Walk(strategy, shapes, cluster, rank, element_type).route()


@dataclass(frozen=True, slots=True)
class _RouteRow:
    """Dimension of the payload layout: pieces of `split`, or ranks' payloads for one piece if `split` is None."""

    split: Collective | None
    count: int


class _Walk:
    """Builds the legs of one rank."""

    def __init__(
        self,
        strategy: Strategy,
        shapes: Sequence[Sequence[int]],
        cluster: Cluster,
        rank: int,
        element_type: ElementType,
    ) -> None:
        self.strategy, self.shapes, self.cluster, self.rank = strategy, shapes, cluster, rank
        self.element_type = element_type
        self.edges = (0, *accumulate(map(math.prod, shapes)))
        self.grain = math.lcm(*(compressor.grain for compressor in strategy.compressors))
        self.extents = [range(self.edges[-1])]
        """Nested ranges: the bucket, then this rank's part after each split not yet joined."""
        self.rows: list[_RouteRow] = []
        """Dimensions of the current payload, outermost first."""
        self.encoder: Encode | None = None
        self.slot = -1
        self.held = strategy.held
        self.leading = strategy.steps[: strategy.leading_splits]
        # Caches
        self.parts: dict[tuple[Piece, int], list[Piece]] = {}
        self.segments: dict[Piece, tuple[int, ...]] = {}
        self.payloads: dict[tuple[int, ...], int] = {}
        """Payload elements of a piece, by its segments."""
        self.counts = self._counts()
        self.scale = self._scale()
        self.weight = 1 / (self.scale * cluster.world_size)

    def route(self) -> Route:
        strategy = self.strategy
        stages: list[list[Leg]] = [[]]
        for number, (held, step) in enumerate(zip(self.held, strategy.steps, strict=False)):
            stages[-1].append(self._leg(number, held, step))
            if isinstance(step, Collective):
                stages.append([])
        whole = range(self.edges[-1])
        return Route(self.scale, whole, tuple(map(tuple, stages)), self.element_type)

    def _counts(self) -> dict[Collective, int]:
        """Return the group size of each collective. After a rooted collective, use the root's groups."""
        counts: dict[Collective, int] = {}
        at = self.rank
        for held, step in zip(self.held, self.strategy.steps, strict=False):
            if isinstance(step, Collective) and not self._joins(held, step):
                group = self.cluster.group(step.level, at)
                counts[step] = len(group)
                at = group[0] if step.kind.is_rooted else at
        return counts

    def _scale(self) -> Fraction:
        """Return the factor that scales packed values so that the result is the mean."""
        payloads = 1
        piled = 1
        for held, step in zip(self.held, self.strategy.steps, strict=False):
            match step:
                case Compress():
                    piled = 1
                case Decompress():
                    payloads *= piled
                case Collective() if held.compressor is not None and not step.kind.sums and not self._joins(held, step):
                    piled *= self.counts[step]
                case _:
                    pass
        return Fraction(payloads, self.cluster.world_size)

    def _leg(self, number: int, held: Standing, step: Any) -> Leg:
        match step:
            case Propose():
                return self._encode(step, held, [], is_proposal=True)
            case Compress():
                return self._encode(step, held, self._dealt_later(number))
            case Decompress():
                return self._decode(step)
            case _:
                return self._send(held, step)

    # Compressing

    def _dealt_later(self, number: int) -> list[Collective]:
        """Return the collectives that split a payload before decoding. Each part must be a separate payload."""
        found: list[Collective] = []
        for step in self.strategy.steps[number + 1 :]:
            if isinstance(step, Decompress):
                break
            if isinstance(step, Collective) and step.kind.splits:
                found.append(step)
        return found

    def _encode(
        self, step: Propose | Compress, held: Standing, dealt: list[Collective], *, is_proposal: bool = False
    ) -> Encode:
        if not (isinstance(step, Compress) and held.agreed is not None):
            self.slot += 1
        shapes = self._shapes(self.extents[-1])
        bound = step.compressor.bound_to(shapes, self._ranks_missing(held))
        self.rows = [_RouteRow(split, self.counts[split]) for split in dealt]
        pieces = tuple(self._pieces(self.extents[-1], self.rows))
        segments = tuple(map(self._segments, pieces))
        made = Encode(self.slot, bound, step.device, pieces, segments, self._unit(held), self._place(held), is_proposal)
        self.encoder, self.payloads = made, {}
        return made

    def _decode(self, step: Decompress) -> Decode:
        made = self.encoder
        assert made is not None, "a decompressed value has been compressed"
        payloads = math.prod(row.count for row in self.rows if row.split is None)
        pieces = tuple(self._pieces(self.extents[-1], [row for row in self.rows if row.split is not None]))
        self.weight *= payloads
        self.rows, self.encoder = [], None
        segments = tuple(map(self._segments, pieces))
        return Decode(made.slot, made.compressor, step.device, pieces, segments, payloads)

    def _shapes(self, extent: Piece) -> Sequence[Sequence[int]]:
        if extent == range(self.edges[-1]):
            return [shape for shape in self.shapes if math.prod(shape)]  # segments omit empty parameters too
        return [(size,) for size in self._segments(extent)]

    def _ranks_missing(self, held: Standing) -> int:
        if not held.summed:
            return self.cluster.world_size  # hosts may be uneven
        return math.prod(self.cluster.length_of(axis) for axis in Level.WORLD.axes - held.summed)

    def _unit(self, held: Standing) -> Unit:
        split = {axis for each in held.splits for axis in each.level.axes}
        same = math.prod(self.cluster.length_of(axis) for axis in held.summed if axis not in split)
        return Unit(self.weight / same, self.weight * self._ranks_missing(held))

    def _place(self, held: Standing) -> int:
        return self.cluster.place_along(Level.WORLD.axes - held.summed, self.rank)

    # Sending

    def _send(self, held: Standing, step: Collective) -> Send:
        group = self.cluster.group(step.level, self.rank)
        ranks, place = len(group), group.index(self.rank)
        kind, level, encoder = step.kind, step.level, self.encoder
        if encoder is not None and encoder.is_proposal:
            facts = encoder.compressor.facts
            how = "max" if facts.agreement is not None and facts.agreement.value == "max" else "sum"
            self.encoder = None
            return Send(kind, level, 1, place, ranks, facts.proposal_dtype.itemsize, encoder.slot, how)
        itemsize = self.element_type.itemsize if encoder is None else encoder.compressor.payload_dtype.itemsize
        slot = None if encoder is None else encoder.slot

        def sent(cut: Cut, turned: Turn | None = None) -> Send:
            return Send(kind, level, cut, place, ranks, itemsize, slot, turned=turned)

        if self._joins(held, step):
            return sent(self._joined_cut(held.splits[-1], ranks, encoder))
        if kind.splits:
            cut, turned = self._dealt_cut(step, ranks, encoder)
            self.extents.append(self._split(self.extents[-1], step, ranks)[place])
            if encoder is not None:
                self.rows = [row for row in self.rows if row.split is not step]
                self.rows = self.rows if kind.sums else [_RouteRow(None, self.counts[step]), *self.rows]
            return sent(cut, turned)
        if kind is CollectiveKind.ALL_GATHER:
            self.rows.insert(0, _RouteRow(None, self.counts[step]))
            return sent(ranks)
        return sent(1)

    def _joins(self, held: Standing, step: Collective) -> bool:
        if held.proposed is not None or not held.splits:
            return False
        last = held.splits[-1]
        return last.level is step.level and last.kind.joined_by is step.kind and not step.kind.splits

    def _joined_cut(self, split: Collective, ranks: int, encoder: Encode | None) -> Cut:
        self.extents.pop()
        parts = self._split(self.extents[-1], split, ranks)
        cut = tuple(len(part) if encoder is None else self._payload(part, self.rows) for part in parts)
        if encoder is not None:
            self.rows.insert(0, _RouteRow(split, self.counts[split]))
        return cut

    def _dealt_cut(self, step: Collective, ranks: int, encoder: Encode | None) -> tuple[Cut, Turn | None]:
        parts = self._split(self.extents[-1], step, ranks)
        if encoder is None:
            return tuple(map(len, parts)), None
        number = next(k for k, row in enumerate(self.rows) if row.split is step)
        outer, inner = math.prod(row.count for row in self.rows[:number]), self.rows[number + 1 :]
        sizes = tuple(self._payload(part, inner) for part in parts)
        turned = Turn(outer, sizes) if outer > 1 and ranks > 1 else None
        return tuple(outer * size for size in sizes), turned

    def _payload(self, extent: Piece, rows: Sequence[_RouteRow]) -> int:
        assert self.encoder is not None, "a payload has been compressed"
        payloads = math.prod(row.count for row in rows if row.split is None)
        pieces = self._pieces(extent, [row for row in rows if row.split is not None])
        return payloads * sum(map(self._elements, pieces))

    def _elements(self, piece: Piece) -> int:
        assert self.encoder is not None, "a payload has been compressed"
        segments = self._segments(piece)
        found = self.payloads.get(segments)
        if found is None:
            found = self.payloads[segments] = payload_elements_of(self.encoder.compressor, segments)
        return found

    # Pieces

    def _pieces(self, extent: Piece, rows: Sequence[_RouteRow]) -> list[Piece]:
        if not rows:
            return [extent]
        split, ranks = rows[0].split, rows[0].count
        assert split is not None, "payloads of one piece lie together"
        return [piece for part in self._split(extent, split, ranks) for piece in self._pieces(part, rows[1:])]

    def _split(self, extent: Piece, split: Collective, ranks: int) -> list[Piece]:
        found = self.parts.get((extent, id(split)))
        if found is None:
            found = self.parts[extent, id(split)] = self._cut(extent, split, ranks)
        return found

    def _cut(self, extent: Piece, split: Collective, ranks: int) -> list[Piece]:
        if split.kind.is_rooted:
            end = range(extent.stop, extent.stop)
            return [extent, *[end] * (ranks - 1)]
        # Leading splits cut dense values, so no compressor's block crosses their borders.
        grain = 1 if split in self.leading else self.grain
        return shards(self.edges, extent, ranks, grain)

    def _segments(self, piece: Piece) -> tuple[int, ...]:
        found = self.segments.get(piece)
        if found is None:
            found = self.segments[piece] = segments_of(self.edges, piece)
        return found
