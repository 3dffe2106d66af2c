"""Time the lines of an emitted step from outside: a step that is not timed knows nothing of it.

    watch = Stopwatch(runtime, methods, clock)
    step = rebound(module, watch.region)          # the same code, over regions with a clock around each
    step(watch.lines, parameters, ...)            # the same lines, with a clock around each
    watch.reading()                               # when each began and ended

A line costs two looks at the clock and one list entry: 0.3 us (measured, AMD EPYC, both cores busy, 2026-11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxcomp.runtime.clock import Clock
from fxcomp.runtime.group import call_when_done
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import Flight

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


@dataclass(frozen=True, slots=True)
class Reading:
    """The begin and end of each line of one step, in us after the step's beginning."""

    main: dict[Call, tuple[float, float]]
    """On the main thread, or where that keeps a device busy, on the device."""
    pool: dict[Call, tuple[float, float]]
    """Work that a line has handed to the pool; on the pool's own clock, which began at the same time."""
    ends: dict[Call, float]
    """The end of a launch's collective, where the backend told of it: gloo does for all but sends and receives."""


_Mark = tuple[Call, Any, Any]
"""A line, and two looks of a clock: at its begin and end."""


class Stopwatch:
    """Times steps of one runtime, one at a time: `start`, the step over `lines` and `region`s, `stop`, `reading`."""

    def __init__(self, runtime: Runtime, methods: Iterable[str], clock: Clock) -> None:
        """`methods` are the runtime's methods that are timed."""
        self._clock, self._pool_clock = clock, Clock()
        self._counts: dict[str, int] = {}
        self._line: Call = ("", 0)
        self._begin: Any = None
        self._pool_begin: Any = None
        self._main: list[_Mark] = []
        self._pool: list[_Mark] = []
        self._ends: dict[Call, Any] = {}
        self._runtime = runtime
        self.lines: Any = WatchedLines(runtime, methods, self.line)

    def start(self) -> None:
        """Begin a step. Until `stop` the runtime's pool is watched, and no line goes aside: times are compute's."""
        self._counts.clear()
        self._main, self._pool, self._ends = [], [], {}
        self._begin, self._pool_begin = self._clock.look(), self._pool_clock.look()
        self._runtime.pool.watch = self._on_pool
        self._runtime.side.is_in_line = True

    def stop(self) -> None:
        """End a step, whatever has become of it."""
        self._runtime.pool.watch = None
        self._runtime.side.is_in_line = False

    def reading(self) -> Reading | None:
        """The times of the last step; None if a device has not finished it yet."""
        main = _between(self._clock, self._begin, self._main)
        pool = _between(self._pool_clock, self._pool_begin, self._pool)
        if main is None or pool is None:
            return None
        ends = {call: self._clock.us(self._begin, end) for call, end in list(self._ends.items())}
        return Reading(main, pool, {call: us for call, us in ends.items() if us is not None})

    def region(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A region's function with a clock around it."""
        look, call = self._clock.look, (name, 0)

        def timed(*inputs: Any) -> Any:
            start = look()
            result = run(*inputs)
            self._main.append((call, start, look()))
            return result

        return timed

    def line(self, method: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A line of the runtime with a clock around it."""
        look, counts = self._clock.look, self._counts

        def timed(*arguments: Any, **options: Any) -> Any:
            number = counts[method] = counts.get(method, -1) + 1
            call = self._line = (method, number)
            start = look()
            result = run(*arguments, **options)
            self._main.append((call, start, look()))
            if self._clock.sees_threads and isinstance(result, Flight):
                self._hear_of(call, result)
            return result

        return timed

    def _hear_of(self, call: Call, flight: Flight) -> None:
        ends, look = self._ends, self._clock.look
        call_when_done(flight.work, lambda: ends.setdefault(call, look()))

    def _on_pool(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Work for the pool with a clock around it, which looks when the pool has come to it and has what it takes."""
        call, marks, look = self._line, self._pool, self._pool_clock.look

        def timed(*given: Any) -> Any:
            start = look()
            result = work(*given)
            marks.append((call, start, look()))
            return result

        return timed


def _between(clock: Clock, begin: Any, marks: Sequence[_Mark]) -> dict[Call, tuple[float, float]] | None:
    found: dict[Call, tuple[float, float]] = {}
    for call, start, end in marks:
        first, last = clock.us(begin, start), clock.us(begin, end)
        if first is None or last is None:
            return None
        found[call] = (first, last)
    return found
