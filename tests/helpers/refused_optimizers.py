"""Refusals of optimizers and of changes between steps, and what their advice makes of each."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxcomp
from fxcomp.step.compiled_step import CompiledStep
from helpers.advised import Row, assert_alike, assert_trains, rows, sgd, small
from helpers.followed import compile_alone
from helpers.jobs import cross_entropy

OPTIMIZER, GUARD = "capture/optimizer.py", "capture/step_guard.py"


class Rule(torch.optim.Optimizer):
    """An optimizer that a user has written."""

    def __init__(self, parameters: Any, lr: float = 0.1, **more: Any):
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        parameter.add_(gradient, alpha=-group["lr"])


class CountsInGroup(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        group["count"] = group.get("count", 0) + 1
        parameter.add_(gradient, alpha=-group["lr"])


class CountsInState(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        parameter.add_(gradient, alpha=-group["lr"])


class Unevenly(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["rate"] = state.get("rate", 1.0) * 0.5
        parameter.add_(gradient, alpha=-group["lr"] * state["rate"])


class UnevenTensor(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rate = state.setdefault("rate", torch.ones(()))
        rate.mul_(0.5)
        parameter.sub_(gradient * rate * group["lr"])


class NormOfAll(Rule):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.01)
        super().step(closure)


class ByName(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        parameter.add_(gradient, alpha=-group["lr"] * getattr(parameter, "scale", 1.0))


class BeginsWithGradient(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"] = gradient.clone()
        else:
            state["mean"].lerp_(gradient, 0.1)
        parameter.add_(state["mean"], alpha=-group["lr"])


class Locks(Rule):
    def __init__(self, parameters: Any, lock: Any = None):
        super().__init__(parameters)
        self.lock = lock


class Decides(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        parameter.add_(gradient, alpha=-group["lr"] if group["lr"] > 0.01 else -0.01)


class Selects(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step = state.setdefault("step", torch.zeros(()))
        step.add_(1)
        parameter.sub_(gradient * torch.where(step < 3, 1.0, 0.5) * group["lr"])


class ByMath(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.add_(gradient, alpha=-group["lr"] / math.sqrt(float(state["step"])))


class ByPower(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.add_(gradient, alpha=-group["lr"] / state["step"] ** 0.5)


class Rounded(Rule):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:  # noqa: ARG002
        parameter.add_(gradient, alpha=-float(group["lr"]))


class Around(Rule):
    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups[0]["params"])
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def of(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


def refused(make: Callable[[Any], Any]) -> Callable[[], Any]:
    def provoke() -> Any:
        model = small()
        return compile_alone(model, optimizer=make(model))

    return provoke


def trains(make: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    return lambda: assert_trains(small(), optimizer=make, **options)


def close(make: Callable[[Any], Any]) -> Callable[[], None]:
    """Train to within rounding: eager PyTorch computes the rate in double precision, and the step in the tensor's."""

    def follow() -> None:
        model, reference = small(), small()
        ours, eager = make(model), make(reference)
        step = compile_alone(model, optimizer=ours)
        for number in range(4):
            step(rows(number))
            eager.zero_grad()
            cross_entropy(reference, rows(number)).backward()
            eager.step()
        assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))

    return follow


def with_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def without_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: None).remove()
    return optimizer


def with_group(model: Any) -> torch.optim.Optimizer:
    model[0].weight.scale = 0.5
    return ByName(model.parameters())


def in_groups(model: Any) -> torch.optim.Optimizer:
    others = [p for p in model.parameters() if p is not model[0].weight]
    return Rule([{"params": others}, {"params": [model[0].weight], "lr": 0.05}])


def clips() -> None:
    model, reference = small(), small()
    step = compile_alone(model, optimizer=Rule(model.parameters()), max_grad_norm=0.01)
    eager = NormOfAll(reference.parameters())
    for number in range(3):
        step(rows(number))
        eager.zero_grad()
        cross_entropy(reference, rows(number)).backward()
        eager.step()
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def after_a_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = BeginsWithGradient(model.parameters())
    cross_entropy(model, rows(9)).backward()
    optimizer.step()
    return optimizer


