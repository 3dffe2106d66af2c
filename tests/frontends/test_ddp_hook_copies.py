"""A wrapper with `fxcomp.ddp_hook` can be copied, pickled and saved; torch's Python reducer is refused by name.

torch registers no hook with a copy of a wrapper, which averages without one. A copy of the hook itself goes on from
the state of the first one, once it is registered.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxcomp
from fxcomp.errors import BadOption, Unsupported
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

TOPK = Strategy.parse("compress(topk(0.1)) > all_gather@world > decompress")
PLAN = Plan((Bucket(("2.bias", "2.weight", "0.bias", "0.weight"), (4, 64, 16, 128), TOPK),))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def wrapped(hook: fxcomp.DdpHook, model: nn.Module | None = None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(network() if model is None else model)
    ddp.register_comm_hook(None, hook)
    return ddp


def passes(model: nn.Module, *numbers: int) -> list[Tensor]:
    """Train with plain SGD on batches of these numbers; return the parameters."""
    for number in numbers:
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            for each in model.parameters():
                assert each.grad is not None
                each -= 0.1 * each.grad
    return [each.detach().clone() for each in model.parameters()]


def is_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def same_on_ranks(values: list[Tensor]) -> bool:
    mine = torch.cat([each.flatten() for each in values])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(each, mine) for each in everyone)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
    "a copy of a copy": lambda value: copy.deepcopy(copy.deepcopy(value)),
    "AveragedModel": lambda value: AveragedModel(value).module,
    "an exponential average": lambda value: AveragedModel(value, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module,
}


def copied_wrappers() -> dict[str, tuple[bool, ...]]:
    """For each way return if the wrapper trains on as without it, and if the copy has its values and averages."""
    alone = wrapped(fxcomp.ddp_hook(compress=PLAN))
    expected = [passes(alone, *some) for some in ((0, 1, 2), (3, 4))]
    plain = DistributedDataParallel(network())
    found: dict[str, tuple[bool, ...]] = {}
    for name, way in WAYS.items():
        hook = fxcomp.ddp_hook(compress=PLAN)
        ddp = wrapped(hook)
        way(ddp)  # before there is anything
        before = passes(ddp, 0, 1, 2)
        other = way(ddp)
        is_alike = is_same(before, [each.detach() for each in other.parameters()])
        plain.module.load_state_dict(ddp.module.state_dict())
        goes_on = is_same(passes(ddp, 3, 4), expected[1])
        averages = is_same(passes(other, 3, 4), passes(plain, 3, 4))
        found[name] = (is_same(before, expected[0]), is_alike, goes_on, averages, same_on_ranks(passes(other, 5)))
        hook.close()
    return found


def test_a_wrapper_is_copied_and_both_train_on():
    for found in run_ranks(2, copied_wrappers):
        assert found == dict.fromkeys(WAYS, (True,) * 5)


def updated_averages() -> bool:
    """Return if the average of a wrapper's parameters is that of the models that were trained."""
    ddp = wrapped(fxcomp.ddp_hook(compress=PLAN))
    averaged, sums = AveragedModel(ddp), None
    for number in range(4):
        values = passes(ddp, number)
        averaged.update_parameters(ddp)
        sums = values if sums is None else [a + b for a, b in zip(sums, values, strict=True)]
    assert sums is not None
    return all(torch.allclose(a, b / 4) for a, b in zip(averaged.parameters(), sums, strict=True))


def test_an_average_of_a_wrapper_follows_its_training():
    assert run_ranks(2, updated_averages) == [True, True]


def copied_hooks() -> dict[str, tuple[bool, bool]]:
    """For each way return if a copied hook goes on as the first one, and if the first one does, too."""
    expected = passes(wrapped(fxcomp.ddp_hook(compress=PLAN)), 0, 1, 2, 3, 4, 5)
    found: dict[str, tuple[bool, bool]] = {}
    for name in ("copy.deepcopy", "pickle", "torch.save", "a copy of a copy"):
        hook = fxcomp.ddp_hook(compress=PLAN)
        ddp = wrapped(hook)
        passes(ddp, 0, 1, 2)
        other = wrapped(WAYS[name](hook), copy.deepcopy(ddp.module))
        found[name] = (is_same(passes(other, 3, 4, 5), expected), is_same(passes(ddp, 3, 4, 5), expected))
        hook.close()
        closed = wrapped(WAYS[name](hook), copy.deepcopy(ddp.module))
        found[f"{name}, closed"] = (same_on_ranks(passes(closed, 6, 7)), True)
    return found


