"""Change the bytes of a file, or the object that the file holds.

    {"version": 1, "buckets": [{"names": ["a"], "sizes": [8]}]}
 -->
    {"version": 1, "buckets": [{"names": ["a"], "sizes": [9223372036854775808]}]}      number at buckets.*.sizes.*

Objects are dicts, lists and plain values, with tensors in saved states. All choices come from a `random.Random`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat

DEEP = "@@deep@@"
"""Placeholder that `text_of` replaces by brackets, nested deeper than Python's recursion limit."""

_DEPTH = 100_000

# fmt: off
NUMBERS = (
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e300, 1e160, 1e18, 1e15, 5e-324, 1e-300, 1e-18, -0.0, 0.5, 1.5, 0, 1,
    -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63, -(2**63), 2**64, 10**30, 10**400, -(10**400), 1e-5,
)
TEXTS = (
    "", " ", "x", "\x00", "a\nb", "\ud800", "é", "１", "NaN", "1e5", "-1", "0", "true", "a" * 100_000, "..",
    "/dev/zero", "%s%n", "a.b", "a[0:5]", "(" * 2000, "1" * 5000, DEEP,
)
OTHERS = (True, False, None, [], {}, [[]], [None], {"": None}, {"x": 1}, [1], ["x"], [0, 0])
# fmt: on


def nasty(draw: Random) -> Any:
    return copy.deepcopy(
        draw.choice((draw.choice(NUMBERS), draw.choice(NUMBERS), draw.choice(TEXTS), draw.choice(OTHERS)))
    )


# Bytes


def torn(raw: bytes, draw: Random) -> tuple[bytes, str]:
    """Change one to four places of a file. Return the bytes, and the kind of the last change."""
    data, what = bytearray(raw), ""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        what = draw.choice(("flip", "byte", "insert", "delete", "truncate", "copy", "zero"))
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 8, 64))
        if what == "flip" and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif what == "byte" and at < len(data):
            data[at] = draw.choice(b'0123456789"[]{},:-+.eE \n\x00\xff\xc3aNI')
        elif what == "insert":
            data[at:at] = bytes(draw.choice((0, 255, 48, 57, 91, 123, 34, draw.randrange(256))) for _ in range(size))
        elif what == "delete":
            del data[at : at + size]
        elif what == "truncate":
            del data[at:]
        elif what == "copy":
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + size * 8]
        elif what == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
    return bytes(data), f"bytes: {what}"


# Objects

Place = tuple[Any, Any]
"""Dict or list, and a key or index in it."""


def mutated(given: Any, draw: Random) -> tuple[Any, str]:
    """Change one to three places of a copy of an object. Return the copy, and the kinds and places of the changes."""
    data = {"": copy.deepcopy(given)}
    done: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(data, ()))
        holder, key, path = _drawn(places, draw)
        operation = draw.choice(_OPERATIONS)
        is_done = operation(holder, key, draw, places)
        if not is_done:
            operation = _replace
            _replace(holder, key, draw, places)
        done.append(f"{operation.__name__.strip('_')} at {'.'.join(path[1:]) or 'top'}")
    return data[""], "; ".join(done)


def _drawn(places: list[tuple[Any, Any, tuple[str, ...]]], draw: Random) -> tuple[Any, Any, tuple[str, ...]]:
    """Draw a place; half of the time first a kind of place, so that long lists do not hide other keys."""
    if draw.random() < 0.5:
        return draw.choice(places)
    kinds = sorted({path for _, _, path in places})
    kind = draw.choice(kinds)
    return draw.choice([place for place in places if place[2] == kind])


