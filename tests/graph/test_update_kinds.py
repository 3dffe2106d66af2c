"""An update is known by its operators: linear, divided by a second moment, scaled by norms, or something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.capture.fake_mode import FIXED_SIZES, StepInputs
from fxcomp.capture.optimizer import state_tensors
from fxcomp.capture.training import Training
from fxcomp.capture.updates import trace_update
from fxcomp.capture.whole_step import capture
from fxcomp.graph.update_kinds import kind_of_update, update_kinds
from fxcomp.plan.error_feedback import UpdateKind, burst_share

PLAIN, MOMENTUM, SECOND_MOMENT = UpdateKind.PLAIN, UpdateKind.MOMENTUM, UpdateKind.SECOND_MOMENT
BATCH = (torch.ones(2, 3),)
Update = Callable[..., None]


def loss(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def kind_of(update: Update, states: int, shape: tuple[int, ...] = (4, 3)) -> UpdateKind:
    """Trace an update of a parameter, a gradient and so many states, and tell its kind."""

    def run(*tensors: Tensor) -> tuple[()]:
        update(*tensors)
        return ()

    return kind_in(compat.trace(run, [torch.rand(shape) + 0.5 for _ in range(2 + states)]), states)


def kind_in(traced: GraphModule, states: int) -> UpdateKind:
    """Tell the kind of a traced update. Its inputs: parameter, gradient, states, numbers."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    body = [node for node in traced.graph.nodes if node.op == "call_function"]
    return kind_of_update(body, inputs[0], inputs[2 : 2 + states])


def kind_of_torchs(make: Any, **options: Any) -> UpdateKind:
    """Trace one of torch's optimizers as a capture does it, from the state that its first step makes."""
    model = torch.nn.Linear(3, 4, bias=False)
    model.weight.grad = torch.rand(4, 3)
    optimizer = make(model.parameters(), lr=0.1, **options)
    optimizer.step()
    training = Training.of(model, loss, optimizer)
    (owner,) = training.owned
    traced = trace_update(owner, training.habits[0], StepInputs(training, BATCH, FIXED_SIZES))
    return kind_in(traced, len(state_tensors(owner.state)))


@pytest.mark.parametrize(
    ("make", "options", "kind"),
    [
        (torch.optim.SGD, {}, PLAIN),
        (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}, PLAIN),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}, MOMENTUM),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, MOMENTUM),
    ],
)
def test_sgd_is_linear(make: Any, options: dict[str, Any], kind: UpdateKind):
    assert kind_of_torchs(make, **options) is kind
    assert kind.is_linear


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1, "capturable": False}),
        (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_torchs_adaptive_optimizers_have_a_second_moment(make: Any, options: dict[str, Any]):
    assert kind_of_torchs(make, **options) is SECOND_MOMENT


# Made by users


def own_adam(weight: Tensor, gradient: Tensor, mean: Tensor, energy: Tensor) -> None:
    """Nothing in place but the last copies, and a power instead of a root."""
    new_mean, new_energy = 0.9 * mean + 0.1 * gradient, 0.99 * energy + 0.01 * gradient * gradient
    weight.sub_(0.1 * new_mean * (new_energy + 1e-8) ** -0.5)
    mean.copy_(new_mean)
    energy.copy_(new_energy)


def belief(weight: Tensor, gradient: Tensor, mean: Tensor, surprise: Tensor) -> None:
    """AdaBelief: the square of what the mean did not expect."""
    mean.lerp_(gradient, 0.1)
    surprise.mul_(0.99).add_((gradient - mean).square(), alpha=0.01)
    weight.addcdiv_(mean, surprise.sqrt().add_(1e-8), value=-0.1)


def last_steps_root(weight: Tensor, gradient: Tensor, energy: Tensor) -> None:
    """Divides before it accumulates."""
    weight.sub_(0.1 * gradient / energy.sqrt())
    energy.add_(gradient.pow(2))


@pytest.mark.parametrize(("update", "states"), [(own_adam, 2), (belief, 2), (last_steps_root, 1)])
def test_an_optimizer_of_a_users_own_with_a_second_moment_is_recognised(update: Update, states: int):
    assert kind_of(update, states) is SECOND_MOMENT


def direction_of(gradient: Tensor, mean: Tensor, energy: Tensor) -> Tensor:
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    energy.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    return mean / (energy.sqrt() + 1e-6)


def lamb(weight: Tensor, gradient: Tensor, mean: Tensor, energy: Tensor) -> None:
    direction = direction_of(gradient, mean, energy) + 0.01 * weight
    weight.sub_(direction * (0.1 * weight.norm() / direction.norm()))


def lamb_by_squares(weight: Tensor, gradient: Tensor, mean: Tensor, energy: Tensor) -> None:
    direction = direction_of(gradient, mean, energy)
    trust = (weight * weight).sum().sqrt() / (direction * direction).sum().sqrt()
    weight.add_(direction.mul(trust), alpha=-0.1)


@pytest.mark.parametrize("update", [lamb, lamb_by_squares])
def test_lamb_has_a_second_moment_and_a_trust_ratio(update: Update):
    assert kind_of(update, 2) is UpdateKind.TRUST_RATIO


def lars(weight: Tensor, gradient: Tensor, velocity: Tensor) -> None:
    velocity.mul_(0.9).add_(gradient * (weight.norm() / gradient.norm()))
    weight.sub_(velocity, alpha=0.1)


def lion(weight: Tensor, gradient: Tensor, mean: Tensor) -> None:
    weight.sub_(torch.sign(mean.lerp(gradient, 0.1)), alpha=0.1)
    mean.lerp_(gradient, 0.01)


@pytest.mark.parametrize("update", [lars, lion])
def test_what_is_not_linear_and_has_no_second_moment_is_another_kind(update: Update):
    assert kind_of(update, 1) is UpdateKind.OTHER


def heavy_ball(weight: Tensor, gradient: Tensor, velocity: Tensor) -> None:
    new = 0.9 * velocity - 0.1 * (gradient + 0.01 * weight)
    velocity.copy_(new)
    weight += new


def watched(weight: Tensor, gradient: Tensor, squares: Tensor) -> None:
    """Keeps a second moment, and does nothing with it."""
    squares.mul_(0.9).addcmul_(gradient, gradient)
    weight.sub_(gradient / 8, alpha=0.1)


def test_a_linear_update_of_a_users_own_stays_linear():
    assert kind_of(heavy_ball, 1) is MOMENTUM
    assert kind_of(watched, 1) is PLAIN


# In a captured step


@pytest.mark.parametrize("clipped", [None, 1.0])
def test_the_captured_step_has_the_kinds_of_all_its_groups(clipped: float | None):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "momentum": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    assert kinds_in_step(model, sgd, clipped) == {PLAIN, MOMENTUM}
    assert kinds_in_step(model, torch.optim.AdamW(model.parameters()), clipped) == {SECOND_MOMENT}
    tensor_rate = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    assert kinds_in_step(model, tensor_rate, clipped) == {SECOND_MOMENT}


def kinds_in_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> set[Any]:
    return update_kinds(capture(Training.of(model, loss, optimizer, max_grad_norm), BATCH).graph)


def test_the_strictest_kind_decides_how_much_may_come_in_bursts():
    assert burst_share([]) == 1.0
    assert burst_share([PLAIN, SECOND_MOMENT]) == burst_share([SECOND_MOMENT]) < burst_share([PLAIN])
