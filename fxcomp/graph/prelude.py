"""Answer, before a step, what the traced Python asked about the values of its batch and of buffers.

    if labels.max() >= 32: raise ...      %max = max(%batch_1);  %ge = ge(%max, 32);  u0 == 1  ─► False
    for _ in range(int(counts[0])): ...   %select = select(%batch_2, 0, 0);           u1       ─► 3

A capture is right for batches that get the answers that it was made with. Questions come in a sequence: a later one may
have no meaning, or raise, where an earlier one has another answer. So they are asked in stages: what cannot fail is
computed together and read at once, and a stage is computed only where everything before it was answered as expected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp import compat

Feed = Callable[[Sequence[Any]], Any]
"""Finds a value among a batch's leaves, or in the model."""


@dataclass(frozen=True, slots=True)
class BatchQuestion:
    """A question of Python's about numbers of a few tensors."""

    where: str
    """The user's line."""
    text: str
    """The question as an expression of symbols."""
    answer_of: Callable[[Mapping[str, Any]], Any]
    reads: Mapping[str, int]
    """The place of each symbol's tensor among the results of the stage."""
    answer: Any
    """The answer when the step was captured."""

    def answered(self, numbers: Sequence[Any]) -> Any:
        """The answer for other numbers of the stage."""
        return self.answer_of({name: numbers[place] for name, place in self.reads.items()})

    def is_answered(self, answer: Any) -> bool:
        """Compare an answer with the one that the step was captured with: nan equals itself, and -0.0 is not 0.0."""
        is_same = answer == self.answer or (answer != answer and self.answer != self.answer)
        return is_same and str(answer) == str(self.answer)


@dataclass(frozen=True, slots=True)
class QuestionStage:
    """Questions that are computed together and read at once."""

    run: Callable[..., Sequence[Any]]
    """Computes what is read, followed by what later stages use."""
    takes: tuple[int, ...]
    """The places of its arguments among what is fed and what earlier stages have kept."""
    questions: tuple[BatchQuestion, ...]
    reads: int
    """The number of its results that are read."""


OtherAnswer = tuple[BatchQuestion, Any]
"""A question, and its answer where that is not the one at capture; None if it could not be asked."""


class Prelude:
    """The questions of one capture. Keeps no batch alive and writes nothing."""

    def __init__(self, feeds: Sequence[Feed], stages: Sequence[QuestionStage]):
        self._feeds, self._stages = tuple(feeds), tuple(stages)

    def __len__(self) -> int:
        """The number of questions."""
        return sum(len(stage.questions) for stage in self._stages)

    @property
    def questions(self) -> tuple[BatchQuestion, ...]:
        """All questions, in the order in which Python asked them."""
        return tuple(question for stage in self._stages for question in stage.questions)

    @property
    def reads(self) -> int:
        """Count its reads from the device."""
        return len(self._stages)

    @property
    def said(self) -> str:
        """Describe it, for a report."""
        lines = list(dict.fromkeys(question.where for question in self.questions))
        reads = "one read" if self.reads == 1 else f"{self.reads} reads"
        decisions = "1 decision" if len(self) == 1 else f"{len(self)} decisions"
        shown = ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "")
        return f"before each step {decisions} over values are evaluated in {reads}, as Python takes them ({shown})"

    def other_answer(self, leaves: Sequence[Any]) -> OtherAnswer | None:
        """Ask everything of a batch; returns the first question that is answered otherwise, None if none is."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with compat.without_autocast(), torch.no_grad():
                return self._ask(leaves)
        with torch.no_grad():
            return self._ask(leaves)

    def _ask(self, leaves: Sequence[Any]) -> OtherAnswer | None:
        values = [feed(leaves) for feed in self._feeds]
        for stage in self._stages:
            try:
                results = stage.run(*[values[place] for place in stage.takes])
                numbers = _numbers(results[: stage.reads])
                for question in stage.questions:
                    answer = question.answered(numbers)
                    if not question.is_answered(answer):
                        return question, answer
            except (ArithmeticError, IndexError, RuntimeError, ValueError):  # Python says what is wrong with the batch
                return stage.questions[0], None
            values += results[stage.reads :]
        return None


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Read tensors of one element each: all at once where reading waits for a device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < 2 or all(tensor.device.type == "cpu" for tensor in tensors):
        return [value.item() if isinstance(value, Tensor) else value for value in values]
    read: Any = torch.stack([_bits(tensor) for tensor in tensors])
    bits = iter(read.tolist())
    return [_number(value, next(bits)) if isinstance(value, Tensor) else value for value in values]


def _bits(tensor: Tensor) -> Tensor:
    """Turn a number into 64 bits that hold all of it."""
    tensor = tensor.reshape(())
    return tensor.double().view(torch.int64) if tensor.is_floating_point() else tensor.long()


def _number(tensor: Tensor, bits: int) -> Any:
    if tensor.is_floating_point():
        return struct.unpack("d", struct.pack("q", bits))[0]
    return bool(bits) if tensor.dtype is torch.bool else bits
