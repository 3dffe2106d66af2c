"""Measured entries of a cost table: collectives and compressors, with their keys."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from fxcomp.cluster.link import MOST_RANKS, format_gbit
from fxcomp.compressors import Compressor
from fxcomp.cost import collectives as formulas
from fxcomp.cost.piecewise import Fit, interpolate
from fxcomp.cost.reading import TEXT, listed, null_or, number, record, whole, wrong
from fxcomp.plan.kinds import CollectiveKind


def compressor_key(compressor: str, device: str, threads: int | None) -> str:
    """Return a key such as `int8(block=128)@cpu*2`: compressor, device, and threads (None on a GPU)."""
    return f"{compressor}@{device}{'' if threads is None else f'*{threads}'}"


@cache
def parse_compressor_key(key: str) -> tuple[str, str, int | None]:
    """Parse a key as compressor, device and threads. Raise ValueError for another format."""
    match = re.fullmatch(r"(.+)@(\w+)(?:\*(\d+))?", key)
    if match is None:
        raise ValueError(f"{key!r} is not a compressor on a device, like int8@cpu*2")
    return match[1], match[2], int(match[3]) if match[3] else None


def exact_key(keys: Collection[str], compressor: Compressor, place: str, threads: int | None) -> str | None:
    """Return a compressor's key for `threads`, else the key without threads. None matches any number of threads."""
    text = _text(compressor)
    for budget in (threads, None):
        key = compressor_key(text, place, budget)
        if key in keys:
            return key
    if threads is not None:
        return None
    start = f"{text}@{place}*"
    return next((key for key in keys if key.startswith(start)), None)


def nearest_key(
    keys: Collection[str], compressor: Compressor, places: Sequence[str], threads: int | None
) -> str | None:
    """Return the first `exact_key` of devices `places`. Without an exact key, accept other parameters and threads."""
    if not keys:
        return None
    for place in places:
        key = exact_key(keys, compressor, place, threads)
        if key is not None:
            return key

    def other_threads(key: str) -> int:
        known = parse_compressor_key(key)[2]
        return 0 if known is None or threads is None else abs(known - threads)

    for place in places:
        near = [key for key in keys if _is_like(key, compressor.name, place)]
        if near:
            return min(near, key=other_threads)
    return None


def _is_like(key: str, name: str, place: str) -> bool:
    text, device, _ = parse_compressor_key(key)
    return text.partition("(")[0] == name and device == place


@cache
def _text(compressor: Compressor) -> str:
    return str(compressor)


FASTEST_GB_PER_S, SLOWEST_GB_PER_S = 1e3, 1e-15
"""Bounds of a bandwidth computed from a fit. If the fitted time is constant, the bandwidth is the upper bound."""


