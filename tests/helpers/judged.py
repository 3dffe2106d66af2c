"""Count what a running step did about its verdicts."""

from __future__ import annotations

from fxcomp.step.compiled_step import CompiledStep


def plans_made(step: CompiledStep) -> int:
    """Count how often a step has been planned again."""
    return sum(note.startswith("planned again") for note in step.notes)
