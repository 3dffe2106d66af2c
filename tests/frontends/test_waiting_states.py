"""A state that a hook loads before its first pass: it is saved again, and if one rank refuses it, the others stop."""

from __future__ import annotations

import atexit
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.state.checkpoint import states_of

TOPK = Strategy.parse("compress(topk(0.1)) > all_gather@world > decompress")
PLAN = Plan((Bucket(("bias", "weight"), (40, 2000), TOPK),))
SLOW = fxcomp.Cluster.parse("2x1, intra 100gbit, inter 0.01gbit@50us")


def hooked(hook: fxcomp.DdpHook) -> DistributedDataParallel:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(50, 40))
    model.register_comm_hook(None, hook)
    return model


def backward(model: nn.Module, passes: int = 1) -> None:
    for number in range(passes):
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(4, 50)).square().mean().backward()


def values(saved: Any) -> list[Tensor]:
    (state,) = states_of(saved)
    return [piece["values"] for name in sorted(state["residuals"]) for piece in state["residuals"][name]]


def waits() -> dict[str, bool]:
    first = fxcomp.ddp_hook(compress=PLAN)
    backward(hooked(first), 3)
    saved = first.state_dict()
    owed = values(saved)
    later = fxcomp.ddp_hook(compress="balanced", cluster=SLOW, costs=CostTable())
    model = hooked(later)
    backward(model)
    later.load_state_dict(saved)
    found = {"owes": all(map(torch.Tensor.any, owed)), "has no plan": later.plan is None}
    for name, again in (("state_dict", later.state_dict()), ("checkpoint", later.checkpoint())):
        found[name] = all(map(torch.equal, values(again), owed))
    backward(model, 10)
    found["has a plan"] = later.plan is not None and len(values(later.state_dict())) > 0
    return found


def test_a_state_that_is_loaded_in_the_dense_passes_is_saved_again():
    for found in run_ranks(2, waits):
        assert found == dict.fromkeys(found, True)


def refused_on(ranks: list[int], *, begins: bool) -> tuple[str, list[float]]:
    """Load a state that some ranks refuse; they begin without one, or end. Return the error and a gradient."""
    hook = fxcomp.ddp_hook(compress=PLAN)
    model, told = hooked(hook), ""
    try:
        if dist.get_rank() in ranks:
            hook.load_state_dict({"residuals": {}, "version": 0})
        elif not begins:
            backward(model)
    except FxcompError as error:
        told = f"{type(error).__name__}: {error}"
    if begins:
        hook.load_state_dict(None)
        backward(model)
    elif dist.get_rank() in ranks:
        atexit._run_exitfuncs()
    gradient = next(model.parameters()).grad
    return told, [] if gradient is None else gradient.flatten().tolist()


def test_a_state_that_one_rank_refuses_stops_the_others_in_their_first_pass():
    (other, _), (mine, _) = run_ranks(2, partial(refused_on, begins=False), [1])
    assert mine.startswith("BadState: this state has version 0")
    assert other == f"PeerFailed: rank 1 failed in ddp_hook: {mine}"


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_ranks_that_refuse_a_state_can_begin_without_it(ranks: list[int]):
    (mine, gradient), (other, same_gradient) = run_ranks(2, partial(refused_on, begins=True), ranks)
    assert mine.startswith("BadState: this state has version 0")
    assert other == (mine if 1 in ranks else "")
    assert any(gradient)
    assert gradient == same_gradient
