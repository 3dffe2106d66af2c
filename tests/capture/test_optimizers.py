"""Optimizers of any class train as in eager PyTorch, bit for bit and on their schedules, or are refused with why."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import refused_optimizers
from helpers.eager import assert_same_state, trains_as_eager
from helpers.followed import compile_alone
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.errors import StepChanged, Unsupported

Make = Callable[[nn.Module], Any]

BATCHES = [(torch.randn(6, 8, generator=torch.Generator().manual_seed(n)),) for n in range(8)]


def square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def of(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def compiled(model: nn.Module, optimizer: Any, **options: Any) -> fxcomp.CompiledStep:
    return compile_alone(model, square, optimizer, BATCHES[0], **options)


class Rule(refused_optimizers.Rule):
    """One of a user's own with two decay rates."""

    def __init__(self, parameters: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), **more: Any):
        super().__init__(parameters, lr, betas=betas, **more)


class Lion(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        parameter.add_((state["mean"] * first + gradient * (1 - first)).sign_(), alpha=-group["lr"])
        state["mean"].mul_(second).add_(gradient, alpha=1 - second)


class Lamb(Rule):
    """Counts its steps in a Python number."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        state["mean"].mul_(first).add_(gradient, alpha=1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(1e-6)
        change = state["mean"] / (1 - first ** state["step"]) / root
        trust = parameter.norm() / change.norm()
        parameter.add_(change * torch.where(torch.isfinite(trust), trust, 1.0) * -group["lr"])


class Replaces(Rule):
    """Puts new tensors into its state, and divides by the number of rows."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.get("mean", torch.full_like(gradient, 0.5))
        state["mean"] = 0.9 * mean + gradient / gradient.shape[0]
        parameter.sub_(group["lr"] * state["mean"])


class FollowsTheWeights(Rule):
    """Keeps a slow copy of the parameter."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "slow" not in state:
            state["slow"] = parameter.clone()
        parameter.sub_(group["lr"] * gradient)
        state["slow"].lerp_(parameter, 0.5)


class NamesItsState(Rule):
    """Calls its state what nothing else may be called."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        for key in ("lr", "parameter", "gradients", "a b", "2nd", "lambda"):
            state.setdefault(key, torch.zeros_like(parameter)).add_(gradient, alpha=group["lr"])
            parameter.sub_(state[key])


class StartsFromTheGradient(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"] = gradient.clone()
        state["mean"].lerp_(gradient, 0.1)
        parameter.sub_(state["mean"], alpha=group["lr"])


class TwoKinds(Rule):
    """Counts steps in one kind of group alone, as joined Muon and Adam do."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + group["counts"]
        parameter.sub_(gradient * group["lr"] / (1 + state["step"]))


def some_count(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() != 2]
    return TwoKinds([{"params": weights, "counts": False}, {"params": biases, "counts": True}], counts=False)


def muon_beside_adamw(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": others[:1]}, {"params": others[1:], "lr": 0.1, "weight_decay": 0.0}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)]


def slower(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 1 / (1 + step)


OPTIMIZERS: dict[str, Make] = {
    "rmsprop": of(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": of(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "adadelta": of(torch.optim.Adadelta, lr=1.0),
    "nadam": of(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "adamax": of(torch.optim.Adamax, lr=0.01),
    "rprop": of(torch.optim.Rprop, lr=0.01),
    "adamw": of(torch.optim.AdamW, lr=0.01, foreach=True),
    "lion": of(Lion),
    "lamb": of(Lamb),
    "a slow copy": of(FollowsTheWeights),
    "names": of(NamesItsState),
    "several": muon_beside_adamw,
    "groups of two kinds": some_count,
}
AFTER_AN_EAGER_STEP: dict[str, Make] = {"replaced state": of(Replaces), "gradients first": of(StartsFromTheGradient)}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(3)
def test_an_optimizer_trains_as_eager_from_a_fresh_state_and_from_another(name: str, before: int):
    trains_as_eager(two_layers(), square, BATCHES[:4], OPTIMIZERS[name], change=slower, before=before, verify=2)


@pytest.mark.parametrize("name", AFTER_AN_EAGER_STEP)
def test_a_state_that_begins_otherwise_is_taken_after_an_eager_step(name: str):
    trains_as_eager(two_layers(), square, BATCHES[:4], AFTER_AN_EAGER_STEP[name], change=slower, before=1, verify=2)


# Schedules of all options


def schedule(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change every number that schedulers change."""
    group = optimizer.param_groups[0]
    rate = 0.05 / (1 + step)
    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    if "betas" in group:
        group["betas"] = (0.9 - 0.02 * step, 0.999 - 0.01 * step)
    for key, value in (("weight_decay", 0.1), ("momentum", 0.9), ("dampening", 0.5)):
        if group.get(key):
            group[key] = value / (1 + step)


def follows_its_schedule(kind: Any, **options: Any) -> None:
    torch.manual_seed(0)
    make = lambda model: kind(model.parameters(), **{"lr": 0.05, **options})  # noqa: E731
    trains_as_eager(nn.Linear(8, 4), square, BATCHES[:3], make, change=schedule, tolerance=1e-6, verify=1)


ADAMS = [(torch.optim.Adam, {}), (torch.optim.AdamW, {}), (torch.optim.Adam, {"decoupled_weight_decay": True})]


@pytest.mark.parametrize(("kind", "options"), ADAMS)
def test_adam_follows_its_schedules_with_every_option(kind: Any, options: dict[str, Any]):
    pairs = [(True, True, 0.1), (True, False, 0), (False, True, 0), (False, False, 0.1)]  # each two values meet
    for fused, (amsgrad, maximize, decay) in [(None, pairs[0]), *((True, pair) for pair in pairs)]:
        follows_its_schedule(kind, fused=fused, amsgrad=amsgrad, maximize=maximize, weight_decay=decay, **options)


def test_sgd_follows_its_schedules_with_every_option():
    forms = [{}, {"momentum": 0.9}, {"dampening": 0.5}, {"momentum": 0.9, "dampening": 0.5}]
    forms.append({"momentum": 0.9, "nesterov": True})
    for number, (form, fused) in enumerate(itertools.product(forms, [True, False])):
        decay = 0.1 * (number // 2 % 2 == fused)
        follows_its_schedule(torch.optim.SGD, fused=fused, maximize=decay > 0, weight_decay=decay, **form)


@pytest.mark.parametrize("more", [{"fused": True}, {"foreach": False}])
def test_a_rate_in_a_tensor_stays_live_whichever_implementation_is_asked_for(more: dict[str, Any]):
    torch.manual_seed(0)
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), **more)  # noqa: E731
    trains_as_eager(nn.Linear(8, 4), square, BATCHES[:3], make, change=schedule, tolerance=1e-6, verify=1)


def test_a_schedule_that_is_stepped_behind_a_compiled_step_is_not_warned_of():
    optimizer = torch.optim.SGD((model := two_layers()).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = compiled(model, optimizer)
    for batch in BATCHES[:2]:
        step(batch)
        scheduler.step()  # a warning fails the test


class Scales(Rule):
    """Reads what it is scaled by from an attribute, a list, a dictionary and a tensor."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, many=[1.0, 2.0], named={"x": 1.0}, value=torch.tensor(1.0))
        self.factor = 1.0

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        scale = group["many"][0] * group["named"]["x"] * group["value"]
        parameter.sub_(gradient * group["lr"] * scale * self.factor)


def test_what_a_users_class_reads_beside_numbers_is_captured_again_when_it_changes():
    def change(_: Any, optimizer: Any, step: int) -> None:
        group = optimizer.param_groups[0]
        if step == 0:
            optimizer.factor = 0.5
        elif step == 1:
            group["many"][0] = 0.5
        else:
            group["named"].update(x=0.5)
            group["value"] = torch.tensor(0.5)

    trains_as_eager(two_layers(), square, BATCHES[:3], of(Scales), change=change, tolerance=1e-6, verify="never")


@pytest.mark.parametrize(
    ("make", "option", "error", "text"),
    [
        (of(TwoKinds, counts=False), "counts", StepChanged, r"the class keeps other state.\n  Call compile_step again"),
        (of(torch.optim.AdamW), "capturable", Unsupported, "capturable=True is for parameters on an accelerator"),
    ],
)
def test_an_option_that_is_set_later_may_be_refused(make: Make, option: str, error: Any, text: str):
    optimizer = make(model := two_layers())
    step = compiled(model, optimizer, verify="never")
    optimizer.param_groups[0][option] = True
    with pytest.raises(error, match=text):
        step(BATCHES[0])


# States


@pytest.mark.parametrize("kind", [torch.optim.Rprop, FollowsTheWeights])
def test_a_fresh_state_follows_a_rate_and_weights_that_change_before_the_first_step(kind: Any):
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            optimizer.param_groups[0]["lr"] = 0.03
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

    trains_as_eager(two_layers(), square, BATCHES[:2], of(kind, lr=0.01), change=change)


def test_a_model_without_memory_is_captured():
    model = nn.Linear(8, 4, device="meta")
    for kind in (torch.optim.Adam, torch.optim.NAdam, Lamb):
        training = Training.of(model, square, kind(model.parameters()))
        assert capture(training, (torch.empty(2, 8, device="meta"),)).gradient_names == ("weight", "bias")


def test_state_is_asked_for_once_where_an_optimizer_keeps_none():
    asked: list[None] = []

    class OfMatrices(Lion):
        def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            asked.append(None)
            if parameter.dim() == 2:
                super().update(parameter, gradient, state, group)
            else:
                parameter.sub_(gradient, alpha=group["lr"])

    model = two_layers()
    step = compiled(model, OfMatrices(model.parameters()), verify="never")
    step(BATCHES[0])
    before = len(asked)
    step(BATCHES[1])
    assert len(asked) == before


def test_optimizer_state_goes_to_eager_and_back():
    """The state stays the optimizer's own: save it, load it elsewhere, go on."""

    def change(_: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    trains_as_eager(two_layers(), square, BATCHES[:6], of(torch.optim.AdamW, lr=0.01), change=change, verify=1)


# Clipping by value, and several ranks


def check_clipped(make: Make, rank: int = 0) -> None:
    """Train against eager PyTorch, under DDP where there are ranks, with gradients clipped by value."""
    model, eager = two_layers(), two_layers()
    ours, theirs = (
        [made] if isinstance(made := make(each), torch.optim.Optimizer) else made for each in (model, eager)
    )
    wrapped = DistributedDataParallel(eager) if dist.is_initialized() else eager
    options: Any = {"max_grad_value": 0.01, "skip_nonfinite": True, "compress": "dense"}
    step = fxcomp.compile_step(model, square, ours, BATCHES[rank], checks=fxcomp.Checks(verify=1), **options)
    clipped = 0
    for number in range(3):
        batch = BATCHES[2 * number + rank]
        step(batch)
        for optimizer in theirs:
            optimizer.zero_grad()
        square(wrapped, batch).backward()
        clipped += sum(int((p.grad.abs() > 0.01).sum()) for p in eager.parameters() if p.grad is not None)
        nn.utils.clip_grad_value_(eager.parameters(), 0.01)
        for optimizer in theirs:
            optimizer.step()
    assert clipped > 0
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        assert_same_state(one, other)


@pytest.mark.parametrize("make", [of(torch.optim.NAdam), of(Lamb), of(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_gradients_are_clipped_by_value_as_in_eager_pytorch(make: Make):
    check_clipped(make)


def test_two_optimizers_train_as_under_ddp():
    run_ranks(2, train_two)


def train_two() -> None:
    check_clipped(muon_beside_adamw, dist.get_rank())


# Refused. tests/helpers/refused_optimizers.py has more, with what each error advises.


class Elsewhere(Rule):
    def update(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (StartsFromTheGradient, "treats '.*' in its first step as in no other.*Take the first step"),
        (Elsewhere, "changes neither the parameters of its groups nor a state of theirs"),
        (torch.optim.LBFGS, "step of torch.optim.LBFGS raises TypeError"),
        (torch.optim.SparseAdam, "step of torch.optim.SparseAdam raises RuntimeError.*does not support dense"),
        (torch.optim.RAdam, "decides by the values of tensors"),
        (torch.optim.ASGD, "decides by the values of tensors"),
        (torch.optim.Adafactor, "decides by the values of tensors"),
    ],
)
def test_an_optimizer_whose_step_is_no_graph_of_one_update_is_refused(kind: Any, text: str):
    model = two_layers()
    with pytest.raises(Unsupported, match=f"(?s){kind.__name__}.*fxcomp.compile_model") as refusal:
        compiled(model, kind(model.parameters()))
    assert refusal.match(f"(?s){text}")


class Scaled(Rule):
    """Scales each gradient by what `scale` says of its parameter."""

    def __init__(self, parameters: Any, chosen: Any, scale: Callable[[Any, Tensor], float]) -> None:
        super().__init__(parameters)
        self.chosen, self.scale = chosen, scale

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        parameter.add_(gradient, alpha=-group["lr"] * self.scale(self.chosen, parameter))


def by_attribute(_: Any, p: Any) -> float:
    return getattr(p, "lr_scale", 1.0)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], float]]] = {
    "attribute": (lambda bias: setattr(bias, "lr_scale", 0.5), by_attribute),
    "id": (lambda bias: {id(bias)}, lambda chosen, p: 0.5 if id(p) in chosen else 1.0),
    "key": (lambda bias: {bias: 0.5}, lambda chosen, p: chosen.get(p, 1.0)),
    "identity": (lambda bias: [bias], lambda chosen, p: 0.5 if chosen[0] is p else 1.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_knows_its_parameters_is_refused_and_leaves_them_alone(way: str) -> None:
    mark, scale = WAYS[way]
    model: Any = nn.Linear(8, 3)
    optimizer = Scaled(model.parameters(), mark(model.bias), scale)
    model.bias.grad = torch.ones(3)
    before, memory = model.bias.detach().clone(), model.bias.data_ptr()
    with pytest.raises(Unsupported, match="Scaled knows 'bias' by an attribute, its identity or a table"):
        compiled(model, optimizer)
    assert torch.equal(model.bias, before)
    assert model.bias.data_ptr() == memory
    assert torch.equal(model.bias.grad, torch.ones(3))


def test_marks_that_change_no_update_are_accepted() -> None:
    model: Any = nn.Linear(8, 3)
    model.bias.no_decay = True
    compiled(model, Scaled(model.parameters(), {model.bias: "bias"}, by_attribute))(BATCHES[0])