def test_a_copied_hook_goes_on_from_the_state_of_the_first_one():
    for found in run_ranks(2, copied_hooks):
        assert len(found) == 8
        assert set(found.values()) == {(True, True)}, found


def copied_with_a_scaler() -> tuple[str, bool]:
    """Return the refusal of a copy, and if training goes on as without a copy where its advice is followed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ddp = wrapped(fxcomp.ddp_hook(compress=PLAN, scaler=scaler))
    expected = passes(ddp, 0, 1, 2, 3)
    hook = fxcomp.ddp_hook(compress=PLAN, scaler=scaler)
    ddp = wrapped(hook)
    passes(ddp, 0, 1, 2)
    other = copy.deepcopy(hook)
    refused = ""
    try:
        passes(wrapped(other), 3)
    except BadOption as error:
        refused = str(error)
    advised = fxcomp.ddp_hook(compress=PLAN, scaler=scaler)
    advised.load_state_dict(other.state_dict())
    return refused, is_same(passes(wrapped(advised, copy.deepcopy(ddp.module)), 3), expected)


def test_a_copy_of_a_hook_with_a_scaler_is_refused_and_its_state_is_not():
    for refused, goes_on in run_ranks(2, copied_with_a_scaler):
        assert refused.startswith("this hook is a copy of a hook with scaler=")
        assert "fxcomp.ddp_hook(scaler=scaler), and load the copy's state_dict()" in refused
        assert goes_on


def begun_again() -> tuple[bool, bool, bool]:
    """Return if a hook that begins again goes on with its own state, with a saved one, and with none."""
    expected = [passes(wrapped(fxcomp.ddp_hook(compress=PLAN)), *range(end)) for end in (1, 6)]
    hook = fxcomp.ddp_hook(compress=PLAN)
    ddp = wrapped(hook)
    passes(ddp, 0, 1, 2)
    state, parameters = hook.state_dict(), copy.deepcopy(ddp.module.state_dict())
    hook.begin_again(hook.state_dict())
    own = is_same(passes(ddp, 3, 4, 5), expected[1])
    ddp.module.load_state_dict(parameters)
    hook.begin_again(state)
    saved_one = is_same(passes(ddp, 3, 4, 5), expected[1])
    ddp.module.load_state_dict(network().state_dict())
    hook.begin_again(None)
    return own, saved_one, is_same(passes(ddp, 0), expected[0])


def test_a_hook_begins_again_with_a_state_or_without():
    assert run_ranks(2, begun_again) == [(True, True, True)] * 2


# Single gradients


def by_single_gradients() -> list[str]:
    """Return the refusals under torch's Python reducer, and the last one's advice followed."""
    refused: list[str] = []
    torch._dynamo.config.optimize_ddp = "python_reducer"
    for way in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        ddp = wrapped(fxcomp.ddp_hook(compress="dense"))
        try:
            passes(way(ddp), 0)
        except Unsupported as error:
            refused.append(str(error))
    torch._dynamo.config.optimize_ddp = True
    torch._dynamo.reset()
    ddp = wrapped(fxcomp.ddp_hook(compress="dense"))
    assert same_on_ranks(passes(torch.compile(ddp, backend="aot_eager"), 0))
    return refused


def test_single_gradients_of_torchs_python_reducer_are_refused_by_name():
    for refused in run_ranks(2, by_single_gradients):
        assert len(refused) == 2
        for text in refused:
            assert text.startswith('with torch._dynamo.config.optimize_ddp = "python_reducer" torch hands hooks single')
            assert "Set it to True, its default, before DistributedDataParallel(...)." in text
