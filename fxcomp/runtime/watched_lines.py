"""Run a runtime's lines with something around each: a clock, or a name for a profiler.

A step that nobody watches knows nothing of it: it is given the runtime itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.profiler import record_function

from fxcomp.runtime.runtime import Runtime

Call = tuple[str, int]
"""A line, as the runtime's method and the number of its call in this step; or a region's name, and 0."""

Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Makes a method, of a name, do something around itself."""


class WatchedLines:
    """A runtime whose lines are watched; all else is the runtime's."""

    def __init__(self, runtime: Runtime, methods: Iterable[str], around: Around) -> None:
        self._runtime = runtime
        for method in methods:
            setattr(self, method, around(method, getattr(runtime, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class NamedLines:
    """One step whose lines and regions a profiler shows by name. As a context, it names the pool's work, too."""

    def __init__(self, runtime: Runtime, names: Mapping[Call, str]) -> None:
        self._runtime, self._names = runtime, names
        self._counts: dict[str, int] = {}
        self._line = ""
        methods = dict.fromkeys(method for method, _ in names if hasattr(runtime, method))
        self.lines: Any = WatchedLines(runtime, methods, self._named_line)

    def __enter__(self) -> NamedLines:
        self._runtime.pool.watch = self._on_pool
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.pool.watch = None

    def region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Name a region's function."""
        return _within(self._names.get((name, 0), name), run)

    def _named_line(self, method: str, run: Callable[..., Any]) -> Callable[..., Any]:
        counts, names = self._counts, self._names

        def named(*arguments: Any, **options: Any) -> Any:
            number = counts[method] = counts.get(method, -1) + 1
            self._line = names.get((method, number), method)
            return _within(self._line, run)(*arguments, **options)

        return named

    def _on_pool(self, work: Callable[..., Any]) -> Callable[..., Any]:
        return _within(self._line, work)


def _within(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return run(*arguments, **options)

    return named
