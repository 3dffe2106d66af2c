"""Bound the numbers of a cluster, so that no text or file asks for more memory than there is."""

from __future__ import annotations

from fxcomp.errors import BadCluster

MOST = 1e18
"""Above every latency in µs and every bandwidth in GB/s; its inverse is below every bandwidth (assumed)."""

MOST_RANKS = 1 << 20
"""Several times what has ever run one job; lists of so many ranks still fit into memory (assumed)."""

_DIGITS = 30


def check_ranks(count: int) -> None:
    """Raise BadCluster before anything is allocated for too many ranks."""
    if count > MOST_RANKS:
        raise BadCluster(f"a cluster may have {MOST_RANKS:,} ranks; this one would have {shortened(count)}")


def parse_digits(digits: str) -> int:
    """Parse digits, clamping over-long numbers."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


def shortened(value: object) -> str:
    """Write a value for an error, in at most about 80 characters."""
    if isinstance(value, int) and value >= 10**_DIGITS:
        return f"10^{_DIGITS} or more"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
