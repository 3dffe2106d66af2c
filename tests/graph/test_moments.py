"""The mean that an optimizer keeps is found by its operators, and what does not fit is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph.info import info
from fxcomp.graph.moments import Moment, NoMoment, updates_of

OPTIM = torch.optim


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


def moment(make: Any, **options: Any) -> Moment:
    model = nn.Linear(3, 4, bias=False)
    captured = capture(Training.of(model, loss, make(model.parameters(), lr=0.1, **options)), (torch.ones(2, 3),))
    (update,) = updates_of(captured.graph).values()
    return update.moment()


def key(node: Any) -> str:
    return info(node).source.key


@pytest.mark.parametrize(
    ("make", "options", "state", "recovered"),
    [
        (OPTIM.SGD, {"momentum": 0.9}, "momentum_buffer", 0),
        (OPTIM.SGD, {"momentum": 0.9, "dampening": 0.5}, "momentum_buffer", 0),
        (OPTIM.SGD, {"momentum": 0.9, "weight_decay": 0.1}, "momentum_buffer", 0),
        (OPTIM.SGD, {"momentum": 0.9, "nesterov": True}, "momentum_buffer", 1),
        (OPTIM.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "momentum_buffer", 1),
        (OPTIM.Muon, {}, "momentum_buffer", 1),
    ],
)
def test_means_without_a_magnitude(make, options, state, recovered):
    found = moment(make, **options)
    assert key(found.state) == state
    assert len(found.recovered) == recovered
    assert found.magnitude is None


@pytest.mark.parametrize(
    ("make", "options", "recovered", "power"),
    [
        (OPTIM.Adam, {}, 0, 2),
        (OPTIM.Adam, {"weight_decay": 0.1}, 0, 2),
        (OPTIM.AdamW, {}, 0, 2),
        (OPTIM.AdamW, {"foreach": True}, 0, 2),
        (OPTIM.AdamW, {"fused": True}, 0, 2),
        (OPTIM.AdamW, {"maximize": True}, 0, 2),
        (OPTIM.NAdam, {}, 1, 1),
    ],
)
def test_means_in_units_of_a_root(make, options, recovered, power):
    found = moment(make, **options)
    assert key(found.state) == "exp_avg"
    assert len(found.recovered) == recovered
    assert found.magnitude is not None
    assert key(found.magnitude.state) == "exp_avg_sq"
    assert found.magnitude.correction is not None
    assert found.magnitude.correction.power == power


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (OPTIM.SGD, {}, "keeps no mean"),
        (OPTIM.Adam, {"amsgrad": True}, "several magnitudes"),
        (OPTIM.Adamax, {}, "not a root plus a small number"),
        (OPTIM.Adagrad, {}, "keeps no mean"),
        (OPTIM.Adadelta, {}, "keeps no mean"),
        (OPTIM.RMSprop, {}, "keeps no mean"),
        (OPTIM.RMSprop, {"momentum": 0.9}, "keeps no mean"),
        (OPTIM.RMSprop, {"centered": True}, "which is not supported"),
        (OPTIM.Rprop, {}, "keeps no mean"),
    ],
)
def test_what_does_not_fit_is_refused(make, options, why):
    with pytest.raises(NoMoment, match=why):
        moment(make, **options)


class Own(torch.optim.Optimizer):
    """An optimizer of a user: `rule` updates a parameter, given its gradient and a mean."""

    def __init__(self, parameters: Any, lr: float, rule: Any):
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                self.rule(p, p.grad, state["mean"], group["lr"])


def lion(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    p.add_((0.9 * mean + 0.1 * g).sign(), alpha=-lr)
    mean.lerp_(g, 0.01)


def heavy_ball(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.mul_(0.9).add_(g, alpha=0.1)
    p.sub_(lr * mean)


def of_normed(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.mul_(0.9).add_(g / g.norm())
    p.sub_(lr * mean)


def by_the_gradient_too(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.mul_(0.9).add_(g * 2)
    p.sub_(lr * (mean + g))


def in_place(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    g.mul_(2)
    mean.mul_(0.9).add_(g)
    p.sub_(lr * mean)


def by_products(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.copy_(0.9 * mean + g)
    p.sub_(lr * mean)


def through_a_view(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.view(-1).mul_(0.9)
    mean.add_(g)
    p.sub_(lr * mean)


def in_two_parts(p: Tensor, g: Tensor, mean: Tensor, lr: float) -> None:
    mean.mul_(0.9).add_(g, alpha=0.05).add_(g, alpha=0.05)
    p.sub_(lr * (mean + g))


class OwnAdam(torch.optim.Optimizer):
    """An Adam of a user, who writes the correction for a start at zero in one of several ways."""

    def __init__(self, parameters: Any, lr: float, form: str, key: str = "exp_avg_sq"):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})
        self.form, self.key = form, key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({"step": torch.zeros(()), "exp_avg": torch.zeros_like(p)})
                    state[self.key] = torch.zeros_like(p)
                if self.form != "counted late":
                    state["step"] += 1
                steps = state["step"].item() + (self.form == "counted late")
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state[self.key].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                correction = (1 - second**steps) ** 0.5
                root = state[self.key].sqrt()
                rate = group["lr"] / (1 - first**steps)
                if self.form == "outside":
                    p.addcdiv_(state["exp_avg"], root + 1e-8, value=-rate * correction)
                elif self.form == "eps inside":
                    p.addcdiv_(state["exp_avg"], (state[self.key] + 1e-8).sqrt() / correction, value=-rate)
                else:
                    p.addcdiv_(state["exp_avg"], root / correction + 1e-8, value=-rate)
                if self.form == "counted late":
                    state["step"] += 1


def test_a_users_own_adam_is_read():
    found = moment(OwnAdam, form="usual")
    assert found.magnitude is not None
    assert found.magnitude.correction is not None


@pytest.mark.parametrize(
    ("form", "key", "why"),
    [
        ("outside", "exp_avg_sq", "something else counts steps"),
        ("eps inside", "exp_avg_sq", "not a root plus a small number"),
        ("counted late", "exp_avg_sq", "not counted by one add_"),
        ("usual", "v", "kept and corrected as Adam's is"),
    ],
)
def test_a_second_moment_that_would_not_stay_is_refused(form, key, why):
    with pytest.raises(NoMoment, match=why):
        moment(OwnAdam, form=form, key=key)


def test_a_users_own_mean_is_found():
    assert not moment(Own, rule=heavy_ball).recovered
    assert len(moment(Own, rule=lion).recovered) == 1


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (of_normed, "keeps no mean"),
        (by_the_gradient_too, "outside its mean"),
        (in_place, "in place"),
        (by_products, "which is not supported"),
        (through_a_view, "through a view"),
        (in_two_parts, "more than once"),
    ],
)
def test_what_a_users_rule_does_otherwise_is_refused(rule, why):
    with pytest.raises(NoMoment, match=why):
        moment(Own, rule=rule)
