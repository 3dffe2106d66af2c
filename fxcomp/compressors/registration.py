"""Register a compressor: check its class, define its functional ops in `torch.ops.fxcomp`, add it to the catalogue.

The ops run the compressor's own `encode`, `decode` and `propose` on fresh tensors, so a graph and the emitted code
compute the same.

A class that is registered again, as when a notebook's cell runs twice or a module is reloaded, takes the place of the
one before. Its ops get new names: graphs and steps that exist keep the old ones, and the old class.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from fxcomp.compressors.base import BadCompressor, Compressor, check_not_mixed, check_segments
from fxcomp.compressors.facts import Facts
from fxcomp.compressors.fields import PARAMETER_TYPES, SCHEMA, fields_of

CATALOGUE: dict[str, type[Compressor]] = {}
"""Every registered compressor by its name."""

BY_OP: dict[OpOverload, type[Compressor]] = {}
"""The compressor of each op, those of replaced classes too."""

# Library.define and impl cost 5 us a call; the custom_op decorator costs 45.  # measured, torch 2.13, 2026-11
_library: Any = Library("fxcomp", "FRAGMENT")

_times: Counter[str] = Counter()
"""How often each op was registered."""

_OP_ARGUMENTS = ("bucket", "residual", "segments", "state", "agreed", "payloads", "ranks")

Kind = TypeVar("Kind", bound=type[Compressor])


def register(kind: Kind) -> Kind:
    """Make a compressor known by its name, with its ops. Raises BadCompressor if anything about the class is wrong."""
    _check_facts(kind)
    name = kind.facts.name
    taken = CATALOGUE.get(name)
    if taken is not None and _path(taken) != _path(kind):
        raise BadCompressor(
            f"there are two compressors named {name!r}: {_path(taken)} and {_path(kind)}.\n  Rename one of them."
        )
    _check_dataclass(kind)
    _check_fields(kind)
    _check_methods(kind)
    make: Callable[..., Compressor] = kind
    parameters = ", ".join(f"{SCHEMA[field.type]} {field.name}" for field in fields_of(kind).values())
    kind.compress_op = _register_compress(name, parameters, make)
    kind.decompress_op = _register_decompress(name, parameters, make)
    kind.propose_op = _register_propose(name, parameters, make) if kind.facts.agreement is not None else None
    CATALOGUE[name] = kind
    BY_OP.update({op: kind for op in (kind.compress_op, kind.decompress_op, kind.propose_op) if op is not None})
    return kind


# What is refused


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
        raise _refusal(kind, "its name, 'dense', says in a plan that nothing is compressed", "Rename it.")


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
    for name in [*named, *facts.filled_in]:
        if name not in declared:
            there = ", ".join(declared) or "none"
            raise _refusal(kind, f"its facts name {name!r}, which is no field; there is {there}", "Spell them alike.")
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        info = declared[field.name]
        if field.name in _OP_ARGUMENTS or hasattr(Compressor, field.name) or not field.name.isascii():
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
        if not field.init or field.kw_only or field.default_factory is not MISSING:
            raise _refusal(
                kind,
                f"the field {field.name!r} is not for its place in the constructor, or has a default_factory",
                f"Write {field.name}: {info.type}, with a plain default or none.",
            )
        if field.name in facts.filled_in and (field.default is MISSING or kind.bound_to is Compressor.bound_to):
            raise _refusal(
                kind, f"its facts say that bound_to fills in {field.name!r}", "Give it a default, and write bound_to."
            )


def _check_methods(kind: type[Compressor]) -> None:
    missing = sorted(kind.__abstractmethods__)
    if kind.facts.agreement is not None:
        missing += [name for name in ("propose_reference", "proposal_elements") if _is_inherited(kind, name)]
    if kind.facts.state != "none" and _is_inherited(kind, "state_elements"):
        missing.append("state_elements")
    if missing:
        raise _refusal(kind, f"it lacks {', '.join(missing)}", "Write what is missing, and look at the spelling.")


def _is_inherited(kind: type[Compressor], name: str) -> bool:
    return getattr(kind, name) is getattr(Compressor, name)


def _refusal(kind: type[Compressor], what: str, remedy: str) -> BadCompressor:
    return BadCompressor(f"{_path(kind)} cannot be registered: {what}.\n  {remedy}")


def _path(kind: type[Compressor]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


# Ops


def _register_compress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        payload = fake(bucket, None, segments, *values)[0]
        new_residual, new_state = _copy(residual), _copy(state)
        make(*values).encode(bucket.contiguous(), new_residual, payload, segments, new_state, _flat(agreed))
        empty = bucket.new_empty(0)
        return (
            payload,
            empty if new_residual is None else new_residual,
            bucket.new_empty(0) if new_state is None else new_state,
        )

    def fake(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
        agreed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state, agreed)
        payload = bucket.new_empty(compressor.payload_elements(segments), dtype=compressor.payload_dtype)
        new_residual = bucket.new_empty(0 if residual is None else sum(segments))
        return payload, new_residual, bucket.new_empty(0) if state is None else torch.empty_like(state)

    head = ", ".join(filter(None, ["Tensor bucket, Tensor? residual, int[] segments", parameters]))
    schema = f"({head}, *, Tensor? state=None, Tensor? agreed=None) -> (Tensor, Tensor, Tensor)"
    return _register(f"{name}_compress", schema, run, fake)


def _register_decompress(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        payloads: Tensor,
        ranks: int,
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        out = fake(payloads, ranks, segments, *values)
        make(*values).decode(payloads.contiguous(), ranks, segments, out, _flat(agreed), _flat(state))
        return out

    def fake(
        payloads: Tensor,
        ranks: int,  # noqa: ARG001
        segments: Sequence[int],
        *values: Any,
        agreed: Tensor | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, payloads, agreed, state)
        return payloads.new_empty(sum(segments), dtype=torch.float32)

    head = ", ".join(filter(None, ["Tensor payloads, int ranks, int[] segments", parameters]))
    return _register(f"{name}_decompress", f"({head}, *, Tensor? agreed=None, Tensor? state=None) -> Tensor", run, fake)


def _register_propose(name: str, parameters: str, make: Callable[..., Compressor]) -> OpOverload:
    def run(
        bucket: Tensor, residual: Tensor | None, segments: Sequence[int], *values: Any, state: Tensor | None = None
    ) -> Tensor:
        out = fake(bucket, residual, segments, *values)
        make(*values).propose(bucket.contiguous(), _flat(residual), segments, _flat(state), out)
        return out

    def fake(
        bucket: Tensor,
        residual: Tensor | None,
        segments: Sequence[int],
        *values: Any,
        state: Tensor | None = None,
    ) -> Tensor:
        compressor = make(*values)
        check_segments(compressor, segments)
        check_not_mixed(compressor, segments, bucket, residual, state)
        return bucket.new_empty(compressor.proposal_elements(segments), dtype=compressor.facts.proposal_dtype)

    head = ", ".join(filter(None, ["Tensor bucket, Tensor? residual, int[] segments", parameters]))
    return _register(f"{name}_propose", f"({head}, *, Tensor? state=None) -> Tensor", run, fake)


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    # A new name and no overload: torch 2.13 ends in an abort when it takes down a library with overloads of one op.
    full = f"{name}_again_{_times[name]}" if _times[name] else name
    _times[name] += 1
    _library.define(full + schema)
    _library.impl(full, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{full}", fake, lib=_library)  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.fxcomp, full).default
