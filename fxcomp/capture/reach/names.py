"""Read the names in a function's bytecode: globals, attributes, keys, modules that it imports."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, cast

_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")

_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
"""Setting an attribute, as `__init__` does, is not reading it."""

_CONSTANTS = ("LOAD_CONST", "RETURN_CONST")

_NAMING = ("BUILD_CONST_KEY_MAP", "CALL_KW", "CALL_FUNCTION_EX")
"""Instructions that take a constant for a new dict's keys or for arguments' names: nothing is read by these."""


@dataclass(frozen=True, slots=True)
class Named:
    """The names in a function's code and in the code inside it."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    """Modules imported while it runs."""
    names: frozenset[str]
    """Attributes and keys that are read: names, and every constant that could be one."""
    lines: tuple[tuple[str, str, int], ...]
    """Each reading of a global: its name, the attribute that follows, the line."""


@lru_cache(maxsize=1 << 16)
def named_in(code: CodeType) -> Named:
    """Read a function's bytecode."""
    found: dict[str, None] = {}
    imports: dict[str, None] = {}
    names: set[str] = set()
    lines: list[tuple[str, str, int]] = []
    for piece in _with_inner(code):
        instructions = list(dis.get_instructions(piece))
        for i, instruction in enumerate(instructions):
            name = instruction.argval
            following = instructions[i + 1].opname if i + 1 < len(instructions) else ""
            if instruction.opname in _CONSTANTS and following not in _NAMING:
                names.update(c for c in _leaves((name,)) if isinstance(c, str) and len(c) <= 64)
            if instruction.opname in _GLOBALS:
                found[name] = None
                after = instructions[i + 1] if i + 1 < len(instructions) else instruction
                attribute = after.argval if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else ""
                line = instruction.positions.lineno if instruction.positions else None
                lines.append((name, str(attribute), line or piece.co_firstlineno))
            elif instruction.opname in _READS:
                names.add(name)
            elif instruction.opname == "IMPORT_NAME":
                imports[name] = None
    return Named(tuple(found), tuple(imports), frozenset(names), tuple(lines))


def _leaves(constants: Iterable[Any]) -> Iterator[Any]:
    """Flatten constants in tuples and sets."""
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            yield from _leaves(cast("Iterable[Any]", constant))
        else:
            yield constant


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
