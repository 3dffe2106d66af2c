"""Describe every command with its options, as its parser has them: a page of the site."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType

from fxcomp.__main__ import COMMANDS

HEAD = """\
# The command line

`fxcomp --help` and `fxcomp COMMAND --help` print the same. Exit statuses: 0; 1 if two plans differ (`fxcomp diff`); 2
for a mistake in what was asked, with a line that says which; 130 if interrupted. Where a command takes
`FILE.py[:job]`, the file has a function, `job` if none is named, that returns a [`fxcomp.Job`](describe.md).
"""


def describe() -> str:
    """Write the page."""
    return "\n".join([HEAD, *(line for command in COMMANDS for line in _described(command))])


def _described(command: ModuleType) -> Iterator[str]:
    parser = argparse.ArgumentParser(command.NAME)
    command.add_options(parser)
    actions = [action for action in parser._actions if action.dest != "help"]  # argparse has no public list
    yield from (f"## fxcomp {command.NAME}", "", f"{command.HELP[0].upper()}{command.HELP[1:]}.", "")
    yield from ("```", *(line.strip() for line in command.EXAMPLES.splitlines()), "```", "")
    yield from ("| option | means |", "|---|---|")
    yield from (f"| {_spelled(action)} | {_in_cell(action.help or '')} |" for action in actions)
    yield ""


def _spelled(action: argparse.Action) -> str:
    """Write the ways to give an option, with the name of its value: `-o FILE`, `--out FILE`."""
    value = str(action.metavar or action.dest.upper())
    times = action.nargs if isinstance(action.nargs, int) else 1
    values = [value] * times + ["..."] * (action.nargs in ("+", "*"))
    return ", ".join(f"`{' '.join([name, *values])}`" for name in action.option_strings) or f"`{value}`"


def _in_cell(text: str) -> str:
    return text.replace("|", "/").replace("%%", "%")
