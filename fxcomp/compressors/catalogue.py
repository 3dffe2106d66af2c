"""Every compressor by its name, and their text form: `bf16`, `int8`, `int8(block=128)`, `topk(0.01)`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from torch._ops import OpOverload

from fxcomp.compressors.base import BadCompressor, Compressor
from fxcomp.compressors.fields import FieldInfo, fields_of, read
from fxcomp.compressors.registration import BY_OP, CATALOGUE

ENTRY_POINTS = "fxcomp.compressors"
"""The group in which a package announces a compressor; docs/plugins.md shows how."""


def parse_compressor(text: str) -> Compressor:
    """Read the text form back. Raises BadCompressor, a ValueError."""
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise BadCompressor(f"cannot read the compressor {text!r}; write for example int8(block=128) or topk(0.01)")
    name, arguments = match.groups()
    kind = _kind(name)
    public = {parameter.name for parameter in kind.facts.parameters}
    declared = {name: field for name, field in fields_of(kind).items() if name in public}
    parts = arguments.split(",") if arguments and arguments.strip() else []
    try:
        values = _values(parts, declared)
    except ValueError as error:
        usage = ", ".join(map(str, declared.values()))
        raise BadCompressor(f"cannot read the compressor {text!r}: {error}; it is {name}({usage})") from None
    return cast(Callable[..., Compressor], kind)(**values)


def compressor_of(op: OpOverload, parameters: Sequence[int | float]) -> Compressor:
    """The compressor that an op of a graph belongs to, with the parameters that the node carries."""
    return cast(Callable[..., Compressor], BY_OP[op])(*parameters)


# Parameters


def _values(parts: Sequence[str], declared: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Read `128` and `block = 128`, unnamed ones first, as in a call. Raises ValueError."""
    values: dict[str, Any] = {}
    named = ""
    for place, part in enumerate(parts):
        match = re.fullmatch(r"\s*(?:(\w+)\s*=\s*)?([^\s=]+)\s*", part)
        if match is None:
            raise ValueError(f"write a value or name=value, not {part.strip()!r}")
        key, value = match.groups()
        if key is None:
            key = _name_of(value, place, named, declared)
        else:
            named = part.strip()
        if key not in declared:
            raise ValueError(f"there is no {key!r}")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = read(declared[key], value)
    for name, field in declared.items():
        if name not in values and not field.has_default:
            raise ValueError(f"{name} is missing")
    return values


def _name_of(value: str, place: int, named: str, declared: Mapping[str, FieldInfo]) -> str:
    """The parameter that a value without a name is for; `named` is what has a name before it, if anything."""
    if value in declared:
        raise ValueError(f"{value} has no value, write {value}=...")
    if named:
        raise ValueError(f"{value} needs a name, because {named} before it has one")
    if place >= len(declared):
        raise ValueError(f"{value} is one value too many")
    return list(declared)[place]


# Names


def _kind(name: str) -> type[Compressor]:
    """The compressor of this name: ours, or the one that an installed package announces."""
    warn_of_shadowed()
    if name not in CATALOGUE:
        announced = _announced(name)
        try:
            announced.load()
        except BadCompressor as error:
            raise BadCompressor(f"the compressor {name!r} is announced as {_where(announced)}: {error}") from error
        except (Exception, SystemExit) as error:
            raise BadCompressor(
                f"the compressor {name!r} is announced as {_where(announced)}, which cannot be loaded: "
                f"{type(error).__name__}: {error}.\n  Mend or uninstall that package."
            ) from error
        if name not in CATALOGUE:
            raise BadCompressor(
                f"the compressor {name!r} is announced as {_where(announced)}, which registers no compressor of that"
                " name.\n  Put @register on the class, and the same name into its facts and the entry point."
            )
    return CATALOGUE[name]


def _announced(name: str) -> EntryPoint:
    """The announcement of a name that we have not."""
    points = entry_points(group=ENTRY_POINTS)
    ours = [point for point in points if point.name == name]
    if not ours:
        raise BadCompressor(
            f"there is no compressor {name!r}; {_suggest(name, {*CATALOGUE, *(p.name for p in points)})}"
        )
    others = [point for point in ours if point.value != ours[0].value]
    if others:
        raise BadCompressor(
            f"two compressors are announced as {name!r}: {_where(ours[0])} and {_where(others[0])}.\n"
            "  Rename one of them, or uninstall its package."
        )
    return ours[0]


@cache
def warn_of_shadowed() -> None:
    """Say once which announcements cannot be reached, because we have the name."""
    for point in entry_points(group=ENTRY_POINTS):
        taken = CATALOGUE.get(point.name)
        if taken is not None and point.value.partition(":")[0] != taken.__module__:
            warnings.warn(
                f"fxcomp: {_where(point)} is announced as the compressor {point.name!r}, a name that"
                f" {taken.__module__}.{taken.__qualname__} has, which is used. Rename it in that package.",
                stacklevel=2,
            )


def _where(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.value} of {point.dist.name}"


def _suggest(name: str, names: set[str]) -> str:
    close = get_close_matches(name.lower(), sorted(names), n=1)
    known = ", ".join(sorted(names))
    return f"did you mean {close[0]!r}? There are {known}" if close else f"there are {known}"
