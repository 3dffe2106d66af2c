"""The line that says what is being done: written over, and never with escape codes."""

import io

import pytest

from fxcomp import status_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    return made


def shown_by(text: str, columns: int) -> str:
    """The line that a terminal shows after all of the text."""
    line, at = [" "] * columns, 0
    for letter in text:
        if letter == "\r":
            at = 0
        else:
            line[at], at = letter, at + 1
    return "".join(line).rstrip()


def test_each_line_writes_over_the_one_before(monkeypatch: pytest.MonkeyPatch):
    terminal = terminal_of(monkeypatch)
    status_line.show("measuring the step on this machine ...")
    assert shown_by(terminal.getvalue(), 20) == "measuring the step"
    status_line.show("choosing ...")
    assert shown_by(terminal.getvalue(), 20) == "choosing ..."
    status_line.clear()
    assert shown_by(terminal.getvalue(), 20) == ""
    assert "\x1b" not in terminal.getvalue()


def test_a_dumb_terminal_and_a_file_get_no_line(monkeypatch: pytest.MonkeyPatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    status_line.show("choosing ...")
    assert terminal.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    status_line.show("choosing ...")
    assert file.getvalue() == ""
