"""Write quantities as reports show them."""

from __future__ import annotations


def decimals(step_us: float) -> int:
    """Decimals of times in ms, so that a step has about four digits."""
    return 1 if step_us >= 100e3 else 2 if step_us >= 10e3 else 3


def ms(us: float, digits: int) -> str:
    return f"{us / 1e3:.{digits}f}"


def mb(size: float) -> str:
    return f"{size / 1e6:.3g}" if size < 1e8 else f"{size / 1e6:.0f}"


def count(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
