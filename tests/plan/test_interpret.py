"""Steps must fit what is held: every rule has its message, and random steps are refused or give the mean."""

from __future__ import annotations

import math

import fxcomp_more  # noqa: F401  registers its compressors
import pytest
import torch
from helpers.legs import Walker, walk
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.cluster.seating import Axis
from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadPlan, BadStrategy
from fxcomp.plan.interpret import (
    COLLECTIVES,
    EVERYWHERE,
    Collective,
    Compress,
    Decompress,
    Device,
    Propose,
    Standing,
    Step,
    after,
    fitting,
    interpret,
    misfit,
    parse_steps,
    text_of,
)
from fxcomp.plan.legs import Route
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.route import route_of
from fxcomp.plan.strategy import Strategy
from fxcomp.testing.rounds import Replica, fresh_state

MISFITS = {
    "propose(powersgd(2)) > compress(powersgd(2)) > all_reduce@world > decompress": (
        "step 2, compress(powersgd(2))@gpu, does not fit: the proposal of powersgd(2) is reduced next, by an all_reduce"
    ),
    "propose(shared_int8) > all_gather@world": "the proposal of shared_int8 is reduced next, by an all_reduce",
    "point_to_point@world": "step 1, point_to_point@world, does not fit: point_to_point is no collective of gradients",
    "decompress": "step 1, decompress@gpu, does not fit: there is no payload to decompress",
    "compress(int8) > decompress > all_reduce@world": "step 2, decompress@gpu, does not fit: the payload has not been",
    "propose(int8) > all_reduce@world": "step 1, propose(int8)@gpu, does not fit: int8 needs no agreement",
    "reduce_scatter@intra > all_gather@intra": "shards are put together once their sum is complete",
    "compress(int8) > broadcast@world": "no reduce or gather@world has split the bucket before it",
    "all_gather@world": "no reduce_scatter or all_to_all@world has split the bucket before it",
    "reduce_scatter@intra > all_reduce@inter > all_gather@inter": "no reduce_scatter or all_to_all@inter has split",
    "all_reduce@world > all_reduce@world": "gradients are summed over world already, and would count twice",
    "all_reduce@intra > all_reduce@world": "gradients are summed over world already, and would count twice",
    "all_to_all@world": "dense values are not sent by all_to_all; compress them before",
    "gather@world": "dense values are not sent by gather; compress them before",
    "compress(int8) > all_reduce@world": "the network cannot add int8 payloads up; gather them",
    "compress(bf16) > all_gather@intra > all_reduce@inter": (
        "several ranks' payloads lie side by side, which the network cannot add up; decompress them before"
    ),
    "propose(shared_int8) > all_reduce@intra > compress(shared_int8) > all_reduce@inter": (
        "the ranks have agreed over intra"
    ),
    "compress(randomk(0.1)) > reduce_scatter@world": "randomk(0.1) payloads can only be added up: all_reduce",
    "compress(int8) > compress(int8)": "the values are int8 payloads already; decompress them before",
    "reduce_scatter@intra > propose(powersgd(2)) > all_reduce@inter": (
        "powersgd(2) compresses whole parameters, but each rank has a shard of the bucket"
    ),
    "compress(shared_int8) > all_reduce@world": (
        "shared_int8 needs an agreement of the ranks: propose(shared_int8) > all_reduce before it"
    ),
    "propose(shared_int8) > all_reduce@world > compress(int8)": "the ranks have agreed on something for shared_int8",
}
"""The rule that each breaks first."""


@pytest.mark.parametrize("text", MISFITS)
def test_a_step_that_does_not_fit_is_refused_by_its_rule(text: str):
    with pytest.raises(BadStrategy) as error:
        Strategy.parse(text)
    assert MISFITS[text] in str(error.value)


