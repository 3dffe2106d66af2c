"""Steps that train different parameters with one optimizer: each parameter's state goes on from its last update."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.capture.optimizer import FreshState, fresh_states
from fxcomp.errors import StepChanged, VerificationFailed
from fxcomp.state.inputs import Inputs

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

TASKS: dict[str, tuple[str, ...]] = {"a": ("trunk", "a"), "b": ("trunk", "b"), "ab": ("a", "b"), "only b": ("b",)}
"""Layers that each loss uses."""


class Tasks(nn.ModuleDict):
    """A trunk and two heads, of which a task names some."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__({name: nn.Linear(3, 3) for name in ("trunk", "a", "b")})

    def forward(self, x: Tensor, task: str) -> Tensor:
        for name in TASKS[task]:
            x = torch.tanh(self[name](x))
        return x


def loss_of(task: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, task).square().mean()

    return loss


def batch(number: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))


class LeavesOutSuper(torch.optim.Optimizer):
    """Momentum in a class that does not call torch's constructor: it trains where the model clears the gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1):
        self.param_groups = [{"params": list(parameters), "lr": lr, "momentum": 0.9}]
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter.grad))
                    mean.mul_(group["momentum"]).add_(parameter.grad)
                    parameter.data.add_(mean, alpha=-group["lr"])


class BeginsAsWeights(torch.optim.Optimizer):
    """Pulls weights toward where they were at their first step."""

    def __init__(self, parameters: Any, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = parameter.clone()
                    state["mean"].lerp_(parameter, 0.1)
                    parameter.add_(parameter.grad + 0.1 * (parameter - state["mean"]), alpha=-group["lr"])


class EqualByClass(torch.optim.SGD):
    """Optimizers that cannot be keys of a table."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.9, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1, initial_accumulator_value=0.1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "no super": lambda m: LeavesOutSuper(m.parameters()),
    "as weights": lambda m: BeginsAsWeights(m.parameters()),
}


@dataclass
class Run:
    """A model under training: by compiled steps, one for each task, or by eager PyTorch."""

    make: MakeOptimizer
    is_compiled: bool
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    accumulate: int = 1

    def __post_init__(self) -> None:
        self.model = Tasks()
        self.optimizer = self.make(self.model)
        self.steps: dict[str, fxcomp.CompiledStep] = {}
        self.number = 0

    def compile(self, *tasks: str) -> None:
        for task in tasks if self.is_compiled else ():
            self.steps[task] = fxcomp.compile_step(
                self.model,
                loss_of(task),
                self.optimizer,
                batch(0),
                **{
                    "compress": "dense",
                    "find_unused_parameters": True,
                    "accumulate": self.accumulate,
                    "checks": fxcomp.Checks(verify=1),
                    **self.options,
                },
            )

    def train(self, *tasks: str) -> None:
        for task in tasks:
            for _ in range(self.accumulate if self.is_compiled else 0):
                if task not in self.steps:
                    self.compile(task)
                self.steps[task](batch(self.number))
                self.number += 1
            if not self.is_compiled:
                self.eagerly(task, self.accumulate)

    def eagerly(self, task: str, micro_batches: int = 1) -> None:
        self.model.zero_grad()
        for _ in range(micro_batches):
            (loss_of(task)(self.model, batch(self.number)) / micro_batches).backward()
            self.number += 1
        self.optimizer.step()
        self.model.zero_grad()


Script = Callable[[Run], None]


def assert_as_eager(make: MakeOptimizer, script: Script, *, accumulate: int = 1, **options: Any) -> None:
    ours, theirs = (Run(make, is_compiled, options, accumulate) for is_compiled in (True, False))
    for run in (ours, theirs):
        script(run)
    for (name, mine), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
        for key, value in theirs.optimizer.state.get(other, {}).items():
            torch.testing.assert_close(ours.optimizer.state[mine][key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_tasks_in_turns_train_as_eager(name: str):
    assert_as_eager(OPTIMIZERS[name], lambda run: (run.compile("a", "b"), run.train(*["a", "b"] * 4)))


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "as weights", "no super"])
def test_a_parameter_that_is_used_first_late_begins_then(name: str):
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.train(*["a"] * 5, "b", "a", "a", "b", "b")

    assert_as_eager(OPTIMIZERS[name], script)


