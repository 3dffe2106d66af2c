"""Traces for Perfetto: what its format asks for holds, and every bucket leads from its gradient to its update."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.explained import by_hand, cluster, explanation
from helpers.traces import check_trace, slices_of

from fxcomp.report.explanation import Explanation
from fxcomp.report.step_report import StepReport
from fxcomp.report.trace import flows_of, to_trace


def saved(explained: Explanation, path: Path) -> dict[str, Any]:
    StepReport(explained).save_trace(path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("where", ["2x1", "4x2", "1x4"])
def test_a_trace_is_as_the_format_asks(where: str, tmp_path: Path):
    hosts, ranks = map(int, where.split("x"))
    trace = saved(explanation(cluster("1gbit", hosts, ranks)), tmp_path / "out.json")
    check_trace(trace)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "s", "t", "f"}


def test_perfetto_reads_the_slices_and_the_flows(tmp_path: Path):
    """Runs where perfetto of PyPI is installed, and its trace_processor_shell is on the path."""
    api, shell = pytest.importorskip("perfetto.trace_processor"), shutil.which("trace_processor_shell")
    if shell is None:
        pytest.skip("there is no trace_processor_shell")
    trace = saved(by_hand(), tmp_path / "out.json")
    with api.TraceProcessor(str(tmp_path / "out.json"), config=api.TraceProcessorConfig(bin_path=shell)) as processor:
        read = Counter(row.name for row in processor.query("select name from slice"))
        assert read == Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "X")
        assert next(iter(processor.query("select count(*) as n from flow"))).n > 0


def test_both_predictions_lie_side_by_side_with_a_lane_for_each_stream():
    trace = to_trace(by_hand())
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(processes.values()) == [processes[1], "predicted, chosen, 19.96 ms"]
    assert processes[1].startswith("predicted, dense, ")
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    assert threads == ["compute", "cpu pool", "in host", "between"]
    assert min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X") == 0.0
    for number, timeline in ((1, by_hand().dense_timeline), (2, by_hand().timeline)):
        assert timeline is not None
        ends = [event["ts"] + event["dur"] for event in slices_of(trace, number)]
        assert max(ends) == pytest.approx(timeline.step_time_us)
        assert len(ends) == sum(span.end_us > span.start_us for span in timeline.spans)


def test_a_slice_names_its_bucket_its_price_and_the_source_of_that():
    told = {event["name"]: event for event in slices_of(to_trace(by_hand()), 2)}
    assert told["compress 0"]["args"] == {
        "grounds": "measured",
        "source": "measured",
        "price_us": 600.0,
        "bucket": 0,
        "of": "int8: body[1].weight and 1 more",
    }
    assert "bucket" not in told["region 0"]["args"]
    assert told["all_gather 0"]["cat"] == "inter"


def test_a_flow_leads_from_the_compute_that_makes_a_gradient_to_its_update():
    flows = flows_of(by_hand().timeline)
    assert [[span.task.name for span in spans] for spans in flows.values()] == [
        ["region 0", "pack 0", "compress 0", "all_gather 0", "decompress 0", "update 0"],
        ["region 1", "all_reduce 1", "update 1"],
        ["region 2", "reduce_scatter 2", "compress 2", "all_gather 2", "all_gather@intra 2", "update 2"],
    ]
    events = [event for event in to_trace(by_hand())["traceEvents"] if event["ph"] in "stf"]
    assert Counter(event["ph"] for event in events if event["pid"] == 2) == {"s": 3, "f": 3, "t": 4 + 1 + 4}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ph": "Z"}, "phase"),
        ({"ts": math.nan}, "ts"),
        ({"dur": -1.0}, "dur"),
        ({"pid": "1"}, "pid"),
        ({"name": ""}, "name"),
    ],
)
def test_the_check_of_the_format_notices_what_is_wrong(change: dict[str, Any], said: str):
    trace = to_trace(by_hand())
    place = next(k for k, event in enumerate(trace["traceEvents"]) if event["ph"] == "X")
    trace["traceEvents"][place] = {**trace["traceEvents"][place], **change}
    with pytest.raises(AssertionError, match=said):
        check_trace(trace)


def test_the_check_of_the_format_notices_a_flow_that_does_not_end():
    trace = to_trace(by_hand())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] != "f"]
    with pytest.raises(AssertionError, match="flow"):
        check_trace(trace)
