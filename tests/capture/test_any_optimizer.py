"""Optimizers of any class train as in eager PyTorch, bit for bit, or are refused with the reason."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.errors import Unsupported

Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


def square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


BATCHES = [(torch.randn(6, 8, generator=torch.Generator().manual_seed(n)),) for n in range(8)]


def eager_step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: tuple[Tensor, ...]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    square(model, batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == expected.keys()
    for place, state in expected.items():
        assert mine[place].keys() == state.keys()
        for key, value in state.items():
            assert type(mine[place][key]) is type(value), key
            assert torch.equal(torch.as_tensor(mine[place][key]), torch.as_tensor(value)), key


def assert_trains_as_eager(make: Make, steps: int = 4, before: int = 0) -> None:
    """Train some steps, with other rates in each, after so many eager ones."""
    model = two_layers()
    eager = copy.deepcopy(model)
    ours, theirs = make(model), make(eager)
    for batch in BATCHES[:before]:
        eager_step(model, ours, batch)
        eager_step(eager, theirs, batch)
    step = fxcomp.compile_step(model, square, ours, BATCHES[0], compress="dense", checks=fxcomp.Checks(verify=2))
    for number, batch in enumerate(BATCHES[:steps]):
        for optimizer in (*ours, *theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 1 / (1 + number)
        step(batch)
        eager_step(eager, theirs, batch)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine, other), f"step {number}"
    for one, other in zip(ours, theirs, strict=True):
        assert_same_state(one, other)


def of(kind: Any, **options: Any) -> Make:
    return lambda model: [kind(model.parameters(), **options)]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        of(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
        of(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
        of(torch.optim.Adadelta, lr=1.0),
        of(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
        of(torch.optim.Adamax, lr=0.01),
        of(torch.optim.Rprop, lr=0.01),
        of(torch.optim.AdamW, lr=0.01, foreach=True),
    ],
)
def test_torchs_optimizers_train_as_eager_from_a_fresh_state_and_from_another(make: Make, before: int):
    assert_trains_as_eager(make, before=before)


class Rule(torch.optim.Optimizer):
    """An optimizer that a user has written."""

    def __init__(self, parameters: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), **more: Any):
        super().__init__(parameters, {"lr": lr, "betas": betas, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


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


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", [Lion, Lamb, FollowsTheWeights, NamesItsState])
def test_a_users_optimizer_trains_as_eager(kind: type[Rule], before: int):
    assert_trains_as_eager(of(kind), before=before)


def test_state_that_an_update_replaces_is_kept_where_it_is():
    assert_trains_as_eager(of(Replaces), before=1)


def muon_beside_adamw(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW([{"params": others[:1]}, {"params": others[1:], "lr": 0.1}], lr=0.01),
    ]


@pytest.mark.parametrize("before", [0, 2])
def test_several_optimizers_each_update_their_own_parameters(before: int):
    assert_trains_as_eager(muon_beside_adamw, before=before)


def test_a_fresh_state_follows_a_rate_and_weights_that_change_before_the_first_step():
    for kind in (torch.optim.Rprop, FollowsTheWeights):
        model = two_layers()
        eager = copy.deepcopy(model)
        ours, theirs = kind(model.parameters(), lr=0.01), kind(eager.parameters(), lr=0.03)
        step = fxcomp.compile_step(model, square, ours, BATCHES[0])
        ours.param_groups[0]["lr"] = 0.03
        with torch.no_grad():
            for parameter in (*model.parameters(), *eager.parameters()):
                parameter.mul_(0.5)
        for batch in BATCHES[:2]:
            step(batch)
            eager_step(eager, [theirs], batch)
        assert_same_state(ours, theirs)


def test_a_model_without_memory_is_captured():
    model = nn.Linear(8, 4, device="meta")
    for kind in (torch.optim.Adam, torch.optim.NAdam, Lamb):
        training = Training.of(model, square, kind(model.parameters()))
        assert capture(training, (torch.empty(2, 8, device="meta"),)).gradient_names == ("weight", "bias")


def test_state_is_asked_for_once_where_an_optimizer_keeps_none():
    class OfMatrices(Lion):
        asked = 0

        def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            OfMatrices.asked += 1
            if parameter.dim() == 2:
                super().update(parameter, gradient, state, group)
            else:
                parameter.sub_(gradient, alpha=group["lr"])

    model = two_layers()
    step = fxcomp.compile_step(
        model, square, OfMatrices(model.parameters()), BATCHES[0], checks=fxcomp.Checks(verify="never")
    )
    step(BATCHES[0])
    before = OfMatrices.asked
    step(BATCHES[1])
    assert OfMatrices.asked == before


# Clipping by value, and several ranks


def assert_same_clipped(model: nn.Module, ours: Sequence[torch.optim.Optimizer], make: Make, rank: int) -> None:
    """Train against eager PyTorch, under DDP where there are ranks, with gradients clipped by value."""
    eager = copy.deepcopy(model)
    theirs = make(eager)
    wrapped = DistributedDataParallel(eager) if dist.is_initialized() else eager
    step = fxcomp.compile_step(
        model,
        square,
        ours,
        BATCHES[rank],
        max_grad_value=0.01,
        skip_nonfinite=True,
        compress="dense",
        checks=fxcomp.Checks(verify=1),
    )
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
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, other)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_state(one, other)


@pytest.mark.parametrize("make", [of(torch.optim.NAdam), of(Lamb), of(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_gradients_are_clipped_by_value_as_in_eager_pytorch(make: Make):
    model = two_layers()
    assert_same_clipped(model, make(model), make, 0)


def train_two() -> None:
    model = two_layers()
    assert_same_clipped(model, muon_beside_adamw(model), muon_beside_adamw, dist.get_rank())


def test_two_optimizers_train_as_under_ddp():
    run_ranks(2, train_two)


# Refused


class Unevenly(Lamb):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, gradient, state, group)
        state["square of steps"] = state["step"] ** 2


class ByMathFunctions(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"] / math.sqrt(state["step"]))


class Decides(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"] * (2.0 if state["step"] > 20 else 1.0))


class CountsInItsGroup(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        group["k"] = group.get("k", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"] / group["k"])


class StartsFromTheGradient(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"] = gradient.clone()
        state["mean"].lerp_(gradient, 0.1)
        parameter.sub_(state["mean"], alpha=group["lr"])


class ClipsAll(Rule):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for parameter, gradient in gradients.items():
            parameter.sub_(gradient / norm, alpha=self.param_groups[0]["lr"])


class AsksForAValue(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        if gradient.norm() > 1e-3:
            parameter.sub_(gradient, alpha=group["lr"])


class Wraps(Rule):
    def __init__(self, parameters: Any):
        parameters = list(parameters)
        super().__init__(parameters)
        self.base = torch.optim.SGD(parameters)


class Locks(Rule):
    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.lock = threading.Lock()


class Elsewhere(Rule):
    def update(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Unevenly, "a Python number under 'square of steps' of its state that changes unevenly, from 1 to 4 to 9"),
        (ByMathFunctions, "'step' of the state of '.*' as a constant.*without float.. and math functions"),
        (Decides, "decides by a number that changes .* while it updates '.*'"),
        (CountsInItsGroup, "writes to 'k' of its parameter group.*Keep it in the state of each parameter"),
        (
            StartsFromTheGradient,
            "does with '.*' in its first step what it does in no other.*Take the first step eagerly",
        ),
        (ClipsAll, "updates '.*' otherwise if it steps other parameters too.*max_grad_norm= of compile_step"),
        (AsksForAValue, "decides by the values of tensors"),
        (Wraps, r"calls that of another optimizer, its 'base' of torch.optim.SGD"),
        (Locks, r"its attribute 'lock' cannot be copied \(TypeError: .*Keep the lock outside of the optimizer"),
        (Elsewhere, "changes neither the parameters of its groups nor a state of theirs"),
        (torch.optim.LBFGS, "step of torch.optim.LBFGS raises TypeError"),
        (
            torch.optim.SparseAdam,
            "step of torch.optim.SparseAdam raises RuntimeError.*SparseAdam does not support dense",
        ),
        (torch.optim.RAdam, "decides by the values of tensors"),
        (torch.optim.ASGD, "decides by the values of tensors"),
        (torch.optim.Adafactor, "decides by the values of tensors"),
    ],
)
def test_an_optimizer_whose_step_is_no_graph_of_one_update_is_refused(kind: Any, text: str):
    model = two_layers()
    with pytest.raises(Unsupported, match=f"(?s){text}.*fxcomp.compile_model") as refusal:
        fxcomp.compile_step(model, square, kind(model.parameters()), BATCHES[0])
    assert kind.__name__ in str(refusal.value)


def test_an_optimizer_that_starts_from_the_gradient_is_compiled_after_an_eager_step():
    assert_trains_as_eager(of(StartsFromTheGradient), before=1)


def test_two_optimizers_of_one_parameter_are_refused():
    model = two_layers()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adagrad(model.parameters())]
    with pytest.raises(Unsupported, match=r"two optimizers update '0.weight': torch.optim.SGD and .*Adagrad"):
        fxcomp.compile_step(model, square, optimizers, BATCHES[0])


@pytest.mark.parametrize("given", [[], ["adamw"]])
def test_what_is_no_optimizer_is_refused(given: Any):
    with pytest.raises(Unsupported, match="optimizer= "):
        fxcomp.compile_step(two_layers(), square, given, BATCHES[0])
