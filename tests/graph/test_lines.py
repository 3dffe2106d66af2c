"""Each kind of line has a method of the runtime, and one place."""

import inspect

import pytest
import torch
from helpers.graphs import TWO_BY_TWO, one_bucket
from helpers.stages import priced

from fxcomp.graph.info import info
from fxcomp.graph.lines import BY_OPERATOR, BY_ROLE, TIMED_METHODS, UNDOING, Line, line_of
from fxcomp.graph.regions import PLAIN
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transport import NullTransport

STOPS = "arrive"
"""The line at which an emitted step stops, until it is sent what it waits for: no method runs it."""

LINES = list(dict.fromkeys([*BY_OPERATOR.values(), *BY_ROLE.values(), *UNDOING.values()]))
BY_LEVEL = "reduce_scatter@intra > compress(topk(0.25))@cpu > all_gather@inter > decompress@cpu > all_gather@intra"


@pytest.mark.parametrize("line", [line for line in LINES if line.method != STOPS], ids=lambda line: line.method)
def test_the_runtime_runs_every_line(line: Line):
    runtime = Runtime(NullTransport(), torch.device("cpu"))
    first = next(iter(inspect.signature(getattr(runtime, line.method)).parameters))
    assert (first == "name") is line.has_buffer


def test_a_method_runs_one_kind_of_line():
    methods = [line.method for line in LINES]
    assert len(methods) == len(set(methods))
    not_timed = {STOPS, "exchange", "roll_back", "restore", "rng_state", "set_rng_state", "seed_rng"}
    assert set(TIMED_METHODS) == set(methods) - not_timed


def test_every_call_that_is_no_region_is_a_line_or_a_part_of_one():
    graph = priced(one_bucket(BY_LEVEL), TWO_BY_TWO).graph
    calls = [node for node in graph.nodes if node.op == "call_function" and info(node).role not in PLAIN]
    without = [node.name for node in calls if line_of(node) is None]
    assert without
    assert all(name.startswith(("payload", "left_out")) for name in without)
