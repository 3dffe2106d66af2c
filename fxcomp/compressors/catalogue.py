"""Every compressor by its name, and their text form: `bf16`, `int8`, `int8(block=128)`, `topk(0.01)`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, cast

from torch._ops import OpOverload

from fxcomp.compressors.base import BadCompressor, Compressor
from fxcomp.compressors.registration import CATALOGUE

ENTRY_POINTS = "fxcomp.compressors"
"""The group in which a package announces a compressor; docs/plugins.md shows how."""


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"write true or false, not {text!r}")
    return text == "true"


_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _read_bool}  # by a field's annotation


def parse_compressor(text: str) -> Compressor:
    """Read the text form back. Raises BadCompressor, a ValueError."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise BadCompressor(f"cannot read the compressor {text!r}; write for example int8(block=128) or topk(0.01)")
    name, arguments = match.groups()
    kind = _kind(name)
    make, signature = cast(Callable[..., Compressor], kind), _signature(kind)
    parts = [part for part in map(str.strip, (arguments or "").split(",")) if part]
    pairs = [(key.strip(), value.strip()) for key, _, value in (part.rpartition("=") for part in parts)]
    try:
        given = signature.bind(*(value for key, value in pairs if not key), **{key: v for key, v in pairs if key})
        values = {key: _READ[signature.parameters[key].annotation](text) for key, text in given.arguments.items()}
    except (TypeError, ValueError) as error:
        raise BadCompressor(f"cannot read the compressor {text!r}: {error}; it is {name}{_usage(signature)}") from None
    return make(**values)


def compressor_of(op: OpOverload, parameters: Sequence[int | float]) -> Compressor:
    """The compressor that an op of a graph belongs to, with the parameters that the node carries."""
    kind = next(kind for kind in CATALOGUE.values() if op in (kind.compress_op, kind.decompress_op, kind.propose_op))
    return cast(Callable[..., Compressor], kind)(*parameters)


def _kind(name: str) -> type[Compressor]:
    """The compressor of this name: ours, or the one that an installed package announces."""
    if name not in CATALOGUE:
        announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            raise BadCompressor(f"there is no compressor {name!r}; {_suggest(name, [*CATALOGUE, *announced])}")
        where = announced[name].value
        try:
            announced[name].load()
        except Exception as error:
            raise BadCompressor(
                f"the compressor {name!r} is announced as {where}, which cannot be loaded: "
                f"{type(error).__name__}: {error}.\n  Mend or uninstall that package."
            ) from error
        if name not in CATALOGUE:
            raise BadCompressor(
                f"the compressor {name!r} is announced as {where}, which registers no compressor of that name.\n"
                "  Put @register on the class, and the same name into its facts and the entry point."
            )
    return CATALOGUE[name]


def _signature(kind: type[Compressor]) -> inspect.Signature:
    """What a user may write: the declared parameters, not what `bound_to` fills in."""
    declared = {parameter.name for parameter in kind.facts.parameters}
    signature = inspect.signature(kind)
    return signature.replace(parameters=[value for name, value in signature.parameters.items() if name in declared])


def _suggest(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name.lower(), sorted(names), n=1)
    known = ", ".join(sorted(names))
    return f"did you mean {close[0]!r}? There are {known}" if close else f"there are {known}"


def _usage(signature: inspect.Signature) -> str:
    parts = [
        f"{parameter.name}: {parameter.annotation}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default}")
        for parameter in signature.parameters.values()
    ]
    return f"({', '.join(parts)})"
