"""Repeat the decisions of the traced Python code about tensor values (questions) before each step.

    if labels.max() >= 32: raise ...      %max = max(%batch_1);  %ge = ge(%max, 32);  u0 == 1  ─► False
    for _ in range(int(counts[0])): ...   %select = select(%batch_2, 0, 0);           u1       ─► 3

A capture holds for batches with the same answers. A question may raise if an earlier answer differs, so a stage of
questions is evaluated only after all earlier answers match.
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
"""Function of the batch's leaves that returns one input of the prelude: a leaf, a buffer or a frozen parameter."""


@dataclass(frozen=True, slots=True)
class BatchQuestion:
    """A decision of Python code that depends on the values of a few tensors."""

    where: str
    """Place in the user's code."""
    text: str
    """Expression over symbols, such as `u0 == 1`."""
    answer_of: Callable[[Mapping[str, Any]], Any]
    reads: Mapping[str, int]
    """Index of each symbol's tensor in the stage's results."""
    answer: Any

    def answered(self, numbers: Sequence[Any]) -> Any:
        return self.answer_of({name: numbers[place] for name, place in self.reads.items()})

    def is_answered(self, answer: Any) -> bool:
        """Return whether an answer is the captured one. nan equals itself; -0.0 differs from 0.0."""
        is_same = answer == self.answer or (answer != answer and self.answer != self.answer)
        return is_same and str(answer) == str(self.answer)


@dataclass(frozen=True, slots=True)
class QuestionStage:
    """Questions that are computed together and read in one transfer."""

    run: Callable[..., Sequence[Any]]
    """Returns the results that questions read, followed by values for later stages."""
    takes: tuple[int, ...]
    """Indices of the arguments of `run` in a list: values of all feeds, then values of earlier stages."""
    questions: tuple[BatchQuestion, ...]
    reads: int
    """Number of results that questions read."""


OtherAnswer = tuple[BatchQuestion, Any]
"""A question and its new answer, which is None if evaluating the question raised."""


class Prelude:
    def __init__(self, feeds: Sequence[Feed], stages: Sequence[QuestionStage]):
        self._feeds, self._stages = tuple(feeds), tuple(stages)

    def __len__(self) -> int:
        return sum(len(stage.questions) for stage in self._stages)

    @property
    def questions(self) -> tuple[BatchQuestion, ...]:
        return tuple(question for stage in self._stages for question in stage.questions)

    @property
    def reads(self) -> int:
        """Number of reads from the device per step."""
        return len(self._stages)

    @property
    def said(self) -> str:
        lines = list(dict.fromkeys(question.where for question in self.questions))
        reads = "one read" if self.reads == 1 else f"{self.reads} reads"
        decisions = "1 decision" if len(self) == 1 else f"{len(self)} decisions"
        shown = ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "")
        return f"before each step {decisions} over values are evaluated in {reads}, as Python takes them ({shown})"

    def other_answer(self, leaves: Sequence[Any]) -> OtherAnswer | None:
        """Evaluate all questions for a batch. Return the first changed answer, or None."""
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
            except (ArithmeticError, IndexError, RuntimeError, ValueError):  # Python reports the error
                return stage.questions[0], None
            values += results[stage.reads :]
        return None


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Read one-element tensors, in one transfer if they are on a device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < 2 or all(tensor.device.type == "cpu" for tensor in tensors):
        return [value.item() if isinstance(value, Tensor) else value for value in values]
    read: Any = torch.stack([_bits(tensor) for tensor in tensors])
    bits = iter(read.tolist())
    return [_number(value, next(bits)) if isinstance(value, Tensor) else value for value in values]


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.reshape(())
    return tensor.double().view(torch.int64) if tensor.is_floating_point() else tensor.long()


def _number(tensor: Tensor, bits: int) -> Any:
    if tensor.is_floating_point():
        return struct.unpack("d", struct.pack("q", bits))[0]
    return bool(bits) if tensor.dtype is torch.bool else bits
