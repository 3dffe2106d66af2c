"""Declare a compressor with its parameters: sizes, state, bias, feedback and text. No tensor is touched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import torch

from fxcomp.compressors.facts import BadCompressor, Bias, Facts, Feedback, checked, fields_of, text_of


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
    def sends_values(self) -> bool:
        return self.facts.sends_values

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
                raise BadCompressor(f"{self.name}: {error}") from None
            object.__setattr__(self, parameter.name, value)
            if not parameter.low <= value <= parameter.high:
                raise BadCompressor(
                    f"{self.name} needs {parameter.name} from {parameter.low:g} to {parameter.high:g}, not {value}"
                )

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
