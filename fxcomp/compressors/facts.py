"""Declarations of a compressor and its parameters: sizes, state, bias, feedback and text form.

The fields of the dataclass are the parameters:

field's type        values and their text
int                 512          no bool, no 512.0
float               0.01, 1e-3   an int is accepted
bool                true, True
str                 pareto       one of the parameter's choices
tuple[int, ...]     no text; only in fields that `bound_to` fills in
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

import torch

from fxcomp.errors import BadOption


class Feedback(Enum):
    """Need for error feedback."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    FORBIDDEN = "forbidden"
    """The error can exceed the input, so that feedback diverges, or the error is always 0."""


class Bias(Enum):
    """Mean error over many compressions of one vector."""

    UNBIASED = "unbiased"
    ROUNDING = "rounding"
    """A mean error below one rounding step, in no preferred direction."""
    BIASED = "biased"


class ProposalReduction(Enum):
    """Reduction of the ranks' proposals before compression."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A compressor's parameter and its range."""

    name: str
    meaning: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    """Allowed strings; empty for a number."""

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}, {self.range}"

    @property
    def range(self) -> str:
        return ", ".join(self.choices) if self.choices else f"{self.low:g} to {self.high:g}"

    def allows(self, value: Any) -> bool:
        return value in self.choices if self.choices else self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Declarations of a compressor. Formulas are text: n is a segment's number of values, ⌈ ⌉ rounds up."""

    name: str
    summary: str
    payload: str
    """Formula of a segment's payload bytes."""
    payload_dtype: torch.dtype = torch.uint8
    is_linear: bool = False
    """An all_reduce can sum the payloads. Other payloads are gathered."""
    bias: Bias
    feedback: Feedback
    passes: int = 1
    """Number of times that encoding reads the whole gradient from main memory."""
    parameters: tuple[Parameter, ...] = ()
    """Fields in the text form. A plan records only these fields."""
    filled_in: tuple[str, ...] = ()
    """Names of fields that `bound_to` computes, equal on every rank."""
    state: str = "none"
    """Formula of a segment's bytes kept between steps, without the residual."""
    state_dtype: torch.dtype = torch.float32
    decode_needs_state: bool = False
    """Decoding needs the state that encoding wrote, to draw the same random numbers."""
    state_from_payload: bool = False
    """The summed payload is the next state (PowerSGD's warm start)."""
    agreement: ProposalReduction | None = None
    """Reduction of proposals before compression; None without proposals."""
    proposal: str = "none"
    proposal_dtype: torch.dtype = torch.float32
    grain: str = ""
    """Name of the parameter with the values per scale or code, 1 if empty. Shards cut gradients at its multiples."""
    is_exact: bool = False
    """The compressor accepts only gradients that are casts of `payload_dtype` values, and has no error."""
    is_joined: bool = False
    """A bucket's payload is the concatenation of its segments' payloads."""
    needs_whole_parameters: bool = False
    """The compressor uses the parameters' shapes, and cannot compress a shard."""
    use: str
    avoid: str
    source: str


SCHEMA = {"int": "int", "float": "float", "bool": "bool", "str": "str", "tuple[int, ...]": "int[]"}
"""Names of Python types in an op's schema."""

PARAMETER_TYPES = ("int", "float", "bool", "str")

_MEANING = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}


class FieldInfo(NamedTuple):
    name: str
    type: str
    default: Any
    """MISSING if the field has no default."""

    @property
    def has_default(self) -> bool:
        return self.default is not MISSING

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + (f" = {text_of(self.default)}" if self.has_default else "")


@cache
def fields_of(kind: type[Any]) -> dict[str, FieldInfo]:
    declared: tuple[Field[Any], ...] = fields(kind)
    return {field.name: FieldInfo(field.name, _type_name(field.type), field.default) for field in declared}


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def checked(field: FieldInfo, value: Any) -> Any:
    """Return the value, after converting an int for a float field. Raises ValueError for other wrong types."""
    match field.type, value:
        case ("bool", bool()) | ("float", float()) | ("str", str()):
            return value
        case "float", int() if not isinstance(value, bool):
            return float(value)
        case "int", int() if not isinstance(value, bool):
            return value
        case _:
            raise ValueError(f"{field.name} must be {_MEANING[field.type]}, not {value!r}")