@pytest.mark.parametrize("name", ["momentum", "adam", "no super", "as weights"])
def test_an_eager_step_between_compiled_ones_counts(name: str):
    def script(run: Run) -> None:
        run.compile("a")
        run.train("a")
        run.eagerly("b")
        run.train("a", "a")
        run.eagerly("ab")
        run.train("b", "a")

    assert_as_eager(OPTIMIZERS[name], script)


def test_an_eager_step_before_the_first_compiled_one_counts():
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.eagerly("b")
        run.train("a", "b")

    assert_as_eager(OPTIMIZERS["as weights"], script)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_state_that_is_loaded_between_steps_is_kept(is_whole: bool):
    def script(run: Run) -> None:
        other = Tasks()
        saved = OPTIMIZERS["amsgrad"](other)
        for task in ("a", "b") if is_whole else ("a",):
            loss_of(task)(other, batch(9)).backward()
            saved.step()
        run.compile("a", "b")
        run.train("a")
        run.optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        run.train("a", "a", "b", "a", "b")

    assert_as_eager(OPTIMIZERS["amsgrad"], script)


def test_values_that_are_loaded_into_the_tensors_of_a_state_are_kept():
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.train("a")
        weight = run.model["b"].weight
        run.optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        run.optimizer.state[weight]["momentum_buffer"].fill_(0.5)
        run.train("a", "a", "b")

    assert_as_eager(OPTIMIZERS["momentum"], script)


def test_three_steps_of_overlapping_parameters_train_as_eager():
    def script(run: Run) -> None:
        run.compile("a", "b", "ab")
        run.train("a", "ab", "b", "b", "ab", "a", "a", "b", "ab")

    for name in ("momentum", "amsgrad"):
        assert_as_eager(OPTIMIZERS[name], script)


def test_a_step_that_is_compiled_for_a_warm_optimizer_knows_what_was_not_stepped_yet():
    def script(run: Run) -> None:
        run.train("a", "a")  # the second one is compiled after these
        with torch.no_grad():
            run.model["b"].weight.mul_(0.5)
        run.train("b", "a", "b")

    assert_as_eager(OPTIMIZERS["as weights"], script)
    assert_as_eager(OPTIMIZERS["amsgrad"], script)


@pytest.mark.filterwarnings("ignore:fxcomp. the loss does not depend on")
def test_steps_with_and_without_the_option_share_an_optimizer():
    def script(run: Run) -> None:
        run.compile("a")
        run.options["find_unused_parameters"] = False
        run.compile("b", "only b")
        run.train("a", "b", "only b", "a", "only b", "a", "b")

    for name in ("momentum", "adam", "as weights"):
        assert_as_eager(OPTIMIZERS[name], script)


@pytest.mark.filterwarnings("ignore:fxcomp. the loss does not depend on")
def test_the_first_step_of_a_parameter_takes_its_gradient_undampened_whichever_step_that_is():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": each.parameters()} for each in model.children()], 0.1, 0.9, dampening=0.5)

    def script(run: Run) -> None:
        run.compile("a", "only b")
        run.train("a", "a", "only b", "only b", "a")

    assert_as_eager(make, script)
    assert_as_eager(make, script, find_unused_parameters=False)


def test_a_group_whose_parameters_begin_at_different_steps_is_refused_with_dampening():
    run = Run(lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, dampening=0.5), is_compiled=True)
    run.compile("a", "b")
    run.train("a")
    with pytest.raises(StepChanged, match="Put the new parameters into a group of their own"):
        run.train("b")


def test_micro_batches_train_as_eager():
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.train("a", "b", "a", "b")

    assert_as_eager(OPTIMIZERS["momentum"], script, accumulate=2)


def test_a_schedule_is_followed():
    def script(run: Run) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        run.compile("a", "b")
        for task in ("a", "b", "a", "b"):
            run.train(task)
            schedule.step()

    assert_as_eager(OPTIMIZERS["adam"], script)


def test_a_group_that_is_added_trains_with_another_step():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model["trunk"].parameters(), *model["a"].parameters()], 0.01)

    def script(run: Run) -> None:
        run.model["b"].requires_grad_(False)
        run.train("a", "a")
        run.model["b"].requires_grad_(True)
        run.optimizer.add_param_group({"params": run.model["b"].parameters(), "lr": 0.02})
        run.steps.clear()
        run.compile("a", "b")
        run.train("a", "b", "a", "b")

    assert_as_eager(make, script)


