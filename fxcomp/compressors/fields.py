"""A compressor's fields: of which types they may be, and how a value of each is checked, written and read.

int                 512          whole: no bool, no 512.0
float               0.01, 1e-3   an int will do
bool                true, True
tuple[int, ...]     only in fields that `bound_to` fills in, which have no text
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, NamedTuple

SCHEMA = {"int": "int", "float": "float", "bool": "bool", "tuple[int, ...]": "int[]"}
"""What a field's type is called in an op's schema."""

PARAMETER_TYPES = ("int", "float", "bool")
"""The types with a text form."""

_MEANING = {"int": "a whole number", "float": "a number", "bool": "true or false"}


class FieldInfo(NamedTuple):
    name: str
    type: str
    """As it is annotated."""
    default: Any
    """MISSING if there is none."""

    @property
    def has_default(self) -> bool:
        return self.default is not MISSING

    def __str__(self) -> str:
        """As in a signature: `block: int = 512`."""
        return f"{self.name}: {self.type}" + (f" = {text_of(self.default)}" if self.has_default else "")


@cache
def fields_of(kind: type[Any]) -> dict[str, FieldInfo]:
    """All fields of a compressor class, in order."""
    declared: tuple[Field[Any], ...] = fields(kind)
    return {field.name: FieldInfo(field.name, _type_name(field.type), field.default) for field in declared}


def _type_name(annotation: Any) -> str:
    """The annotation's text: with and without `from __future__ import annotations`."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def checked(field: FieldInfo, value: Any) -> Any:
    """A parameter's value, an int made a float where the field is one. Raises ValueError if it has another type."""
    match field.type, value:
        case ("bool", bool()) | ("float", float()):
            return value
        case "float", int() if not isinstance(value, bool):
            return float(value)
        case "int", int() if not isinstance(value, bool):
            return value
        case _:
            raise ValueError(f"{field.name} must be {_MEANING[field.type]}, not {value!r}")


def text_of(value: Any) -> str:
    """As `read` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(field: FieldInfo, text: str) -> Any:
    """A parameter's value from its text. Raises ValueError."""
    pattern, convert = _READ[field.type]
    if re.fullmatch(pattern, text) is None:
        raise ValueError(f"{field.name} must be {_MEANING[field.type]}, not {text!r}")
    return convert(text)


def _is_true(text: str) -> bool:
    return text in ("true", "True")


# Python's own readers take 1_000 and the digits of other scripts as well.
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "int": (r"[+-]?[0-9]+", int),
    "float": (r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|inf|nan)", float),
    "bool": (r"[tT]rue|[fF]alse", _is_true),
}