def text_of(value: Any) -> str:
    """Format a value so that `read` parses it back."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(field: FieldInfo, text: str) -> Any:
    """Parse a value. Raises ValueError."""
    pattern, convert = _READ[field.type]
    if re.fullmatch(pattern, text) is None:
        raise ValueError(f"{field.name} must be {_MEANING[field.type]}, not {text!r}")
    return convert(text)


# Patterns, because int() and float() also accept 1_000 and non-ASCII digits.
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "int": (r"[+-]?[0-9]+", int),
    "float": (r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|inf|nan)", float),
    "bool": (r"[tT]rue|[fF]alse", lambda text: text in ("true", "True")),
    "str": (r"[A-Za-z]\w*", str),
}


class Declared(ABC):
    """A frozen dataclass whose `str` parses back with `parse_compressor`.

    Fields are parameters if `facts.parameters` names them; `bound_to` fills in the others.
    """

    __slots__ = ()

    facts: ClassVar[Facts]

    @abstractmethod
    def payload_elements(self, segments: Sequence[int]) -> int:
        """Return the payload's size, in elements of `payload_dtype`."""

    def proposal_elements(self, segments: Sequence[int]) -> int:
        """Return the proposal's size, in elements of `facts.proposal_dtype`."""
        return 0

    def state_elements(self, size: int) -> int:
        """Return the size of a segment's state, in elements of `facts.state_dtype`."""
        return 0

    def bound_to(self, shapes: Sequence[Sequence[int]], ranks: int) -> Self:
        """Return the compressor for a bucket of parameters of these shapes, which `ranks` ranks average."""
        return self

    def of_segment(self, index: int) -> Self:
        """Return the compressor for one segment of the bound bucket."""
        return self

    # Override these if they depend on the parameters.

    @property
    def feedback(self) -> Feedback:
        return self.facts.feedback

    @property
    def bias(self) -> Bias:
        return self.facts.bias

    @property
    def has_state(self) -> bool:
        return self.facts.state != "none"

    @property
    def grain(self) -> int:
        """Number of values per scale or code."""
        return int(getattr(self, self.facts.grain)) if self.facts.grain else 1

    # Derived

    def __post_init__(self) -> None:
        declared = fields_of(type(self))
        for parameter in self.facts.parameters:
            try:
                value = checked(declared[parameter.name], getattr(self, parameter.name))
            except ValueError as error:
                raise BadOption(f"{self.name}: {error}") from None
            object.__setattr__(self, parameter.name, value)
            if not parameter.allows(value):
                which = f"to be one of {parameter.range}" if parameter.choices else f"from {parameter.range}"
                raise BadOption(f"{self.name} needs {parameter.name} {which}, not {value}")

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def is_linear(self) -> bool:
        return self.facts.is_linear

    @property
    def payload_dtype(self) -> torch.dtype:
        return self.facts.payload_dtype

    @property
    def needs_error_feedback(self) -> bool:
        return self.feedback is Feedback.REQUIRED

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Values of all fields, in the order of the ops' schemas."""
        this: Any = self
        return tuple(getattr(self, field.name) for field in fields(this))

    def payload_bytes(self, segments: Sequence[int]) -> int:
        return self.payload_elements(segments) * self.payload_dtype.itemsize

    def proposal_bytes(self, segments: Sequence[int]) -> int:
        return self.proposal_elements(segments) * self.facts.proposal_dtype.itemsize

    def state_bytes(self, segments: Sequence[int]) -> int:
        return self.all_state_elements(segments) * self.facts.state_dtype.itemsize

    def all_state_elements(self, segments: Sequence[int]) -> int:
        return sum(self.of_segment(index).state_elements(size) for index, size in enumerate(segments))

    def __str__(self) -> str:
        public = {parameter.name for parameter in self.facts.parameters}
        parts: list[str] = []
        for field in fields_of(type(self)).values():
            value = getattr(self, field.name)
            if field.name in public and value != field.default:
                parts.append(f"{field.name}={text_of(value)}" if field.has_default else text_of(value))
        return f"{self.name}({', '.join(parts)})" if parts else self.name
