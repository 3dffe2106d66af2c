"""Write how a running step's plan has followed the gradients: each change, with the error and the step it was for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fxcomp.report.document import Block, Column, Section, Table
from fxcomp.report.quantities import count, decimals, ms

_MOST = 8


class Moved(Protocol):
    """One change of the plan."""

    @property
    def step(self) -> int: ...

    @property
    def why(self) -> str: ...

    @property
    def error(self) -> tuple[float, float]:
        """Of the plan before and the one after, by the errors of that time."""
        ...

    @property
    def limit(self) -> float: ...

    @property
    def step_us(self) -> tuple[float, float]:
        """Predicted, before and after."""
        ...

    @property
    def changes(self) -> Sequence[str]: ...


def moves_section(moves: Sequence[Moved]) -> Section:
    """List the last changes, and what all of them made of the error and of the predicted step."""
    digits = decimals(max(max(move.step_us) for move in moves))
    columns = (
        Column("step"),
        Column("error", is_text=True),
        Column("allowed", is_optional=True),
        Column("predicted ms", is_text=True),
        Column("why, and what changed", is_text=True, is_optional=True),
    )
    rows = [
        (
            str(move.step),
            f"{move.error[0]:.3g} → {move.error[1]:.3g}",
            f"{move.limit:.3g}",
            f"{ms(move.step_us[0], digits)} → {ms(move.step_us[1], digits)}",
            f"{move.why}: {'; '.join(move.changes)}",
        )
        for move in moves[-_MOST:]
    ]
    first, last = moves[0], moves[-1]
    blocks: list[Block] = [
        f"{count(len(moves), 'change')} of the plan since training began. The error went from {first.error[0]:.3g} of"
        f" {first.limit:.3g} to {last.error[1]:.3g} of {last.limit:.3g}, the predicted step from"
        f" {ms(first.step_us[0], digits)} to {ms(last.step_us[1], digits)} ms.",
        Table(columns, rows),
    ]
    if len(moves) > len(rows):
        blocks.append(f"and {count(len(moves) - len(rows), 'change')} before these")
    return Section("How the plan moved", blocks)


def moves_json(moves: Sequence[Moved]) -> list[dict[str, Any]]:
    """Give every change, with times in ms."""
    return [
        {
            "step": move.step,
            "why": move.why,
            "error": list(move.error),
            "allowed": move.limit,
            "step_ms": [us / 1e3 for us in move.step_us],
            "changes": list(move.changes),
        }
        for move in moves
    ]
