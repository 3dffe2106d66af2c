"""Enter bugs under their names, and plant one in a process and in the ranks that it starts."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

VARIABLE = "PLANTED_BUG"
"""The environment variable that names the bug of a process and of the ranks that it starts."""


@dataclass(frozen=True)
class Bug:
    """Something wrong with the package, and a test that fails because of it."""

    plant: Callable[[], None]
    caught_by: str


BUGS: dict[str, Bug] = {}


def caught_by(test: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a bug under its function's name."""

    def enter(plant: Callable[[], None]) -> Callable[[], None]:
        BUGS[plant.__name__] = Bug(plant, test)
        return plant

    return enter


def all_bugs() -> dict[str, Bug]:
    """Return the bugs of all modules, which enter them when they are imported."""
    for module in ("planted", "planted_in_steps", "planted_on_devices"):
        importlib.import_module(f"helpers.{module}")
    return BUGS


def plant(name: str | None) -> None:
    """Plant a bug for the rest of this process's life."""
    if name:
        all_bugs()[name].plant()


def exchange(original: Callable[..., Any], mutant: Callable[..., Any]) -> None:
    """Put a function in the place of another one wherever the package has imported it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fxcomp":
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, mutant)


def wrap(owner: Any, name: str, mutant: Callable[..., Any]) -> None:
    """Let `mutant` answer for a module's function or a method; the original comes first, after `self`."""
    bound = functools.partialmethod if isinstance(owner, type) else functools.partial
    setattr(owner, name, bound(mutant, getattr(owner, name)))


def unchanged(gm: GraphModule, *_: Any, **__: Any) -> GraphModule:
    return gm
