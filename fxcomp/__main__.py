"""Command line of fxcomp. Each command is a module or package in `commands/`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from types import ModuleType

from fxcomp import __version__, status_line
from fxcomp.commands import calibrate, diff, dump, explain, plot
from fxcomp.commands.bisect import run as bisect
from fxcomp.commands.demo import run as demo
from fxcomp.errors import BadOption, FxcompError

PAGES = "https://github.com/fxcomp/fxcomp/tree/main/docs"

COMMANDS: tuple[ModuleType, ...] = (explain, dump, diff, bisect, plot, calibrate, demo)
"""Modules with NAME, HELP, EXAMPLES, `add_options` and `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    0 for success, 1 if `diff` finds differences, 2 for an FxcompError, 130 if interrupted, 141 if the output pipe is
    closed.
    """
    try:
        with _short_warnings():
            status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except FxcompError as error:
        status_line.clear()
        print(f"fxcomp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        status_line.clear()
        return 130
    except BrokenPipeError:  # the reader closed the pipe; Python must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxcomp",
        description="Work out where gradient compression pays in a training step, and why.",
        epilog="".join(["examples:\n", *(command.EXAMPLES for command in COMMANDS), f"\ndocumentation: {PAGES}\n"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxcomp {__version__}")
    names = " | ".join(command.NAME for command in COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    for command in COMMANDS:
        options = commands.add_parser(command.NAME, help=command.HELP)
        command.add_options(options)
        options.set_defaults(run=command.run)
    return parser


def _run(words: list[str]) -> int:
    arguments = make_parser().parse_args(words)
    for name, value in vars(arguments).items():
        if value == "" and name != "job":  # from an unset shell variable
            raise BadOption(f"--{name.replace('_', '-')} is empty: give it a value, or leave it out")
    status = arguments.run(arguments)
    gc.freeze()  # avoids a last garbage collection at exit
    return status


@contextlib.contextmanager
def _short_warnings() -> Generator[None]:

    def show(message: Warning | str, *_: object) -> None:
        print(f"fxcomp: {str(message).removeprefix('fxcomp: ')}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
