"""Register compressors and their ops, and parse the text form: `bf16`, `int8(block=128)`, `topk(0.01)`.

The functional ops run `encode`, `decode` and `propose` on fresh tensors, so a graph and the emitted code compute the
same:

    fxcomp::<name>_compress(bucket, residual?, segments, *parameters, *, state?, agreed?, pieces?)
        -> (payload, residual, state)
    fxcomp::<name>_decompress(payloads, ranks, segments, *parameters, *, agreed?, state?, pieces?) -> mean
    fxcomp::<name>_propose(bucket, residual?, segments, *parameters, *, state?) -> proposal     if facts.agreement

A class that is registered again, as when a notebook cell runs twice, gets new op names. Existing graphs and steps keep
the old ops.
"""

from __future__ import annotations

import keyword
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from torch._ops import OpOverload

from fxcomp.compressors import operators
from fxcomp.compressors.base import Compressor
from fxcomp.compressors.facts import PARAMETER_TYPES, SCHEMA, Facts, FieldInfo, fields_of, read
from fxcomp.errors import BadOption

CATALOGUE: dict[str, type[Compressor]] = {}

ENTRY_POINTS = "fxcomp.compressors"
"""Entry point group for compressors (docs/plugins.md)."""

IN_EXAMPLES = dict.fromkeys(
    ("chunkmax", "dgc", "fp8_e4m3", "fp8_e5m2", "randomk", "shared_int8", "threshold"), "examples/more_compressors"
)
"""Folder of the example package, by compressor name."""

_BY_OP: dict[OpOverload, type[Compressor]] = {}
"""Class of each op, including ops of replaced classes."""

Kind = TypeVar("Kind", bound=type[Compressor])


def register(kind: Kind) -> Kind:
    """Add a class to the catalogue, and define its ops. Raises BadOption for an invalid class."""
    _check_facts(kind)
    name = kind.facts.name
    taken = CATALOGUE.get(name)
    if taken is not None and _path(taken) != _path(kind):
        raise BadOption(
            f"there are two compressors named {name!r}: {_path(taken)} and {_path(kind)}.\n  Rename one of them."
        )
    _check_dataclass(kind)
    _check_fields(kind)
    _check_methods(kind)
    kind.compress_op, kind.decompress_op, kind.propose_op = operators.define_ops(kind)
    CATALOGUE[name] = kind
    _BY_OP.update({op: kind for op in (kind.compress_op, kind.decompress_op, kind.propose_op) if op is not None})
    return kind


def parse_compressor(text: str) -> Compressor:
    """Parse the text form. Raises BadOption, a ValueError."""
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise BadOption(f"cannot read the compressor {text!r}; write for example int8(block=128) or topk(0.01)")
    name, arguments = match.groups()
    kind = _kind(name)
    public = {parameter.name for parameter in kind.facts.parameters}
    declared = {name: field for name, field in fields_of(kind).items() if name in public}
    parts = arguments.split(",") if arguments and arguments.strip() else []
    try:
        values = _values(parts, declared)
    except ValueError as error:
        usage = ", ".join(map(str, declared.values()))
        raise BadOption(f"cannot read the compressor {text!r}: {error}; it is {name}({usage})") from None
    return cast(Callable[..., Compressor], kind)(**values)


def compressor_of(op: OpOverload, parameters: Sequence[int | float]) -> Compressor:
    """Return the compressor of an op in a graph, with the node's parameters."""
    return cast(Callable[..., Compressor], _BY_OP[op])(*parameters)


# Text form


def _values(parts: Sequence[str], declared: Mapping[str, FieldInfo]) -> dict[str, Any]:
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
    if value in declared:
        raise ValueError(f"{value} has no value, write {value}=...")
    if named:
        raise ValueError(f"{value} needs a name, because {named} before it has one")
    if place >= len(declared):
        raise ValueError(f"{value} is one value too many")
    return list(declared)[place]


# Names


def _kind(name: str) -> type[Compressor]:
    """Return the class of this name, loading its entry point if it is not registered."""
    warn_of_shadowed()
    if name not in CATALOGUE:
        announced = _announced(name)
        try:
            announced.load()
        except BadOption as error:
            raise BadOption(f"the compressor {name!r} is announced as {_where(announced)}: {error}") from error
        except (Exception, SystemExit) as error:
            raise BadOption(
                f"the compressor {name!r} is announced as {_where(announced)}, which cannot be loaded: "
                f"{type(error).__name__}: {error}.\n  Mend or uninstall that package."
            ) from error
        if name not in CATALOGUE:
            raise BadOption(
                f"the compressor {name!r} is announced as {_where(announced)}, which registers no compressor of that"
                " name.\n  Put @register on the class, and the same name into its facts and the entry point."
            )
    return CATALOGUE[name]


def _announced(name: str) -> EntryPoint:
    points = entry_points(group=ENTRY_POINTS)
    ours = [point for point in points if point.name == name]
    if not ours and name in IN_EXAMPLES:
        raise BadOption(
            f"the compressor {name!r} is in a package of its own, which is not installed here.\n"
            f"  Install it on every machine, from a clone of fxcomp: pip install ./{IN_EXAMPLES[name]}"
        )
    if not ours:
        raise BadOption(f"there is no compressor {name!r}; {_suggest(name, {*CATALOGUE, *(p.name for p in points)})}")
    others = [point for point in ours if point.value != ours[0].value]
    if others:
        raise BadOption(
            f"two compressors are announced as {name!r}: {_where(ours[0])} and {_where(others[0])}.\n"
            "  Rename one of them, or uninstall its package."
        )
    return ours[0]


