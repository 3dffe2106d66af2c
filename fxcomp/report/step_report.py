"""The report object that users get."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from fxcomp import compat
from fxcomp.errors import BadOption
from fxcomp.report.as_json import to_json
from fxcomp.report.explanation import Explanation
from fxcomp.report.html.page import to_html
from fxcomp.report.terminal import to_text
from fxcomp.report.trace import to_trace


class StepReport:
    """A snapshot of a step: plan, reasons, times. Later steps do not change it."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation
        """Facts that all formats show."""

    def __str__(self) -> str:
        return to_text(self.explanation)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that isolates its styles."""
        page = escape(to_html(self.explanation), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48rem;border:0"></iframe>'

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return to_json(self.explanation)

    def save_html(self, path: str | Path) -> None:
        """Write a self-contained HTML file to `path`. Raise BadOption if that fails."""
        _save(to_html(self.explanation), path)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace of predicted and profiled steps to `path`, for ui.perfetto.dev. Raise BadOption if it fails."""
        _save(json.dumps(to_trace(self.explanation)) + "\n", path)


def _save(text: str, path: str | Path) -> None:
    try:
        compat.write_atomically(Path(path), text)
    except OSError as error:
        raise BadOption(f"cannot write {path}: {error.strerror or error}") from None
