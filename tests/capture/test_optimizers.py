"""Every option of an optimizer that is not refused trains as in eager PyTorch, schedules included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import StepChanged, Unsupported

Make = Callable[[Any], torch.optim.Optimizer]


def square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 8, generator=generator),) for _ in range(steps)]


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change every number that schedulers change."""
    group = optimizer.param_groups[0]
    rate = 0.05 / (1 + step)
    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    if "betas" in group:
        group["betas"] = (0.9 - 0.02 * step, 0.999 - 0.01 * step)
    for key, value in (("weight_decay", 0.1), ("momentum", 0.9), ("dampening", 0.5)):
        if group.get(key):
            group[key] = value / (1 + step)


def assert_trains_as_eager(make: Make, steps: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(eager.parameters())
    data = batches(steps)
    step = fxcomp.compile_step(model, square, ours, data[0], checks=fxcomp.Checks(verify=1))
    for number, batch in enumerate(data):
        schedule(ours, number)
        schedule(theirs, number)
        step(batch)
        theirs.zero_grad()
        square(eager, batch).backward()
        theirs.step()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        states = ours.state[mine], theirs.state[other]
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(states[0][key], value, rtol=1e-6, atol=1e-7)
    theirs.load_state_dict(ours.state_dict())  # and eager PyTorch goes on with it
    theirs.step()


ADAMS = [(torch.optim.Adam, {}), (torch.optim.AdamW, {}), (torch.optim.Adam, {"decoupled_weight_decay": True})]


@pytest.mark.parametrize(("kind", "options"), ADAMS)
def test_adam_follows_its_schedules_with_every_option(kind: Any, options: dict[str, Any]):
    flags = [True, False]
    for fused, amsgrad, maximize, decay in [
        (None, True, True, 0.1),
        *itertools.product([True], flags, flags, [0, 0.1]),
    ]:
        more = {"fused": fused, "amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay}
        assert_trains_as_eager(lambda p, more=more: kind(p, lr=0.05, **options, **more))


def test_sgd_follows_its_schedules_with_every_option():
    forms = [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"dampening": 0.5},
    ]
    for fused, form, decay in itertools.product([True, False], forms, [0.0, 0.1]):
        more = {"fused": fused, "maximize": decay > 0, "weight_decay": decay, **form}
        assert_trains_as_eager(lambda p, more=more: torch.optim.SGD(p, lr=0.05, **more))


@pytest.mark.parametrize("more", [{"fused": True}, {"foreach": False}])
def test_a_rate_in_a_tensor_stays_live_whichever_implementation_is_asked_for(more: dict[str, Any]):
    assert_trains_as_eager(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05), **more))


class BakesItsRate(torch.optim.SGD):
    """Reads the learning rate as a plain number, as fused operators do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        rate = float(self.param_groups[0]["lr"])
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-rate)


def test_an_update_that_takes_a_live_number_as_a_constant_is_refused():
    model = nn.Linear(8, 4)
    with pytest.raises(Unsupported, match=r"'weight' was traced with lr of parameter group 0 as a constant"):
        fxcomp.compile_step(model, square, BakesItsRate(model.parameters(), lr=0.1), batches(1)[0])


class Scales(torch.optim.Optimizer):
    """Reads what it is scaled by from an attribute, a list, a dictionary and a tensor."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1, "many": [1.0, 2.0], "named": {"x": 1.0}, "value": torch.tensor(1.0)})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            scale = group["many"][0] * group["named"]["x"] * group["value"]
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"] * scale * self.factor)


def test_what_a_users_class_reads_beside_numbers_is_captured_again_when_it_changes():
    def change(optimizer: Scales, step: int) -> None:
        group = optimizer.param_groups[0]
        changes: list[Callable[[], Any]] = [
            lambda: setattr(optimizer, "factor", 0.5),
            lambda: group["many"].__setitem__(0, 0.5),
            lambda: (group["named"].update(x=0.5), group.update(value=torch.tensor(0.5))),
        ]
        changes[step]()

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    ours, theirs = Scales(model.parameters()), Scales(eager.parameters())
    data = batches(3)
    step = fxcomp.compile_step(model, square, ours, data[0], checks=fxcomp.Checks(verify="never"))
    for number, batch in enumerate(data):
        change(ours, number)
        change(theirs, number)
        step(batch)
        theirs.zero_grad()
        square(eager, batch).backward()
        theirs.step()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


class TwoKinds(torch.optim.Optimizer):
    """Counts steps in one kind of group alone, as joined Muon and Adam do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + group["counts"]
                parameter.sub_(parameter.grad * group["lr"] / (1 + state["step"]))


def test_groups_that_differ_in_a_flag_alone_have_counters_of_their_own():
    def make(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        flags = [{"params": [weight], "counts": False}, {"params": [bias], "counts": True}]
        return TwoKinds(flags, {"lr": 0.1, "counts": False})

    assert_trains_as_eager(make)


def test_a_flag_with_which_a_class_begins_to_count_needs_another_step():
    model = nn.Linear(8, 4)
    optimizer = TwoKinds(model.parameters(), {"lr": 0.1, "counts": False})
    step = fxcomp.compile_step(model, square, optimizer, batches(1)[0])
    optimizer.param_groups[0]["counts"] = True
    with pytest.raises(StepChanged, match=r"the class keeps other state.\n  Call compile_step again"):
        step(batches(1)[0])


def test_an_option_that_is_refused_is_refused_when_it_is_set_later():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = fxcomp.compile_step(model, square, optimizer, batches(1)[0])
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(Unsupported, match="capturable=True is for parameters on an accelerator"):
        step(batches(1)[0])


def test_a_schedule_that_is_stepped_behind_a_compiled_step_is_not_warned_of():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = batches(2)
    step = fxcomp.compile_step(model, square, optimizer, data[0])
    for batch in data:
        step(batch)
        scheduler.step()  # a warning fails the test
