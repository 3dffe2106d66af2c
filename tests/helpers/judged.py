"""Plant what a running step is judged by, and count what it did about it."""

from __future__ import annotations

from dataclasses import replace

from fxcomp.plan.plan import Plan
from fxcomp.step.compiled_step import CompiledStep


def judge_by_dense(step: CompiledStep, dense: Plan | None, dense_ms: float) -> None:
    """Let a compressed plan be compared with a dense step that is said to take so long."""
    step.in_force.decision = replace(step.in_force.decision, dense=dense, dense_us=1e3 * dense_ms)


def plans_made(step: CompiledStep) -> int:
    """Count how often a step has been planned again."""
    return sum(note.startswith("planned anew") for note in step.notes)
