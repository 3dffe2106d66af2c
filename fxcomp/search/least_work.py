"""Bound the work of a bucket from below by a linear function: a fixed time plus a time per element.

Prices are non-decreasing functions of a size, piecewise linear or the minimum of such functions. The bound a + r x,
with a >= 0, equals the price at the largest size. A bound below the price at every break of slope is below the price
everywhere. Sizes are at least proportional to a bucket's elements, because payloads are rounded up per segment. A shard
may be one grain (a compressor's block) smaller than an equal part, so the time of a grain is subtracted from a.

The bound omits host copies, casts, transposes and commits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.cost.table import CostTable
from fxcomp.plan.kinds import ElementType, Stream, wire_of
from fxcomp.plan.legs import Decode, Encode, Route
from fxcomp.plan.lines import BucketLine, LineKind, lines_of
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Device, Strategy

_CANONICAL = ((1 << 15, 1 << 15),) * 16  # so large that rounding up is negligible
_ROUNDED = 8  # maximum number of grains by which a shard is rounded up
_JUST_BELOW = 1 - 1e-9  # factor for the size just before a break, where the price may jump

STREAMS = tuple(Stream)
COMPUTE = STREAMS.index(Stream.COMPUTE)
_CPU, _ARRIVING = STREAMS.index(Stream.CPU), STREAMS.index(Stream.CPU_ARRIVING)


@dataclass(frozen=True)
class Least:
    """Least work of a bucket with one strategy, in µs, by stream."""

    fixed_us: tuple[float, ...]
    us_per_element: tuple[float, ...]
    tail_us: float
    """Part of the compute stream's work that comes after the last collective."""
    tail_us_per_element: float


_NOTHING = Least((0.0,) * len(STREAMS), (0.0,) * len(STREAMS), 0.0, 0.0)  # work of an empty gradient

Line = tuple[float, float]


def line_below(price: Callable[[float], float], breaks: Sequence[float], largest: float) -> Line:
    """Return (a, r) with a + r x <= price(x) for every x in (0, largest], and a >= 0."""
    sizes = [0.0, *(size for size in breaks if 0 < size < largest)]
    points = [(size, min(price(size), price(size * _JUST_BELOW))) for size in sizes]
    end_us = price(largest)
    slope = max(0.0, *((end_us - us) / (largest - size) for size, us in points))
    fixed_us = end_us - slope * largest
    if fixed_us >= 0:
        return fixed_us, slope
    return 0.0, min([end_us / largest, *(us / size for size, us in points if size > 0)])


@dataclass
class LeastWork:
    costs: CostTable
    cluster: Cluster
    elements: int
    itemsize: int = 4
    """Bytes per element of the widest element type."""
    known: dict[object, Line] = field(default_factory=dict[object, Line])

    def of(
        self, strategy: Strategy, element_type: ElementType, shape: Sequence[int] | None = None, *, is_cut: bool = False
    ) -> Least:
        """Bound buckets of an element type with this strategy. Pass the gradient's `shape` if payloads depend on it.

        With `is_cut` the bound omits proposals, because small parts of a gradient may need none.
        """
        shapes = _CANONICAL if shape is None else (tuple(shape),)
        route = route_of(strategy, shapes, self.cluster, element_type=element_type)
        elements = sum(map(math.prod, shapes))
        if elements == 0:
            return _NOTHING
        writer = _LeastWorkWriter(self, strategy, elements, is_exact=shape is not None, proposes=not is_cut)
        return writer.least(route)

    def line(self, key: object, price: Callable[[float], float], breaks: Sequence[float], largest: float) -> Line:
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = line_below(price, breaks, max(1.0, largest))
        return found


