"""Turn emitted source into a callable, saved where tracebacks and people find it."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.codegen.inductor import compile_with_inductor
from fxcomp.graph.regions import regions


def load(source: str, gm: GraphModule, directory: Path) -> ModuleType:
    """Save the source in `directory` and run it as a module; `gm` supplies the graph's constants.

    The file's name is the source's own digest, so that ranks of one host may write it at the same time. A directory
    that cannot be written to is no reason to fail: the source is then kept in memory alone.
    """
    name = f"step_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = directory / f"{name}.py"
    try:
        compat.write_atomically(path, source)
    except OSError:
        lines = source.splitlines(keepends=True)
        linecache.cache[str(path)] = (len(source), None, lines, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update({n.name: getattr(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"})
    exec(compile(source, str(path), "exec"), module.__dict__)
    module.__dict__["aten"] = compat.direct_aten  # the same operators, a microsecond sooner each
    return module


def compile_regions(module: ModuleType, gm: GraphModule) -> None:
    """Let Inductor compile the forward and backward regions; updates, which write in place, stay as they are."""
    by_name = {region.name: region for region in regions(gm)}

    def compiled(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        if name not in by_name or by_name[name].updates:
            return run
        return compile_with_inductor(gm, by_name[name], run)

    replace_regions(module, compiled)


Replacement = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Makes a function that stands in for the one of that name: a compiled one, or one that measures."""


def replace_regions(module: ModuleType, replacement: Replacement) -> None:
    """Put something in place of each region's function."""
    for name, value in list(module.__dict__.items()):
        if callable(value) and name.startswith(("region_", "update_")):
            module.__dict__[name] = replacement(name, value)


def rebound(module: ModuleType, replacement: Replacement) -> Any:
    """Return the module's step over other functions in place of its regions; the module stays as it is."""
    other = _copy(module)
    replace_regions(other, replacement)
    return _step_of(module, other)


def observed(module: ModuleType, *, rule: Replacement, update: Replacement) -> Any:
    """Return the module's step with the optimizer's rules and the regions that call them wrapped.

    Updates are plain functions: Inductor compiles the other regions alone.
    """
    other = _copy(module)
    for name, value in module.__dict__.items():
        if name.startswith("optimizer_step_"):
            other.__dict__[name] = rule(name, value)
        elif name.startswith("update_"):
            other.__dict__[name] = update(name, FunctionType(value.__code__, other.__dict__, name))
    return _step_of(module, other)


def _copy(module: ModuleType) -> ModuleType:
    other = ModuleType(module.__name__)
    other.__dict__.update(module.__dict__)
    return other


def _step_of(module: ModuleType, functions: ModuleType) -> Any:
    return FunctionType(module.step.__code__, functions.__dict__, "step")