def test_two_optimizers_have_records_of_their_own():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model["trunk"].parameters(), *model["a"].parameters()], 0.01)

    def script(run: Run) -> None:
        first = run.optimizer
        second = torch.optim.SGD(run.model["b"].parameters(), 0.1, momentum=0.9)
        if run.is_compiled:
            run.optimizer = [first, second]
            run.compile("a", "b")
        for task in ("a", "b", "b", "a", "b"):
            if run.is_compiled:
                run.train(task)
                continue
            run.optimizer.zero_grad()
            second.zero_grad()
            loss_of(task)(run.model, batch(run.number)).backward()
            run.number += 1
            for each in (first, second):
                each.step()
        run.optimizer = first

    assert_as_eager(make, script)


@pytest.mark.parametrize("make_copy", [copy.copy, lambda o: o], ids=["a shallow copy", "itself"])
def test_a_copy_of_an_optimizer_that_shares_its_state_counts(make_copy: Callable[[Any], Any]):
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.train("a")
        first, run.optimizer = run.optimizer, make_copy(run.optimizer)
        run.eagerly("b")
        run.optimizer = first
        run.train("a", "b")

    assert_as_eager(OPTIMIZERS["momentum"], script)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_copied_model_goes_on_with_its_copied_optimizer(is_pickled: bool):
    def script(run: Run) -> None:
        run.compile("a", "b")
        run.train("a")
        if is_pickled:
            torch.save((run.model, run.optimizer), file := io.BytesIO())
            file.seek(0)
            run.model, run.optimizer = torch.load(file, weights_only=False)
        else:
            run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))
        run.steps.clear()
        run.train("a", "b", "a", "b")

    assert_as_eager(OPTIMIZERS["amsgrad"], script)


def test_optimizers_that_are_equal_and_have_no_hash_are_told_apart():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return EqualByClass(model.parameters(), 0.1, momentum=0.9)

    assert_as_eager(make, lambda run: (run.compile("a", "b"), run.train("a", "b", "a", "b")))


def test_an_optimizer_is_freed_with_its_record():
    run = Run(OPTIMIZERS["adam"], is_compiled=True)
    run.compile("a")
    run.train("a")
    watched = weakref.ref(run.optimizer), weakref.ref(run.model["b"].weight)
    run.steps["a"].close()
    del run
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_verification_sees_a_state_that_was_renewed_after_another_step_has_filled_it(monkeypatch: pytest.MonkeyPatch):
    run = Run(OPTIMIZERS["momentum"], is_compiled=True)
    run.compile("a", "b")
    run.train("a", "b")
    monkeypatch.setattr(f"{Inputs.__module__}.is_fresh", lambda _: True)
    for parameter in run.model["b"].parameters():
        state = run.optimizer.state[parameter]
        fresh_states(run.optimizer)[parameter] = FreshState(state, {"momentum_buffer": torch.zeros_like(parameter)})
    with pytest.raises(VerificationFailed, match=r"the update of 'b\.weight' differs"):
        run.train("a")


def _on_ranks(name: str, tasks: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Distance to DDP after steps of two ranks in which each uses a task of its own, and a digest."""
    rank = dist.get_rank()
    model, reference = Tasks(), Tasks()
    mine, theirs = OPTIMIZERS[name](model), OPTIMIZERS[name](reference)
    ddp = DistributedDataParallel(reference, find_unused_parameters=True)
    compiled = {
        pair: fxcomp.compile_step(
            model,
            loss_of(pair[rank]),
            mine,
            batch(0),
            compress="dense",
            find_unused_parameters=True,
            checks=fxcomp.Checks(verify=1),
        )
        for pair in dict.fromkeys(tasks)
    }
    for number, pair in enumerate(tasks):
        compiled[pair](batch(number, rank))
        theirs.zero_grad()
        loss_of(pair[rank])(ddp, batch(number, rank)).backward()
        theirs.step()
    apart = [(p - q).abs().max().item() for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    return max(apart), sum(p.double().sum().item() for p in model.parameters())


def _all_on_ranks() -> list[tuple[float, float]]:
    turns = [("a", "a"), ("b", "b")] * 3
    mixed = [("a", "a"), ("a", "b"), ("a", "a"), ("b", "b"), ("a", "b"), ("a", "a")]
    return [_on_ranks(name, tasks) for name in ("momentum", "amsgrad", "as weights") for tasks in (turns, mixed)]


def test_on_two_ranks_tasks_in_turns_train_as_ddp():
    for mine, theirs in zip(*run_ranks(2, _all_on_ranks), strict=True):
        assert mine[0] < 1e-6
        assert theirs[0] < 1e-6
        assert mine[1] == theirs[1], "ranks are apart"
