"""On a device lines go aside: backward stands still for no collective, and every crossing has its wait."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.captures import captured
from helpers.graphs import COSTS, TWO, TWO_BY_TWO
from helpers.jobs import JOBS
from helpers.plans import plan_in_turns
from helpers.pretended import as_accelerator
from torch.fx import GraphModule

from fxcomp.codegen.emit import emit
from fxcomp.graph.aside import goes_aside
from fxcomp.graph.edit import clone
from fxcomp.graph.effects import ASIDE, WIRE, Event, traces
from fxcomp.graph.happens_before import races_of
from fxcomp.graph.info import KEY, info
from fxcomp.graph.regions import Region, cut
from fxcomp.pipeline import Compiler
from fxcomp.plan.strategy import Strategy

IN_STAGES = {
    "two shots": "compress(int4)@gpu > all_to_all@world > decompress@gpu"
    " > compress(int4)@gpu > all_gather@world > decompress@gpu",
    "levels": "reduce_scatter@intra > all_reduce@inter > all_gather@intra",
    "levels, compressed": "reduce_scatter@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu"
    " > all_gather@intra",
    "powersgd": "propose(powersgd(2))@gpu > all_reduce@world > compress(powersgd(2))@gpu > all_reduce@world"
    " > decompress@gpu",
}
STRATEGIES = {**IN_STAGES, "int8": "compress(int8)@gpu > all_gather@world > decompress@gpu"}
NOT_ASIDE = {
    "dense": "all_reduce@world",
    "in the pool": "reduce_scatter@intra > compress(int8)@cpu > all_gather@inter > decompress@cpu > all_gather@intra",
}


@functools.cache
def final(strategy: str, commits: bool = False) -> GraphModule:
    """The graph of a device's step whose buckets all have this strategy."""
    model, text = JOBS["mlp"].build(), {**STRATEGIES, **NOT_ASIDE}[strategy]
    plan = plan_in_turns(model, [Strategy.parse(text)], 1)
    cluster = TWO_BY_TWO if "intra" in text else TWO
    with as_accelerator():
        graph = captured(model, JOBS["mlp"].batch(0)).graph
        return Compiler(cluster, skip_nonfinite=commits).rewrite(graph, plan, COSTS)


def events_before(events: Sequence[Event], place: int) -> set[int]:
    found: set[int] = set()
    front = [place]
    while front:
        new = set(events[front.pop()].after) - found
        found |= new
        front += new
    return found


def waits_of_backward(gm: GraphModule) -> set[str]:
    """Name the collectives of a step that must end before one of its forward and backward regions begins."""
    events = next(iter(traces(gm, True)))
    start = max(place for place, event in enumerate(events) if event.name == "start")  # of the second step
    body = {each.name for each in cut(gm) if isinstance(each, Region) and not each.updates}
    regions = [place for place in range(start, len(events)) if events[place].name in body]
    assert len(regions) > 1
    before = set[int]().union(*(events_before(events, place) for place in regions))
    return {events[place].where for place in before if place > start and events[place].where.startswith(WIRE)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_stands_still_for_no_collective(strategy: str):
    assert waits_of_backward(final(strategy)) == set()


def in_line(gm: GraphModule) -> GraphModule:
    for node in gm.graph.nodes:
        node.meta[KEY] = replace(info(node), is_aside=False)
    return gm


@pytest.mark.parametrize("strategy", IN_STAGES)
def test_in_line_it_would(strategy: str):
    assert waits_of_backward(in_line(clone(final(strategy))))


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_goes_aside_has_no_races(strategy: str, commits: bool):
    gm = final(strategy, commits)
    lists = list(traces(gm, True))
    assert any(event.where == ASIDE for events in lists for event in events)
    assert [races_of(events) for events in lists] == [[]] * len(lists)


def without(events: Sequence[Event], name: str, number: int) -> list[Event]:
    """Let one crossing wait for nothing but its own stream."""
    places = [place for place, event in enumerate(events) if event.name == name]
    chosen = places[number]
    own = {"aside": ASIDE, "join": events[chosen].where}[name]
    kept = tuple(place for place in events[chosen].after if events[place].where == own)
    return [replace(event, after=kept) if place == chosen else event for place, event in enumerate(events)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["aside", "join"])
def test_a_crossing_that_does_not_wait_is_a_race(name: str, strategy: str):
    events = next(iter(traces(final(strategy), True)))
    count = sum(event.name == name for event in events)
    assert count
    found = [bool(races_of(without(events, name, number))) for number in range(count // 2)]
    assert found == [True] * len(found)


@pytest.mark.parametrize("strategy", NOT_ASIDE)
def test_what_compute_waits_for_anyway_stays(strategy: str):
    assert not any(goes_aside(piece) for piece in cut(final(strategy)))


def test_a_step_says_where_it_crosses():
    lines = [line.split(" = ")[-1].strip() for line in emit(final("powersgd")).splitlines()]
    packs = [place for place, line in enumerate(lines) if line.startswith("rt.pack(")]
    assert packs
    inside = [line for line in lines if line.startswith("with rt.aside(pack_")]
    assert len(inside) == len(packs)
    assert sum(line.startswith("rt.join(mean_") for line in lines) == len(packs)