def switched_on(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    cross_entropy(model, rows(9)).backward()
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    return optimizer


def two_of_one() -> Any:
    model = small()
    return compile_alone(model, optimizer=[sgd(model), torch.optim.Adam([model[0].weight])])


def each_its_own() -> None:
    model, reference = small(), small()
    ours, theirs = (
        [torch.optim.SGD(m[0].parameters(), lr=0.1), torch.optim.Adam(m[2].parameters())] for m in (model, reference)
    )
    step = compile_alone(model, optimizer=ours)
    for number in range(3):
        step(rows(number))
        for each in theirs:
            each.zero_grad()
        cross_entropy(reference, rows(number)).backward()
        for each in theirs:
            each.step()
    assert_alike(model, reference)


def of_another() -> Any:
    model = small()
    return compile_alone(model, optimizer=sgd(small()))


OPTIMIZERS = {
    "a class": Row("Give one optimizer, or a list", refused(lambda _: torch.optim.SGD)),
    "no optimizers": Row("Give the optimizers of the model", refused(lambda _: []), each_its_own),
    "a step hook": Row(
        "Remove it, or do its work around step(batch)",
        refused(with_hook),
        trains(without_hook),
        at=f"{OPTIMIZER}::check_optimizer",
    ),
    "differentiable": Row(
        "build the optimizer without it", refused(of(torch.optim.SGD, lr=0.1, differentiable=True)), trains(sgd)
    ),
    "capturable": Row(
        "Build the optimizer without it", refused(of(torch.optim.Adam, capturable=True)), trains(of(torch.optim.Adam))
    ),
    "an optimizer inside": Row(
        "calls the step of another optimizer", refused(lambda m: Around(sgd(m))), trains(lambda m: Around(sgd(m)).inner)
    ),
    "another model's optimizer": Row("Build the optimizer from this model's parameters", of_another, trains(sgd)),
    "two optimizers of one parameter": Row("Give each parameter to one of them", two_of_one, each_its_own),
    "a count in the group": Row(
        "Keep it in the state of each parameter",
        refused(of(CountsInGroup)),
        trains(of(CountsInState)),
        at="capture/probe.py::_Probe._refuse",
    ),
    "a number that grows unevenly": Row(
        "Keep it in a tensor", refused(of(Unevenly)), close(of(UnevenTensor)), at="capture/probe.py::_Probe._refuse"
    ),
    "a norm of all": Row("max_grad_norm= of compile_step is there", refused(of(NormOfAll)), clips),
    "a parameter that is known": Row(
        "Make parameter groups with options of their own", refused(with_group), lambda: assert_like_eager_of_groups()
    ),
    "a state that begins with a gradient": Row(
        "Take the first step eagerly", refused(of(BeginsWithGradient)), trains(after_a_step)
    ),
    "an option that needs other state": Row(
        "build the optimizer with it",
        refused(switched_on),
        trains(of(torch.optim.Adam, amsgrad=True)),
        at="capture/probe.py::named",
    ),
    "a lock": Row(
        "outside of the optimizer", refused(lambda m: Locks(m.parameters(), threading.Lock())), trains(of(Locks))
    ),
    "a number that decides": Row(
        "Use torch.where with a tensor in the state", refused(of(Decides)), close(of(Selects))
    ),
    "a counter by math": Row("x ** 0.5 is followed", refused(of(ByMath)), close(of(ByPower))),
    "a rate by float": Row("Let the optimizer's step use it as it is", refused(of(Rounded)), trains(of(Rule))),
}


def assert_like_eager_of_groups() -> None:
    model, reference = small(), small()
    ours, eager = in_groups(model), with_group(reference)
    step = compile_alone(model, optimizer=ours)
    for number in range(3):
        step(rows(number))
        eager.zero_grad()
        cross_entropy(reference, rows(number)).backward()
        eager.step()
    assert_alike(model, reference)


# Changes between steps

Change = Callable[[Any, torch.optim.Optimizer], Any]


def changed(change: Change, make: Callable[[Any], Any] = sgd, loss: Any = cross_entropy, build: Any = small) -> Any:
    def provoke() -> Any:
        model = build()
        optimizer = make(model)
        step = compile_alone(model, loss, optimizer)
        change(model, optimizer)
        return step(rows(1))

    return provoke


def goes_on(
    change: Change, make: Callable[[Any], Any] = sgd, *, again: bool, build: Any = small, loss: Any = cross_entropy
) -> Callable[[], None]:
    """Change a model between two steps, compile again if the advice says so, and train on as eager PyTorch."""

    def follow() -> None:
        model, reference = build(), build()
        ours, eager = make(model), make(reference)
        step: CompiledStep = compile_alone(model, loss, ours)
        for number in range(4):
            if number == 2:
                change(model, ours)
                change(reference, eager)
                if again:
                    step = compile_alone(model, loss, ours, _like(rows(number), model))
            batch = _like(rows(number), model)
            step(batch)
            eager.zero_grad()
            loss(reference, batch).backward()
            eager.step()
        assert_alike(model, reference)

    return follow


def _like(batch: tuple[Tensor, Tensor], model: nn.Module) -> tuple[Tensor, Tensor]:
    return batch[0].to(next(model.parameters()).dtype), batch[1]


def first_layer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model[2].parameters())})