def test_the_error_names_the_step_what_is_held_and_what_would_fit():
    with pytest.raises(BadStrategy) as error:
        Strategy.parse("reduce_scatter@intra > compress(int8) > all_reduce@inter > decompress > all_gather@intra")
    assert str(error.value) == (
        "the strategy 'reduce_scatter@intra > compress(int8)@gpu > all_reduce@inter > decompress@gpu >"
        " all_gather@intra' does not sum each gradient over all ranks once: step 3, all_reduce@inter, does not fit:"
        " the network cannot add int8 payloads up; gather them.\n"
        "  Held before it: int8 payloads, shards of reduce_scatter@intra, summed over the ranks of a host.\n"
        "  Would fit here: all_gather@inter, all_to_all@inter, gather@inter."
    )


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("reduce_scatter@intra", "dense values, shards of reduce_scatter@intra, summed over the ranks of a host"),
        ("compress(int8) > all_gather@world", "int8 payloads, whole buckets, summed everywhere"),
        ("all_reduce@inter", "dense values, whole buckets, summed over the hosts of a rack, the racks"),
        (
            "reduce@intra > reduce_scatter@inter",
            "dense values, shards of reduce@intra and of reduce_scatter@inter, summed everywhere",
        ),
        ("propose(shared_int8)", "proposals, whole buckets, not summed"),
    ],
)
def test_a_strategy_that_stops_early_is_told_what_it_holds(text: str, held: str):
    with pytest.raises(BadStrategy, match="its end does not fit: ranks would not end with the mean") as error:
        Strategy.parse(text)
    assert f"Held before it: {held}.\n" in str(error.value)


def test_what_would_fit_leads_to_the_mean():
    """Whoever follows the error's first suggestion, a step at a time, arrives."""
    steps: tuple[Step, ...] = (*parse_steps("compress(int8)@gpu > all_to_all@intra > decompress@gpu"),)
    for text in ("all_reduce@inter", "all_gather@intra"):
        with pytest.raises(BadStrategy, match=f"Would fit here: .*{text}"):
            interpret(steps)
        steps = (*steps, *parse_steps(text))
    assert interpret(steps)[-1].is_mean


def test_an_empty_strategy_is_refused():
    with pytest.raises(BadStrategy, match=r"'\(no steps\)' does not sum each gradient .* its end does not fit"):
        Strategy(())


def test_where_ranks_have_summed_over_one_axis_only_the_others_are_left():
    held = Standing(summed=Level.INTRA.axes)
    left = {step.level for step in fitting(held, COLLECTIVES) if isinstance(step, Collective)}
    assert left == {Level.INTER, Level.RACK, Level.RACKS}
    assert not Standing(summed=EVERYWHERE).splits
    assert Standing(summed=EVERYWHERE).is_mean
    assert not Standing(summed=frozenset({Axis.HOST})).is_mean


# Random steps

CLUSTERS = [
    Cluster.parse(f"{shape}, inter 1gbit, intra 10gbit") for shape in ("2x1", "1x3", "2x2", "3x2", "2x2x2", "2+1")
]
COMPRESSORS = [
    parse_compressor(text)
    for text in (
        "int8(block=4)",
        "int8(block=16)",
        "bf16",
        "shared_int8(stochastic=false)",
        "topk(1.0)",
        "randomk(1.0)",
    )
]
ANY_STEP: list[Step] = [
    *COLLECTIVES,
    *(make(compressor) for make in (Propose, Compress) for compressor in COMPRESSORS),
    *(Decompress(device) for device in Device),
]
SHAPES = st.lists(st.sampled_from([(1,), (2,), (3, 5), (17,), (4, 8)]), min_size=1, max_size=4)


