"""Declare a compressor with its parameters: sizes, state, bias, feedback and text. No tensor is touched.

Its facts are data for reports, checks and docs/compressors.md. Its fields are its parameters:

field's type        values and their text
int                 512         whole: no bool, no 512.0
float               0.01, 1e-3   an int will do
bool                true, True
str                 pareto       one of the parameter's choices
tuple[int, ...]     only in fields that `bound_to` fills in, which have no text
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
    """The need to carry what compression leaves out to the next step."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    FORBIDDEN = "forbidden"
    """It diverges: the compressor is unbiased and its error can exceed what it is given."""


class Bias(Enum):
    """The mean of many compressions of one vector."""

    UNBIASED = "unbiased"
    ROUNDING = "rounding"
    """Off by less than a rounding step, in no direction."""
    BIASED = "biased"


class ProposalReduction(Enum):
    """The reduction that makes the ranks' proposals one, before they compress."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a compressor and the range that it may have."""

    name: str
    meaning: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    """The words that it may be, where it is no number."""

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}, {self.range}"

    @property
    def range(self) -> str:
        return ", ".join(self.choices) if self.choices else f"{self.low:g} to {self.high:g}"

    def allows(self, value: Any) -> bool:
        return value in self.choices if self.choices else self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The declarations of a compressor. Formulas are text for people; n is a segment's size, ⌈ ⌉ rounds up."""

    name: str
    summary: str
    """One line."""
    payload: str
    """Bytes for n values, as a formula; `payload_bytes` computes it."""
    payload_dtype: torch.dtype = torch.uint8
    is_linear: bool = False
    """Payloads can be summed on the wire (all_reduce); otherwise they are gathered and decoded together."""
    bias: Bias
    feedback: Feedback
    passes: int = 1
    """The number of times that encoding reads the whole gradient from main memory."""
    parameters: tuple[Parameter, ...] = ()
    """The fields that the text form has. A plan carries nothing else of a compressor."""
    filled_in: tuple[str, ...] = ()
    """The fields that `bound_to` computes from the parameters' shapes and the number of ranks, the same everywhere."""
    state: str = "none"
    """Bytes kept from step to step besides the residual, as a formula; `state_elements` computes it."""
    state_dtype: torch.dtype = torch.float32
    decode_needs_state: bool = False
    """Decoding is given the state that this step's encoding returned, to draw the same random numbers again."""
    state_from_payload: bool = False
    """The payload summed over the ranks is the next step's state (PowerSGD's warm start)."""
    agreement: ProposalReduction | None = None
    """Ranks first reduce what `propose` makes, and compress knowing the result."""
    proposal: str = "none"
    """Bytes of the proposal, as a formula."""
    proposal_dtype: torch.dtype = torch.float32
    grain: str = ""
    """The parameter that counts the values which share something, such as a scale: shards are cut at its multiples.
    Empty if a shard may be cut anywhere; where it depends on more, override `grain`."""
    is_joined: bool = False
    """The payload of several segments is each one's own, one after the other."""
    needs_whole_parameters: bool = False
    """Cannot compress a shard of a bucket: it uses the parameters' shapes."""
    use: str
    """The jobs that it is for."""
    avoid: str
    """The jobs that it is not for."""
    source: str
    """The publication of the method."""


SCHEMA = {"int": "int", "float": "float", "bool": "bool", "str": "str", "tuple[int, ...]": "int[]"}
"""Names of Python types in an op's schema."""

PARAMETER_TYPES = ("int", "float", "bool", "str")
"""The types with a text form."""

_MEANING = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}


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
        case ("bool", bool()) | ("float", float()) | ("str", str()):
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


# Python's own readers take 1_000 and the digits of other scripts as well.
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "int": (r"[+-]?[0-9]+", int),
    "float": (r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|inf|nan)", float),
    "bool": (r"[tT]rue|[fF]alse", lambda text: text in ("true", "True")),
    "str": (r"[A-Za-z]\w*", str),
}


class Declared(ABC):
    """A frozen dataclass whose `str` parses back with `parse_compressor`.

    A field is a parameter if `facts.parameters` names it; other fields are what `bound_to` filled in.
    """

    __slots__ = ()

    facts: ClassVar[Facts]

    @abstractmethod
    def payload_elements(self, segments: Sequence[int]) -> int:
        """Size of the payload in elements of `payload_dtype`."""

    def proposal_elements(self, segments: Sequence[int]) -> int:
        """Size of what ranks reduce before they compress, in elements of `facts.proposal_dtype`."""
        return 0

    def state_elements(self, size: int) -> int:
        """State of one segment of `size` values, in elements of `facts.state_dtype`; segments' states lie in order."""
        return 0

    def bound_to(self, shapes: Sequence[Sequence[int]], ranks: int) -> Self:
        """The compressor for a bucket of parameters of these shapes, averaged over so many ranks."""
        return self

    def of_segment(self, index: int) -> Self:
        """The compressor for one segment of the bucket that it was bound to: ask it for that segment's state."""
        return self

    # A subclass overrides these where they depend on its parameters in another way.

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
        """The number of values that share something, such as a scale: no shard cuts between them."""
        return int(getattr(self, self.facts.grain)) if self.facts.grain else 1

    # What follows

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
        """The values after `segments` in the ops' schemas: all fields, in order."""
        this: Any = self
        return tuple(getattr(self, field.name) for field in fields(this))

    def payload_bytes(self, segments: Sequence[int]) -> int:
        """Size of the payload in bytes, exactly."""
        return self.payload_elements(segments) * self.payload_dtype.itemsize

    def proposal_bytes(self, segments: Sequence[int]) -> int:
        return self.proposal_elements(segments) * self.facts.proposal_dtype.itemsize

    def state_bytes(self, segments: Sequence[int]) -> int:
        """Bytes kept from step to step besides the residual."""
        return self.all_state_elements(segments) * self.facts.state_dtype.itemsize

    def all_state_elements(self, segments: Sequence[int]) -> int:
        """The state of a bucket: its segments' states, one after the other."""
        return sum(self.of_segment(index).state_elements(size) for index, size in enumerate(segments))

    def __str__(self) -> str:
        public = {parameter.name for parameter in self.facts.parameters}
        parts: list[str] = []
        for field in fields_of(type(self)).values():
            value = getattr(self, field.name)
            if field.name in public and value != field.default:
                parts.append(f"{field.name}={text_of(value)}" if field.has_default else text_of(value))
        return f"{self.name}({', '.join(parts)})" if parts else self.name