class _LeastWorkWriter:
    def __init__(self, work: LeastWork, strategy: Strategy, elements: int, *, is_exact: bool, proposes: bool) -> None:
        self.proposes = proposes
        self.work, self.costs, self.cluster = work, work.costs, work.cluster
        self.elements = elements
        grain = math.lcm(*(compressor.grain for compressor in strategy.compressors))
        self.rounded = 1.0 if is_exact else 1 - _ROUNDED * grain * self.cluster.world_size / elements
        self.grain = grain
        self.leading = strategy.leading_splits
        """Number of remaining splits of dense values, which may cut at any element."""
        self.short = 0
        """Elements by which a shard may be smaller than an equal part."""
        self.fixed, self.rates = [0.0] * len(STREAMS), [0.0] * len(STREAMS)
        self.tail = (0.0, 0.0)

    def least(self, route: Route) -> Least:
        for lines in lines_of(route)[:-1]:
            self.tail = (0.0, 0.0)
            for line in lines:
                if line.kind in _BOUNDS:
                    _BOUNDS[line.kind](self, line)
        return Least(tuple(self.fixed), tuple(self.rates), *self.tail)

    def pack(self, line: BucketLine) -> None:
        self._add(COMPUTE, (0.0, self.costs.pack_us(line.size / self.elements)), self.elements)

    def encode(self, line: BucketLine) -> None:
        leg = line.encode
        what = self.costs.propose_us if leg.is_proposal else self.costs.encode_us
        self._device("encode", leg, lambda n: what(leg.compressor, math.floor(n), leg.device), leg.compressor)

    def decode(self, line: BucketLine) -> None:
        leg = line.decode
        self._device(
            f"decode {leg.payloads}",
            leg,
            lambda n: self.costs.decode_us(leg.compressor, math.floor(n), leg.payloads, leg.device),
            leg.compressor,
        )

    def _device(self, what: str, leg: Encode | Decode, price: Callable[[float], float], compressor: Compressor) -> None:
        key = (what, getattr(leg, "is_proposal", False), str(compressor), leg.device)
        breaks = self.costs.compressor_breaks(compressor, leg.device, getattr(leg, "payloads", 1))
        line = self.work.line(key, price, breaks, self.work.elements)
        pool = _CPU if isinstance(leg, Encode) else _ARRIVING
        short = self.short if leg.elements < self.elements else 0
        self._add(COMPUTE if leg.device is Device.GPU else pool, line, leg.elements, short)

    def send(self, line: BucketLine) -> None:
        leg = line.send
        if leg.ranks == 1:
            return
        size = 0.0 if line.kind is LineKind.AGREE and not self.proposes else float(line.size)
        what = leg.kind, leg.level
        breaks = self.costs.collective_breaks(*what, self.cluster)
        itemsize = max(4, self.work.itemsize)
        largest = float(itemsize * self.work.elements * max(1, self.cluster.world_size))
        price = self.work.line(what, lambda x: self.costs.collective(*what, x, self.cluster).us, breaks, largest)
        wire = STREAMS.index(wire_of(leg.level, self.cluster.hosts))
        self._add(wire, price, size, 0 if leg.is_priced_by_largest else itemsize * self.short)
        if leg.kind.splits:
            self.short = max(self.short, 1 if self.leading else self.grain)
            self.leading = max(0, self.leading - 1)
        self.fixed[STREAMS.index(line.stream)] += self.costs.launch_us

    def _add(self, stream: int, line: Line, size: float, short: int = 0) -> None:
        """Add an operation's time, at least a + r · (size) for `line` = (a, r), converted to the bucket's elements.

        Rounding may make the operation's size smaller than proportional to the elements, by at most `short`.
        """
        fixed, rate = line[0] - line[1] * short, line[1] * size / self.elements * self.rounded
        if fixed < 0:
            return
        self.fixed[stream] += fixed
        self.rates[stream] += rate
        if stream == COMPUTE:
            self.tail = self.tail[0] + fixed, self.tail[1] + rate


_BOUNDS: dict[LineKind, Callable[[_LeastWorkWriter, BucketLine], None]] = {
    LineKind.PACK: _LeastWorkWriter.pack,
    LineKind.PROPOSE: _LeastWorkWriter.encode,
    LineKind.COMPRESS: _LeastWorkWriter.encode,
    LineKind.DECOMPRESS: _LeastWorkWriter.decode,
    LineKind.AGREE: _LeastWorkWriter.send,
    LineKind.SEND: _LeastWorkWriter.send,
}