@st.composite
def step_sequences(draw: st.DrawFn) -> tuple[Step, ...]:
    """Mostly steps that fit what is held, else hardly any sequence would be a strategy; sometimes any."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 12))):
        held = held_after(steps)
        if held is None or (steps and held.is_mean):
            break
        fit = fitting(held, ANY_STEP)
        is_any = draw(st.integers(0, 19)) == 0 or not fit
        steps.append(draw(st.sampled_from(ANY_STEP if is_any else fit)))
    return tuple(steps)


def held_after(steps: list[Step]) -> Standing | None:
    """Return what is held after steps that need not lead to the mean; None if one does not fit."""
    held = Standing()
    for step in steps:
        if misfit(held, step) is not None:
            return None
        held = after(held, step)
    return held


@settings(max_examples=200)
@given(step_sequences(), SHAPES, st.sampled_from(CLUSTERS), st.integers(0, 2**20))
@example(parse_steps("compress(bf16) > all_gather@intra > all_gather@inter > decompress"), [(3, 5)], CLUSTERS[3], 0)
@example(parse_steps("reduce@world > compress(int8(block=4)) > broadcast@world > decompress"), [(1,)], CLUSTERS[1], 0)
def test_random_steps_are_refused_or_every_rank_has_the_mean_but_for_what_residuals_keep(
    steps: tuple[Step, ...], shapes: list[tuple[int, ...]], cluster: Cluster, seed: int
):
    plan = refused = None
    try:
        plan = Plan((Bucket(("all",), (sum(map(math.prod, shapes)),), Strategy(steps)),))
        plan.check_fits(cluster)
    except (BadStrategy, BadPlan) as error:
        refused = str(error)
    if plan is None or refused is not None:
        assert refused is not None
        assert (text_of(steps) or "(no steps)") in refused
        return
    (bucket,) = plan.buckets
    assert Strategy.parse(str(bucket.strategy)) == bucket.strategy
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.rand(bucket.elements, generator=generator) - 0.3 for _ in range(cluster.world_size)]
    routes = [route_of(bucket.strategy, shapes, cluster, rank) for rank in range(cluster.world_size)]
    walkers = [Walker(route, gradient, fresh(route)) for route, gradient in zip(routes, gradients, strict=True)]
    results = walk(walkers, cluster)
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank} ends with other bits than rank 0"

    told = results[0].double() + sum(map(left_out, walkers))
    mean = torch.stack(gradients).double().mean(0)
    allowed = 0.01 * len(bucket.strategy.compressors) if sums_bf16(bucket.strategy) else 1e-6
    assert (told - mean).norm() <= allowed * max(gradient.norm() for gradient in gradients)


def fresh(route: Route) -> dict[int, Replica]:
    """Return what a rank brings to its first step, for every compression."""
    sizes = [[size for piece in slot.segments for size in piece] for slot in route.slots]
    states = [fresh_state(slot.compressor, each) for slot, each in zip(route.slots, sizes, strict=True)]
    return {
        number: Replica(torch.zeros(sum(each)), state)
        for number, (each, state) in enumerate(zip(sizes, states, strict=True))
    }


def left_out(walker: Walker) -> Tensor:
    """Return a rank's residuals as the mean lacks them: each in its own unit, where its values lie."""
    total = torch.zeros(len(walker.route.whole), dtype=torch.float64)
    for number, slot in enumerate(walker.route.slots):
        residual = walker.replicas[number].residual
        assert residual is not None
        for piece, part in zip(slot.pieces, residual.split(list(map(len, slot.pieces))), strict=True):
            total[piece.start : piece.stop] += float(slot.unit.weight) * part.double()
    return total


def sums_bf16(strategy: Strategy) -> bool:
    """The network rounds as it adds bf16, which nobody feeds back."""
    return any(
        isinstance(step, Collective)
        and step.kind.sums
        and held.compressor is not None
        and held.compressor.name == "bf16"
        for held, step in zip(strategy.held, strategy.steps, strict=False)
    )


@settings(max_examples=100)
@given(step_sequences())
def test_a_refusal_never_depends_on_what_comes_after(steps: tuple[Step, ...]):
    """`fitting` offers exactly the steps that `interpret` takes."""
    held = Standing()
    for number, step in enumerate(steps):
        if misfit(held, step) is not None:
            with pytest.raises(BadStrategy, match=rf"step {number + 1}, "):
                interpret(steps)
            return
        after_it = held_after(list(steps[: number + 1]))
        assert after_it is not None
        held = after_it


def test_random_steps_reach_every_kind_of_strategy():
    """A control: the sequences above are strategies often enough, of all collectives and with all compressors."""
    found: set[str] = set()

    @settings(max_examples=300)
    @given(step_sequences())
    def collect(steps: tuple[Step, ...]):
        try:
            strategy = Strategy(steps)
        except BadStrategy:
            found.add("refused")
            return
        found.update(step.kind.value for step in strategy.collectives)
        found.update(compressor.name for compressor in strategy.compressors)
        found.add(f"{len(strategy.compressors)} compressions")

    collect()
    kinds = {step.kind.value for step in COLLECTIVES if isinstance(step, Collective)}
    assert {"refused", "2 compressions", *kinds, *(each.name for each in COMPRESSORS)} <= found