@cache
def warn_of_shadowed() -> None:
    """Warn once of entry points that are ignored because another module registered a compressor of that name."""
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


# Checks of a class


def _check_facts(kind: type[Compressor]) -> None:
    if is_dataclass(kind) and any(field.name == "facts" for field in fields(kind)):
        raise _refusal(
            kind, "its facts are a field, one for each instance", "Write facts: ClassVar[Facts] = Facts(...)."
        )
    facts: object = getattr(kind, "facts", None)
    if not isinstance(facts, Facts):
        raise _refusal(kind, "it has no facts", "Write facts: ClassVar[Facts] = Facts(...) in the class.")
    name = facts.name
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None or keyword.iskeyword(name):
        raise _refusal(
            kind, f"the name in its facts, {name!r}, is no name for an op and a variable",
            "Use letters, digits and _, a letter first, no keyword of Python: acme_pool.",
        )  # fmt: skip
    if name == "dense":
        raise _refusal(kind, "its name, 'dense', stands for no compression in a plan", "Rename it.")


def _check_dataclass(kind: type[Compressor]) -> None:
    if not is_dataclass(kind) or "__dataclass_params__" not in kind.__dict__:
        raise _refusal(
            kind,
            "it is no dataclass when @register sees it",
            "Put @dataclass(frozen=True, slots=True) below @register.",
        )
    if not kind.__dict__["__dataclass_params__"].frozen:
        raise _refusal(
            kind, "its instances can change, but a plan and a graph rely on them", "Write @dataclass(frozen=True, ...)."
        )


def _check_fields(kind: type[Compressor]) -> None:
    declared, facts = fields_of(kind), kind.facts
    named = [parameter.name for parameter in facts.parameters]
    chosen = [parameter.name for parameter in facts.parameters if parameter.choices]
    for name in [*named, *facts.filled_in]:
        if name not in declared:
            there = ", ".join(declared) or "none"
            raise _refusal(kind, f"its facts name {name!r}, which is no field; there is {there}", "Spell them alike.")
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        info = declared[field.name]
        if field.name in operators.ARGUMENTS or hasattr(Compressor, field.name) or not field.name.isascii():
            raise _refusal(kind, f"a field cannot be named {field.name!r}, which is taken or not ASCII", "Rename it.")
        if (field.name in named) == (field.name in facts.filled_in):
            raise _refusal(
                kind,
                f"the field {field.name!r} must stand once in its facts, or a plan would lose its value",
                f"Add Parameter({field.name!r}, ...) to parameters, or {field.name!r} to filled_in if bound_to"
                " computes it.",
            )
        allowed = PARAMETER_TYPES if field.name in named else tuple(SCHEMA)
        if info.type not in allowed:
            raise _refusal(kind, f"the field {str(info)!r} has a type that does not travel", f"Use {_or(allowed)}.")
        if (info.type == "str") != (field.name in chosen):
            raise _refusal(
                kind,
                f"the field {str(info)!r} does not fit its facts: choices are for a str, ranges for numbers",
                f"Write Parameter({field.name!r}, ..., choices=(...)), or make the field a number.",
            )
        if not field.init or field.kw_only or field.default_factory is not MISSING:
            raise _refusal(
                kind,
                f"the field {field.name!r} is not for its place in the constructor, or has a default_factory",
                f"Write {field.name}: {info.type}, with a plain default or none.",
            )
        if field.name in facts.filled_in and (field.default is MISSING or kind.bound_to is Compressor.bound_to):
            raise _refusal(
                kind,
                f"its facts declare that bound_to fills in {field.name!r}",
                "Give it a default, and write bound_to.",
            )
    counts = [parameter.name for parameter in facts.parameters if parameter.low >= 1]
    if facts.grain and (facts.grain not in counts or declared[facts.grain].type != "int"):
        what = f"its facts name {facts.grain!r} as its grain, which is no parameter that counts values"
        raise _refusal(kind, what, "Name an int parameter of 1 or more, or override the property grain.")


def _check_methods(kind: type[Compressor]) -> None:
    missing = sorted(kind.__abstractmethods__)
    if kind.facts.agreement is not None:
        missing += [name for name in ("propose_reference", "proposal_elements") if _is_inherited(kind, name)]
    if kind.facts.state != "none" and _is_inherited(kind, "state_elements"):
        missing.append("state_elements")
    if missing:
        raise _refusal(kind, f"it lacks {', '.join(missing)}", "Write the missing members, and check the spelling.")


def _is_inherited(kind: type[Compressor], name: str) -> bool:
    return getattr(kind, name) is getattr(Compressor, name)


def _refusal(kind: type[Compressor], what: str, remedy: str) -> BadOption:
    return BadOption(f"{_path(kind)} cannot be registered: {what}.\n  {remedy}")


def _path(kind: type[Compressor]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
