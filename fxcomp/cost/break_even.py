"""Solve for the bandwidths at which compressing a bucket that nothing hides is faster than sending it dense.

    saved(B) = dense(n) - compressed(n / r) - c n          dense and compressed by the formulas of collectives

r is dense bytes per byte sent, c the compressor's µs per dense byte. It is linear in 1/B, so it has one root at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxcomp.cost.collectives import Algorithm, counts
from fxcomp.plan.collective_kind import CollectiveKind

Between = tuple[float, float]
"""Above the first and below the second."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressor in a formula: dense bytes per byte sent, and µs per dense byte for encoding and decoding."""

    rate: float
    us_per_byte: float
    kind: CollectiveKind = CollectiveKind.ALL_GATHER
    """The collective in which payloads meet."""
    all_reduce: Algorithm = Algorithm.RING
    """The algorithm of the dense all_reduce."""
    algorithm: Algorithm = Algorithm.RING
    """The algorithm of the payloads' collective."""


def pays_at_gb_per_s(
    compression: Compression, ranks: int, size: float, alpha_us: float, message_us: float = 0.0
) -> Between | None:
    """Return the bandwidths of a rank, in GB/s, at which compressing `size` dense bytes is faster; None if at none."""
    dense = counts(CollectiveKind.ALL_REDUCE, ranks, compression.all_reduce)
    sent = counts(compression.kind, ranks, compression.algorithm)
    fewer_bytes = size * (dense[2] - sent[2] / compression.rate)
    us = (dense[0] - sent[0]) * alpha_us + (dense[1] - sent[1]) * message_us - compression.us_per_byte * size
    root = -fewer_bytes / us / 1e3 if us else math.nan  # where fewer_bytes / B + us = 0
    if not 0 < root < math.inf:
        return (0.0, math.inf) if fewer_bytes + us > 0 else None
    return (0.0, root) if fewer_bytes > 0 else (root, math.inf)
