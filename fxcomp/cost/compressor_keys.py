"""Write, read and look up the keys under which a cost table files compressors."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache

from fxcomp.compressors import Compressor


def compressor_key(compressor: str, device: str, threads: int | None) -> str:
    """Write `int8(block=128)@cpu*2`: the compressor, the device, and how many threads it may use (on a GPU none)."""
    return f"{compressor}@{device}{'' if threads is None else f'*{threads}'}"


@cache
def parse_compressor_key(key: str) -> tuple[str, str, int | None]:
    """Read a key as the compressor's text, the device and the threads. Raises ValueError."""
    match = re.fullmatch(r"(.+)@(\w+)(?:\*(\d+))?", key)
    if match is None:
        raise ValueError(f"{key!r} is not a compressor on a device, like int8@cpu*2")
    return match[1], match[2], int(match[3]) if match[3] else None


def exact_key(keys: Collection[str], compressor: Compressor, place: str, threads: int | None) -> str | None:
    """Return the key of this very compressor on this device, with these threads, or without a number of threads.

    Without `threads`, any number will do.
    """
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
    """Return this compressor's key on the first of `places` that has it, else one of its name with other numbers."""
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
    """Write a compressor, cached: a search asks for the same few thousands of times."""
    return str(compressor)