def replace_value(model: Any, _: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)


def copy_value(model: Any, _: Any) -> None:
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight * 0.5)


def replace_layer(model: Any, _: Any) -> None:
    model[1] = nn.ReLU()


def hook_gradient(model: Any, _: Any) -> Any:
    return model[0].weight.register_hook(lambda gradient: gradient)


def hook_step(_: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.register_step_pre_hook(lambda *_: None)


def freeze(model: Any, _: Any) -> None:
    model[0].requires_grad_(False)


def to_double(model: Any, _: Any) -> None:
    model.double()


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.tanh else result


class Negating(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.ops.aten.tanh.default else result


def around(mode: Callable[[], Any]) -> Callable[[], Any]:
    def provoke() -> Any:
        step = compile_alone(small())
        with mode():
            return step(rows())

    return provoke


def inside(mode: Callable[[], Any]) -> Callable[[], Any]:
    def loss(model: Any, batch: Any) -> Tensor:
        with mode():
            return nn.functional.cross_entropy(model[2](torch.tanh(model[0](batch[0]))), batch[1])

    return lambda: assert_trains(small(), loss=loss)


def saved_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1, lambda x: x)


def outside_of(mode: Callable[[], Any]) -> Callable[[], Any]:
    def follow() -> None:
        step = assert_trains(small())
        with mode():
            cross_entropy(step.training.model, rows()).backward()
        step(rows())

    return follow


def transformed() -> Any:
    step = compile_alone(small())
    batch = rows()
    return torch.func.vmap(lambda _: step(batch))(torch.ones(2))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = small(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * self.calls


class CountsInBuffer(Counts):
    def __init__(self) -> None:
        super().__init__()
        del self.calls
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.body(x) * self.calls


class SetsUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.is_first = small(), True

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if self.is_first else 1.0
        self.is_first = False
        return self.body(x) * factor


def already_called() -> nn.Module:
    model = SetsUp()
    model(rows()[0])
    return model


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = small(), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.more(out) if len(x) > 4 else out


def other_gradients(**options: Any) -> CompiledStep:
    torch.manual_seed(1)
    model = Sometimes()
    longer = (torch.randn(6, 20), torch.zeros(6, dtype=torch.long))
    step = compile_alone(model, optimizer=sgd(model), batch=longer, **options)
    step(longer)
    step(rows())
    return step


def finds_unused() -> None:
    torch.manual_seed(1)
    reference = Sometimes()
    longer = (torch.randn(6, 20), torch.zeros(6, dtype=torch.long))
    eager = sgd(reference)
    for batch in (longer, rows()):
        eager.zero_grad()
        cross_entropy(reference, batch).backward()
        eager.step()
    assert_alike(other_gradients(find_unused_parameters=True).training.model, reference)


def weighted_for(lengths: tuple[int, ...]) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        mean = cross_entropy(model, batch)
        return fxcomp.WeightedLoss(mean * len(batch[0]), len(batch[0])) if len(batch[0]) in lengths else mean

    longer = (torch.randn(6, 20), torch.zeros(6, dtype=torch.long))

    def train() -> Any:
        model = small()
        step = compile_alone(model, loss, sgd(model), longer)
        step(longer)
        assert torch.allclose(step(rows()), cross_entropy(_trained_eagerly(longer), rows()))

    return train


def _trained_eagerly(batch: Any) -> nn.Module:
    reference = small()
    eager = sgd(reference)
    cross_entropy(reference, batch).backward()
    eager.step()
    return reference


def other_habits(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["counts"] = True


class CountsIfAsked(Rule):
    def __init__(self, parameters: Any):
        super().__init__(parameters, counts=False)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["counts"]:
            state["step"] = state.get("step", 0) + 1
        parameter.add_(gradient, alpha=-group["lr"])


GUARDS = {
    "a new group": Row(
        "Call compile_step again after add_param_group",
        changed(add_group, first_layer),
        goes_on(add_group, first_layer, again=True),
    ),
    "a later step hook": Row(
        "Remove it, or do its work around step(batch)",
        changed(hook_step),
        goes_on(lambda m, o: hook_step(m, o).remove(), again=False),
        at=f"{GUARD}::StructureGuard.check",
    ),
    "a frozen layer": Row("Call compile_step again: other gradients", changed(freeze), goes_on(freeze, again=True)),
    "a later gradient hook": Row(
        "Remove it, or do its work in the",
        changed(hook_gradient),
        goes_on(lambda m, o: hook_gradient(m, o).remove(), again=False),
        at=f"{GUARD}::StructureGuard._check_gradient_hooks",
    ),
    "another type": Row("before compile_step, or call it again", changed(to_double), goes_on(to_double, again=True)),
    "a parameter that is replaced": Row(
        "Change parameters in place (with torch.no_grad()",
        changed(replace_value),
        goes_on(copy_value, again=False),
        at=f"{GUARD}::_check_same",
    ),
    "a module that is replaced": Row(
        "Call compile_step again after changing the model's",
        changed(replace_layer),
        goes_on(replace_layer, again=True),
        at=f"{GUARD}::_check_same",
    ),
    "a function mode": Row("Enter it inside loss_fn", around(Halving), inside(Halving), at=f"{GUARD}::_refuse"),
    "a dispatch mode": Row(
        "leave it while the step runs", around(Negating), outside_of(Negating), at=f"{GUARD}::_refuse"
    ),
    "hooks for saved tensors": Row(
        "Enter them inside loss_fn", around(saved_hooks), inside(saved_hooks), at=f"{GUARD}::_refuse"
    ),
    "anomaly detection": Row(
        "run loss_fn eagerly under it with this batch",
        around(torch.autograd.detect_anomaly),
        outside_of(torch.autograd.detect_anomaly),
        at=f"{GUARD}::_refuse",
    ),
    "a transformation": Row("on around the compiled step", transformed, lambda: assert_trains(small())),
    "a counter": Row(
        "Keep such counters outside the model, or in a buffer",
        lambda: compile_alone(Counts()),
        lambda: assert_trains(CountsInBuffer()),
    ),
    "a first call": Row(
        "call it once, with a batch like this one, before the step",
        lambda: compile_alone(SetsUp()),
        lambda: assert_trains(already_called()),
    ),
    "other gradients": Row(
        "Pass find_unused_parameters=True",
        other_gradients,
        finds_unused,
        at="capture/step_capture.py::StepCapture.again",
    ),
    "sometimes a weighted loss": Row("Return a WeightedLoss for all of them", weighted_for((6,)), weighted_for((4, 6))),
    "an option with another state": Row(
        "Call compile_step again after changing them",
        changed(other_habits, of(CountsIfAsked)),
        goes_on(other_habits, of(CountsIfAsked), again=True),
    ),
}