def _places(value: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    if isinstance(value, dict):
        for key, held in value.items():
            here = (*path, str(key) if len(value) < 24 else "*")
            yield value, key, here
            yield from _places(held, here)
    elif isinstance(value, list):
        for number, held in enumerate(value[:500]):
            here = (*path, "*")
            yield value, number, here
            yield from _places(held, here)


def _replace(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    holder[key] = nasty(draw)
    return True


def _number(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    changes = (value + 1, value - 1, -value, value * 2, draw.choice(NUMBERS), draw.choice(NUMBERS), str(value))
    holder[key] = draw.choice((*changes, float(value) if abs(value) < 1e300 else 0, [value], bool(value)))
    return True


def _text(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    value = holder[key]
    if not isinstance(value, str) or not value or len(value) > 10_000:
        return False
    at, size = draw.randrange(len(value)), draw.choice((1, 1, 2, 5))
    pieces = (
        "",
        "",
        draw.choice(TEXTS),
        value[at : at + size] * 2,
        chr(draw.randrange(1, 0x3000)),
        str(draw.choice(NUMBERS)),
    )
    holder[key] = value[:at] + draw.choice(pieces) + value[at + size :]
    return True


def _remove(holder: Any, key: Any, _: Random, __: Any) -> bool:
    if "" in holder and isinstance(holder, dict) and len(holder) == 1:
        return False
    del holder[key]
    return True


def _rename(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    if not isinstance(holder, dict) or key == "":
        return False
    other = draw.choice((str(key) + "x", str(key)[1:], str(key).upper(), draw.choice(TEXTS[:-3]), *map(str, holder)))
    entries = list(holder.items())
    holder.clear()
    holder.update((other if each == key else each, value) for each, value in entries)
    return True


def _add(holder: Any, key: Any, draw: Random, places: Any) -> bool:
    value = copy.deepcopy(draw.choice((nasty(draw), holder[key], _value(draw.choice(places)))))
    if isinstance(holder, dict):
        if key == "":
            return False
        holder[draw.choice(("digest", "version", "x", str(key) + "2", "__class__", "self"))] = value
    else:
        holder.insert(key, value)
    return True


def _value(place: tuple[Any, Any, Any]) -> Any:
    holder, key, _ = place
    try:
        return holder[key]
    except LookupError:  # removed by an earlier change
        return None


def _length(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    value = holder[key]
    if isinstance(value, list):
        holder[key] = draw.choice((value[:1], value[1:], value[::-1], value + value, value[:-1], [], value[:2] * 300))
    elif isinstance(value, dict):
        holder[key] = dict(draw.sample(sorted(value.items(), key=str), draw.randrange(len(value) + 1)))
    else:
        return False
    return True


def _nest(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    value = holder[key]
    deep: Any = value
    for _ in range(50):
        deep = [deep]
    inner = (
        next(iter(value.values()), None) if isinstance(value, dict) else value[:1] if isinstance(value, list) else value
    )
    holder[key] = draw.choice(([value], {"x": value}, {"": [value]}, deep, inner, [value, value]))
    return True


def _swap(holder: Any, key: Any, draw: Random, places: Any) -> bool:
    there, other, _ = draw.choice(places)
    if not isinstance(there, dict | list) or (there is holder and other == key):
        return False
    mine, theirs = copy.deepcopy(holder[key]), copy.deepcopy(_value((there, other, ())))
    holder[key] = theirs
    if isinstance(there, dict) or other < len(there):
        there[other] = mine
    return True


def _tensor(holder: Any, key: Any, draw: Random, _: Any) -> bool:
    """Change a tensor's values, shape, type, layout or strides."""
    value = holder[key]
    if not isinstance(value, Tensor):
        return False
    holder[key] = draw.choice(_OF_TENSORS)(value, draw)
    return True


def _with(number: float) -> Callable[[Tensor, Random], Tensor]:
    def change(value: Tensor, draw: Random) -> Tensor:
        found = value.clone()
        if found.numel() and found.layout is torch.strided and not (found.dtype is torch.uint8 and number != 0):
            is_whole = not found.is_floating_point()
            found.view(-1)[draw.randrange(found.numel())] = 2**31 - 1 if is_whole else number
        return found

    return change


_OF_TENSORS: tuple[Callable[[Tensor, Random], Any], ...] = (
    _with(math.nan),
    _with(math.inf),
    _with(1e38),
    _with(-1e30),
    _with(0.0),
    lambda value, _: value[:-1] if value.dim() else value,
    lambda value, _: torch.cat([value, value]) if value.dim() else value,
    lambda value, _: value.reshape(-1, 1),
    lambda value, _: value.reshape(1, -1),
    lambda value, _: value.sum() if value.dtype is not torch.bool else value,
    lambda value, _: torch.empty(0, dtype=value.dtype),
    lambda value, _: value.to(torch.float64),
    lambda value, _: value.to(torch.int64) if not value.is_complex() else value,
    lambda value, _: value.to(torch.bfloat16),
    lambda value, _: value.to(torch.complex64),
    lambda value, _: value.bool(),
    lambda value, _: value.to(torch.uint8),
    lambda value, _: value.tolist(),
    lambda value, _: torch.empty(value.shape, device="meta", dtype=value.dtype),
    lambda value, _: value.reshape(1, -1).to_sparse() if value.layout is torch.strided else value,
    lambda value, _: torch.zeros((), dtype=value.dtype).expand(1 << 40),
    lambda value, _: torch.zeros((), dtype=value.dtype).expand(1 << 28),
    lambda value, _: torch.zeros((), dtype=value.dtype).expand(value.shape),
    lambda value, _: value.clone().requires_grad_() if value.is_floating_point() else value,
)

_OPERATIONS: tuple[Callable[..., bool], ...] = (
    _replace, _replace, _number, _number, _text, _text, _remove, _rename, _add, _length, _nest, _swap, _tensor, _tensor,
)  # fmt: skip


def resealed(data: Any) -> bytes:
    """Return an object as the JSON text that a loader accepts, with a digest that fits."""
    if isinstance(data, dict):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            data = compat.sealed({key: value for key, value in data.items() if key != compat.CHECKSUM})
    return text_of(data).encode("utf-8", "surrogatepass")


def text_of(data: Any) -> str:
    text = json.dumps(data, indent=1) + "\n"
    return text.replace(f'"{DEEP}"', "[" * _DEPTH + "]" * _DEPTH)
