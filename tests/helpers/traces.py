"""Check a trace by the rules of Chrome's trace event format."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

NAMES_OF_METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
ROUNDING_US = 1e-6


def slices_of(trace: Mapping[str, Any], process: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def check_trace(trace: Mapping[str, Any]) -> None:
    """Check every event's fields, that slices of a thread do not overlap, and that flows begin, go on and end."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        _check_event(event)
    _check_lanes(trace)
    _check_flows(trace)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _check_event(event: Mapping[str, Any]) -> None:
    assert event["ph"] in ("M", "X", "s", "t", "f"), "an unknown phase"
    assert isinstance(event["pid"], int), "a pid is a number"
    assert isinstance(event["tid"], int), "a tid is a number"
    assert isinstance(event["name"], str), "a name is text"
    assert event["name"], "a name is text"
    if event["ph"] == "M":
        assert event["name"] in NAMES_OF_METADATA
        [value] = event["args"].values()
        assert isinstance(value, int if event["name"].endswith("sort_index") else str)
        return
    assert isinstance(event["cat"], str)
    assert _is_time(event["ts"]), "ts is a time in us"
    if event["ph"] == "X":
        assert _is_time(event["dur"]), "dur is a time in us"
    else:
        assert isinstance(event["id"], int)
        assert event["ph"] != "f" or event["bp"] == "e", "a flow ends in the slice that encloses its end"


def _check_lanes(trace: Mapping[str, Any]) -> None:
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    lanes: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert set(lanes) <= named, "a lane without a name"
    assert {process for process, _ in lanes} <= processes, "a process without a name"
    for spans in lanes.values():
        spans.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(spans):
            assert start >= end - ROUNDING_US, f"slices of a lane overlap: {first} and {second}"


def _check_flows(trace: Mapping[str, Any]) -> None:
    flows: dict[int, list[Mapping[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    for events in flows.values():
        phases = "".join(event["ph"] for event in events)
        assert phases == f"s{'t' * (len(phases) - 2)}f", "a flow begins once and ends once"
        assert len({(event["pid"], event["name"], event["cat"]) for event in events}) == 1
        times = [event["ts"] for event in events]
        assert times == sorted(times), "a flow goes forward in time"
        assert all(_encloses(trace, event) for event in events), "a flow's end lies in no slice"


def _encloses(trace: Mapping[str, Any], flow: Mapping[str, Any]) -> bool:
    return any(
        each["tid"] == flow["tid"] and each["ts"] <= flow["ts"] <= each["ts"] + each["dur"]
        for each in slices_of(trace, flow["pid"])
    )
