"""Where one rank fails between two agreements, all end with an error that names why, and can go on afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.injection import Injected, calls_of
from helpers.ranks import try_ranks
from helpers.replicas import everyone
from helpers.small_step import batch, compiled, parameters_of, replanning

from fxcomp import compat
from fxcomp.errors import PeerFailed
from fxcomp.step.compiled_step import CompiledStep

GROUP_S = 10.0


# What fails between two agreements


def compiling() -> Callable[[], CompiledStep]:
    return compiled


def loading() -> Callable[[], CompiledStep]:
    """Each time the same step, which goes on once a state has been loaded on all ranks."""
    if not _loaded:
        step = compiled(plan="int8")
        step(batch())
        _loaded.append((step, step.state_dict()))
    step, saved = _loaded[0]
    step.load_state_dict(saved)

    def load() -> CompiledStep:
        step.load_state_dict(saved)
        return step

    return load


_loaded: list[tuple[CompiledStep, dict[str, Any]]] = []


def choosing() -> Callable[[], CompiledStep]:
    """Choose a plan by the first steps, after the last of them."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)
    dist.barrier()
    step = compiled(costs=None, race="auto")
    last = step.in_force.calendar.timed[-1]
    for number in range(last):
        step(batch(number))
    assert step.in_force.decision.is_provisional

    def choose() -> CompiledStep:
        step(batch(last))
        assert not step.in_force.decision.is_provisional
        return step

    return choose


PREPARED = {"compile_step": compiling, "load_state_dict": loading, "replan": replanning, "the choice": choosing}


def how_it_went(work: Callable[[], CompiledStep], k: int) -> str:
    """Run it, with an error at rank 1's k-th call, and a step afterwards."""
    step = None
    try:
        step = calls_of(work, k)[0] if dist.get_rank() == 1 else work()
        step(batch(1))
    except (Injected, PeerFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def walk(what: str, first: int, stride: int) -> list[tuple[int, list[str]]]:
    """Return what every rank raised, for every so many-th call, until there are no more."""
    outcomes: list[tuple[int, list[str]]] = []
    for k in range(first, 10_000, stride):
        outcomes.append((k, everyone(f"{what} {k}", how_it_went(PREPARED[what](), k))))
        value = torch.ones(1)
        dist.all_reduce(value)  # the user's own group is as it was
        assert value.item() == dist.get_world_size()
        if outcomes[-1][1] == ["done"] * dist.get_world_size():
            return outcomes
    raise AssertionError("so many calls are not made")


def walks(strides: Iterable[tuple[str, int, int]]) -> list[tuple[int, list[str]]]:
    """Walk, and compile and train when everything has failed."""
    outcomes = [outcome for what, first, stride in strides for outcome in walk(what, first, stride)]
    torch.manual_seed(dist.get_rank())
    step = compiled(plan="int8")
    for number in range(3):
        step(batch(number))
    same = everyone("parameters", parameters_of(step))
    assert same[0] == same[1]
    return outcomes


def check(outcomes: list[tuple[int, list[str]]]) -> None:
    assert len(outcomes) > 3
    for k, said in outcomes:
        if said == ["done"] * len(said):
            continue
        assert said[1].startswith("Injected: at "), (k, said)
        for one in said[:1] + said[2:]:
            assert one.startswith("PeerFailed: "), (k, said)
            assert said[1] in one, (k, said)  # the first cause, and nothing else


def walked(strides: list[tuple[str, int, int]]) -> None:
    # Where process groups are made, the others wait for a rank until the timeout: it is short.
    for outcome in try_ranks(3, walks, strides, timeout_s=900.0, group_timeout_s=GROUP_S):
        assert not outcome.error, outcome.trace or outcome.text
        check(outcome.value)


def test_where_a_rank_fails_anywhere_all_fail_with_its_error():
    walked([("compile_step", 0, 193), ("load_state_dict", 3, 131), ("replan", 7, 263), ("the choice", 11, 211)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "first"), [("compile_step", 1), ("load_state_dict", 2), ("replan", 3), ("the choice", 4)]
)
def test_where_a_rank_fails_at_every_fourteenth_call_all_fail_with_its_error(what: str, first: int):
    walked([(what, first, 14)])
