"""See every call of a random generator's methods while a step is traced.

`torch.Generator` is a C type: a method that somebody has in hand already (`torch.default_generator`, an attribute of a
model) is looked up in the type's own table at each call, and nowhere else can all calls be seen.
"""

# The table of a C type is private.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxcomp.compat.tracing import is_traced_here

_METHODS = (
    *("manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state"),
    *("graphsafe_get_state", "graphsafe_set_state", "__reduce__", "__setstate__"),
)


@contextmanager
def calls_of_generators(instead: Callable[[torch.Generator, str, Sequence[Any]], Any]) -> Generator[None]:
    """While open, `instead` is called with a generator, a method's name and arguments wherever this code is traced."""
    table: dict[str, Any] = gc.get_referents(torch.Generator.__dict__)[0]
    before = {name: table[name] for name in _METHODS if name in table}
    try:
        table.update({name: _instead_of(name, method, instead) for name, method in before.items()})
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))
        yield
    finally:
        table.update(before)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))


def _instead_of(name: str, method: Any, instead: Callable[[torch.Generator, str, Sequence[Any]], Any]) -> Any:
    def called(generator: torch.Generator, *args: Any, **kwargs: Any) -> Any:
        if not is_traced_here():  # another thread, or values that are computed aside
            return method(generator, *args, **kwargs)
        return instead(generator, name, (*args, *kwargs.values()))

    return called


def device_of_default(generator: torch.Generator) -> torch.device | None:
    """Find the device whose default generator this is; None for any other."""
    if is_same_generator(generator, torch.default_generator):
        return torch.device("cpu")
    places = [i for i, default in enumerate(torch.cuda.default_generators) if is_same_generator(default, generator)]
    return torch.device("cuda", places[0]) if places else None


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Compare what two objects stand for: an operator's argument comes back in another object."""
    return _place(one) == _place(other)


def _place(generator: Any) -> int:
    return generator._cdata


def generators_in(graph: GraphModule) -> list[torch.Generator]:
    """List the generators that a graph names, each once."""
    found: dict[int, torch.Generator] = {}
    for node in graph.graph.nodes:
        held = [getattr(graph, str(node.target))] if node.op == "get_attr" else tree_leaves((node.args, node.kwargs))
        found.update((_place(value), value) for value in held if isinstance(value, torch.Generator))
    return list(found.values())


def is_as_made(generator: torch.Generator) -> bool:
    """Ask if a generator was never seeded nor drawn from."""
    return torch.equal(generator.get_state(), torch.Generator(generator.device).get_state())