# Collectives


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """Time of a collective as a function of its bytes; its key in the table has the topology."""

    ranks: int
    fit: Fit
    source: str = "measured"

    @classmethod
    def line(
        cls,
        kind: CollectiveKind,
        ranks: int,
        alpha_us: float,
        gb_per_s: float,
        spread: float = 0.0,
        source: str = "measured",
    ) -> MeasuredCollective:
        """Return a measurement whose times follow the formula, with α and one rank's bandwidth."""
        us_per_byte = formulas.wire_bytes(kind, ranks, 1.0) / (1e3 * gb_per_s)
        return cls(ranks, Fit.line(formulas.steps(kind, ranks) * alpha_us, us_per_byte, spread), source)

    def alpha_us(self, kind: CollectiveKind) -> float:
        """Return α per step of `kind`."""
        return self.fit.pieces[0].at_zero_us / max(1.0, formulas.steps(kind, self.ranks))

    def gb_per_s(self, kind: CollectiveKind) -> float:
        """Return one rank's bandwidth for large messages of `kind`."""
        return self._gb_per_s(kind, self.fit.pieces[-1].us_per_unit)

    def _gb_per_s(self, kind: CollectiveKind, us_per_byte: float) -> float:
        sent = 1e-3 * formulas.wire_bytes(kind, self.ranks, 1.0)
        return min(FASTEST_GB_PER_S, max(SLOWEST_GB_PER_S, sent / us_per_byte)) if us_per_byte else FASTEST_GB_PER_S

    @property
    def spread(self) -> float:
        """Median relative error of the fit."""
        return self.fit.residual

    def us(self, size: float) -> float:
        return self.fit.at(size)

    def us_of_another(self, size: float, like: formulas.Likeness) -> float:
        """Return the time of another collective over `size` bytes.

        Converted bytes take the measured rate; further steps take the measured latency.
        """
        alpha_us = self.fit.pieces[0].at_zero_us / max(1.0, like.known_steps)
        return max(0.0, self.fit.at(size * like.bytes_per_byte) + like.more_steps * alpha_us)

    def times(self, factor: float) -> MeasuredCollective:
        """Return the measurement with all times multiplied by `factor`."""
        fit = replace(self.fit, pieces=tuple(piece.times(factor) for piece in self.fit.pieces))
        return replace(self, fit=fit, source=f"{self.source}, times {factor:.3g} as in the job's first steps")

    def describe(self, kind: CollectiveKind) -> str:
        """Format α per step, bandwidths with half-widths of 95 % intervals, and the fit's error."""
        alpha, *speeds = self.parts(kind)
        texts = [f"{alpha} us a step, {speeds[0]} a rank"]
        texts += [
            f"from {format_bytes(piece.start)}{' (a switch)' if piece.is_switch else ''} {speed}"
            for piece, speed in zip(self.fit.pieces[1:], speeds[1:], strict=True)
        ]
        return f"{'; '.join(texts)}; off by {100 * self.spread:.1f} % ({self.source})"

    def parts(self, kind: CollectiveKind) -> list[str]:
        """Format α per step in µs, then each piece's bandwidth."""
        steps = max(1.0, formulas.steps(kind, self.ranks))
        first = self.fit.pieces[0]
        error = first.at_zero_error / steps
        texts = [f"{first.at_zero_us / steps:.4g}{'' if math.isinf(error) else f' ± {error:.2g}'}"]
        for piece in self.fit.pieces:
            if not piece.us_per_unit:
                texts.append("flat")
                continue
            margin = piece.us_per_unit_error / piece.us_per_unit
            percent = "" if math.isinf(margin) else f" ± {100 * margin:.0f} %"
            texts.append(f"{format_gbit(self._gb_per_s(kind, piece.us_per_unit))}{percent}")
        return texts

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "fit": self.fit.to_json(), "source": self.source}

    @classmethod
    def from_json(cls, data: Any, place: str = "the collective") -> MeasuredCollective:
        return record(cls, ranks=whole(2, MOST_RANKS), fit=Fit.from_json, source=TEXT)(data, place)


def format_bytes(size: float) -> str:
    """Format bytes: `64 KiB`, `1.5 MiB`."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.3g} B"


# Compressors


@dataclass(frozen=True, slots=True)
class CompressorPoint:
    elements: int
    encode_us: float
    decode_us: float
    """Time to decode one payload."""
    propose_us: float = 0.0
    decode_more_us: float | None = None
    """Time to decode each further payload; `decode_us` if None."""


@dataclass(frozen=True, slots=True)
class CompressorCost:
    """Measured compressor. `interpolate` defines times between and beyond points."""

    points: tuple[CompressorPoint, ...]

    @classmethod
    def of(cls, *points: CompressorPoint) -> CompressorCost:
        return cls(points)

    @property
    def breaks(self) -> list[float]:
        return [float(p.elements) for p in self.points]

    def encode_us(self, elements: float) -> float:
        return interpolate([(p.elements, p.encode_us) for p in self.points], elements)

    def decode_us(self, elements: float, payloads: int = 1) -> float:
        """Return the time of decoding payloads to their mean: first + (payloads - 1) · further."""
        first_us = interpolate([(p.elements, p.decode_us) for p in self.points], elements)
        if payloads == 1:
            return first_us
        further = [(p.elements, p.decode_more_us) for p in self.points if p.decode_more_us is not None]
        return first_us + (payloads - 1) * (interpolate(further, elements) if further else first_us)

    def propose_us(self, elements: float) -> float:
        return interpolate([(p.elements, p.propose_us) for p in self.points], elements)

    def to_json(self) -> dict[str, Any]:
        return {"points": [asdict(point) for point in self.points]}

    @classmethod
    def from_json(cls, data: Any, place: str = "the compressor") -> CompressorCost:
        cost = record(cls, points=listed(_POINT))(data, place)
        for k, (one, after) in enumerate(pairwise(cost.points), start=1):
            if after.elements <= one.elements:
                expected = f"more than the point before it has, {one.elements}"
                raise wrong(f"{place}.points[{k}].elements", expected, after.elements)
        return cost


_POINT = record(
    CompressorPoint,
    elements=whole(1),
    encode_us=number(),
    decode_us=number(),
    propose_us=number(),
    decode_more_us=null_or(number()),
)
