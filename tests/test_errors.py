"""Every mistake that a user can make is met with its own error: what is wrong, where, and what to do."""

from __future__ import annotations

import copy
import enum
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from edits import rerun_with, scale_gradient
from jobs import JOBS, OPTIMIZERS, cross_entropy, mlp
from ranks import run_ranks, try_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp import errors
from fxcomp.capture.batch_type import batch_type
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.errors import FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.step.compiled_step import CompiledStep

BATCH = JOBS["mlp"].batch(0)


def compile_alone(
    model: nn.Module, loss: Any = cross_entropy, optimizer: Any = "sgd", batch: Any = BATCH, **options: Any
) -> CompiledStep:
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    return fxcomp.compile_step(model, loss, optimizer, batch, verify_every=1, **options)


# What the user hands in


def on_two_devices() -> nn.Module:
    model = mlp()
    model[2].to("meta")
    return model


def hooked(kind: str) -> nn.Module:
    model = mlp()
    hook: Any = lambda value: value  # noqa: E731
    getattr(model[0].weight, kind)(hook)
    return model


def in_half() -> nn.Module:
    return mlp().half()


def all_frozen() -> nn.Module:
    return mlp().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (on_two_devices, errors.MixedDevices, r"2 devices: '0.weight' on cpu, '2.weight' on meta.*model.to\(device\)"),
        (lambda: hooked("register_hook"), errors.UnsupportedParameter, "'0.weight' has a gradient hook.*Remove it"),
        (
            lambda: hooked("register_post_accumulate_grad_hook"),
            errors.UnsupportedParameter,
            "'0.weight' has a gradient hook.*Remove it",
        ),
        (in_half, errors.UnsupportedParameter, "'0.weight' is torch.float16.*Keep the parameters in float32"),
        (all_frozen, errors.UnsupportedParameter, "updates no trainable parameter"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_rightly_is_refused(model: Any, error: type[FxcompError], text: str):
    with pytest.raises(error, match=f"(?s){text}"):
        compile_alone(model())


def vector_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def number_loss(model: nn.Module, batch: Any) -> float:  # noqa: ARG001
    return 1.0


def constant_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
    return batch[0].sum()


def deciding_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.sum() if out.sum() > 0 else out.mean()


def item_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).sum() * batch[1][0].item()


def selecting_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return out[out > 0].sum()


def raising_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (vector_loss, errors.LossNotScalar, r"a loss of shape \(4,\); it must be a scalar.*\.mean\(\)"),
        (number_loss, errors.LossNotScalar, r"returned a float; it must return the scalar loss, or a pair.*\.loss"),
        (constant_loss, errors.LossNotScalar, "does not depend on any trainable parameter"),
        (deciding_loss, errors.CaptureFailed, "decides by the values of tensors.*Move the decision out.*torch.where"),
        (raising_loss, errors.CaptureFailed, "does not trace into one graph: KeyError: 'labels'"),
    ],
)
def test_a_loss_that_is_no_graph_with_one_number_is_refused(loss: Any, error: type[FxcompError], text: str):
    with pytest.raises(error, match=f"(?s){text}"):
        compile_alone(mlp(), loss)


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 2))], lr=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters())


def own_class(model: nn.Module) -> torch.optim.Optimizer:
    return type("MySGD", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)


def step_hooked(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
        return optimizer

    return build


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        (of_another_model, errors.ForeignParameter, r"number 4 of parameter group 0, shape \(3, 2\).*Build the"),
        (rmsprop, errors.UnsupportedOptimizer, "RMSprop is not an optimizer that fxcomp.*SGD, Adam, AdamW.*backend="),
        (own_class, errors.UnsupportedOptimizer, "MySGD is not an optimizer that fxcomp captures"),
        (step_hooked("pre"), errors.UnsupportedOptimizer, "has a step pre-hook, which.*Remove it"),
        (step_hooked("post"), errors.UnsupportedOptimizer, "has a step post-hook, which.*Remove it"),
        (
            lambda m: torch.optim.Adam(m.parameters(), capturable=True),
            errors.UnsupportedOptimizer,
            "capturable=True is not captured: build the optimizer without it",
        ),
    ],
)  # fmt: skip
def test_an_optimizer_whose_step_is_not_captured_is_refused(optimizer: Any, error: type[FxcompError], text: str):
    model = mlp()
    with pytest.raises(error, match=f"(?s){text}"):
        compile_alone(model, optimizer=optimizer(model))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, or None for no clipping; it is 0.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be above 0"),
        ({"verify_every": -1}, "verify_every must be 'sampled', 'never' or a number of steps, 0 for never; it is -1"),
        ({"mode": "fast"}, "lossless.*balanced.*aggressive"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], text: str):
    model = mlp()
    with pytest.raises(errors.BadOption, match=f"(?s){text}"):
        fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), BATCH, **options)


def test_a_cluster_of_several_ranks_needs_a_process_group():
    cluster = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(25.0, 1.0))
    with pytest.raises(
        errors.NoProcessGroup, match=r"(?s)has 4 ranks, but torch.distributed is not.*init_process_group"
    ):
        compile_alone(mlp(), cluster=cluster)


# Parameters that get no gradient


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_parameter_without_gradient_is_named_and_skipped_as_eager_skips_it(optimizer: str):
    torch.manual_seed(0)
    model = Unused()
    before = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"does not depend on 'spare\.(weight|bias)'.*skipped, as eager PyTorch"
    ) as caught:
        step = compile_alone(model, optimizer=optimizer)
    assert {name for name in ("weight", "bias") for w in caught if f"'spare.{name}'" in str(w.message)} == {
        "weight",
        "bias",
    }
    step(BATCH)
    assert torch.equal(model.spare.weight, before.spare.weight)
    assert not torch.equal(model.used.weight, before.used.weight)


def test_a_parameter_that_no_group_updates_is_named():
    model = mlp()
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    with pytest.warns(UserWarning, match=r"no parameter group updates '(0.bias|2.weight|2.bias)'") as caught:
        compile_alone(model, optimizer=optimizer)
    assert len(caught) == 3


# Activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Dropout(dropout) if dropout else nn.Identity())
        self.head = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


def test_checkpointing_with_dropout_is_refused():
    with pytest.raises(
        errors.RandomRecomputation, match=r"(?s)activation checkpointing around dropout.*set their dropout to 0"
    ):
        compile_alone(Checkpointed(0.5))


def test_checkpointing_without_dropout_is_eager_exactly():
    assert_eager(Checkpointed(0.0), lambda *_: None)


# Values that stay inside the graph


@pytest.mark.parametrize("loss", [item_loss, selecting_loss])
def test_a_value_or_size_that_the_data_tells_stays_live(loss: Any):
    assert_eager(mlp(), lambda *_: None, loss=loss)


# Changes between steps


def assert_eager(
    model: nn.Module,
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
    loss: Any = cross_entropy,
    **options: Any,
) -> CompiledStep:
    """Six steps with a change before the fourth, compiled and eager, give the same bits."""
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), **{"lr": 0.1, **options}) for m in (model, reference)]
    step = compile_alone(model, loss, optimizers[0])
    for i in range(6):
        if i == 3:
            change(model, optimizers[0])
            change(reference, optimizers[1])
        batch = JOBS["mlp"].batch(i)
        step(batch)
        optimizers[1].zero_grad()
        loss(reference, batch).backward()
        optimizers[1].step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    return step


def group_option(**options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update(options)  # noqa: ARG005


@pytest.mark.parametrize(
    ("change", "options", "programs"),
    [
        (group_option(lr=0.01), {}, 1),
        (group_option(lr=0.0), {}, 1),
        (group_option(weight_decay=0.2), {"weight_decay": 0.1}, 1),
        (group_option(weight_decay=0.2), {}, 2),
        (group_option(weight_decay=0.0), {"weight_decay": 0.1}, 2),
        (group_option(momentum=0.5), {"momentum": 0.9}, 1),
        (group_option(momentum=0.5, dampening=0.3), {"momentum": 0.9}, 2),
        (group_option(nesterov=True), {"momentum": 0.9}, 2),
        (group_option(nesterov=False), {"momentum": 0.9, "nesterov": True}, 2),
        (group_option(maximize=True), {}, 2),
        (lambda model, _: model.eval(), {}, 2),
    ],
)  # fmt: skip
def test_a_changed_option_is_followed(change: Any, options: dict[str, Any], programs: int):
    torch.manual_seed(0)
    step = assert_eager(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)), change, **options)
    assert len(step.in_force.programs) == programs


def test_switching_dropout_off_between_steps_is_followed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.5), nn.Linear(30, 10))
    step = compile_alone(model, optimizer="plain")
    train = step.source
    step(BATCH)
    model.eval()
    step(BATCH)
    assert "bernoulli" in train
    assert "bernoulli" not in step.source
    model.train()
    step(BATCH)
    assert step.source == train


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    model[0].bias.requires_grad_(False)


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG001
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, "requires_grad of '0.bias' changed from True to False.*Call compile_step again"),
        (
            replace_parameter,
            r"'0.weight' is another object than when the step was compiled.*Change parameters in place",
        ),
        (add_group, "groups hold other parameters than when the step was compiled.*after add_param_group"),
    ],
)
def test_a_change_that_cannot_be_followed_is_refused_by_name(change: Any, text: str):
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = compile_alone(model, optimizer=optimizer)
    step(BATCH)
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(errors.StepChanged, match=f"(?s){text}"):
        step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_batch_that_holds_something_else_is_refused():
    step = compile_alone(mlp())
    with pytest.raises(errors.UnsupportedBatch, match="a batch holds a object; it may hold tensors, numbers, strings"):
        step((BATCH[0], object()))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(20, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


class SetsUp(Counting):
    """Prepares itself at its first call, as lazy modules do."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 2
        return self.fc(x) * self.calls


def wrapped(kind: str) -> nn.Module:
    """A class of torch's name: the real one needs a process group, or a device."""
    wrapper = type(kind, (nn.Sequential,), {"__module__": "torch.nn.parallel.somewhere"})
    return wrapper(nn.Linear(20, 10))


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_communicates_by_itself_is_refused_by_name(kind: str, inside: bool):
    model = nn.Sequential(wrapped(kind)) if inside else wrapped(kind)
    where = "the module '0'" if inside else "the model"
    with pytest.raises(errors.UnsupportedModel, match=f"(?s){where} is wrapped by torch.nn.*{kind}.*the plain model"):
        compile_alone(model)


def test_data_parallel_is_refused_by_name():
    with pytest.raises(errors.UnsupportedModel, match=r"the model is wrapped by torch.nn.parallel.*DataParallel"):
        compile_alone(nn.DataParallel(mlp()))


class Colour(enum.IntEnum):
    RED = 3


VALUES = [1j, complex("nan"), b"text", "text", None, True, 3, 0.5, float("nan"), Colour.RED, torch.float64]


@pytest.mark.filterwarnings("ignore:fxcomp. batch:UserWarning")  # each value captures the step again
def test_plain_values_of_every_kind_may_stand_in_a_batch():
    def loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        x, target, value = batch
        scale = value if isinstance(value, int | float | complex) and value == value else 1.0
        return cross_entropy(model, ((x * scale).abs(), target))

    model = mlp()
    step = compile_alone(model, loss, batch=(*BATCH, VALUES[0]))
    for value in VALUES:
        step((*BATCH, value))
    before = step.in_force.program
    step((*BATCH, torch.float64))
    assert step.in_force.program is before  # seen before
    step((*BATCH, 3.0))
    assert step.in_force.program is not before


def test_equal_values_of_other_classes_are_told_apart():
    keys = [batch_type((value,))[0] for value in (True, 1, 1.0, 1 + 0j, 0.0, -0.0, Colour.RED, 3, "1", b"1")]
    assert len(set(keys)) == len(keys)
    assert batch_type((float("nan"),))[0] == batch_type((float("nan"),))[0]


@pytest.mark.parametrize("value", [np.float64(0.5), np.int64(3), np.str_("text"), np.zeros(3), object()])
def test_what_no_batch_may_hold_is_refused_when_the_step_is_compiled(value: Any):
    kind = type(value).__name__
    with pytest.raises(errors.UnsupportedBatch, match=rf"a batch holds a (numpy\.)?{kind}; .*\n.*Make it one of these"):
        compile_alone(mlp(), batch=(*BATCH, value))


def test_a_model_that_counts_its_calls_is_refused():
    with pytest.raises(
        errors.StepChanged, match=r"changes the model: model.calls changed from 1 to 2.*does not run that"
    ):
        compile_alone(Counting())


def test_a_model_that_sets_itself_up_at_its_first_call_is_followed():
    step = assert_eager(SetsUp(), lambda *_: None)
    assert len(step.in_force.programs) == 1


def test_a_pass_that_is_not_there_is_answered_with_those_that_are():
    step = compile_alone(mlp())
    with pytest.raises(
        FxcompError, match=r"there is no pass 'inline'; the passes are canonicalize_sync, .*order_for_overlap"
    ):
        step.graph(after="inline")


# Verifying


def test_a_wrong_gradient_is_found_before_anything_is_updated():
    model = mlp()
    step = compile_alone(model)
    step(BATCH)
    before = [p.detach().clone() for p in model.parameters()]
    rerun_with(step, lambda gm: scale_gradient(gm, "2.weight", 1.01))
    with pytest.raises(
        errors.VerificationFailed, match=r"(?s)step 1: the gradient of '2.weight' differs from eager by up to"
    ) as e:
        step(BATCH)
    assert "No parameter has been updated" in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


# Several ranks

Scenario = Callable[[Path], Any]


def compile_here(model: nn.Module, optimizer: Any = None, loss: Any = cross_entropy, **options: Any) -> CompiledStep:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"plan": "dense", **options}
    batch = JOBS["mlp"].batch(0, dist.get_rank())
    return fxcomp.compile_step(model, loss, optimizer, batch, verify_every=1, **options)


def is_odd() -> bool:
    return dist.get_rank() == 1


def models_of_other_width(_: Path) -> None:
    compile_here(nn.Sequential(nn.Linear(20, 31 if is_odd() else 30), nn.ReLU(), nn.Linear(31 if is_odd() else 30, 10)))


def models_of_other_depth(_: Path) -> None:
    compile_here(nn.Sequential(nn.Linear(20, 10), *([nn.Linear(10, 10)] if is_odd() else [])))


def models_frozen_elsewhere(_: Path) -> None:
    model = mlp()
    model[0].bias.requires_grad_(not is_odd())
    compile_here(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


def other_learning_rates(_: Path) -> None:
    model = mlp()
    compile_here(model, torch.optim.SGD(model.parameters(), lr=0.2 if is_odd() else 0.1))


def other_optimizers(_: Path) -> None:
    model = mlp()
    compile_here(model, (torch.optim.AdamW if is_odd() else torch.optim.SGD)(model.parameters(), lr=0.1))


def other_clipping(_: Path) -> None:
    compile_here(mlp(), max_grad_norm=1.0 if is_odd() else None)


def capture_fails_on_one(_: Path) -> None:
    compile_here(mlp(), loss=raising_loss if is_odd() else cross_entropy)


def plan_for_another_model(_: Path) -> None:
    compile_here(mlp(), plan=Plan((Bucket(("head.weight",), (7,), DENSE),)))


def plan_missing(_: Path) -> None:
    compile_here(mlp(), plan="nowhere/plan.json")


def plan_corrupt(folder: Path) -> None:
    path = folder / f"plan_{dist.get_rank()}.json"
    path.write_text("{ not a plan")
    compile_here(mlp(), plan=path)


def plan_misspelt(_: Path) -> None:
    compile_here(mlp(), plan="topkk(0.01)")


def plan_misspelt_on_one(_: Path) -> None:
    compile_here(mlp(), plan="nope" if is_odd() else "int8")


def plans_differ(_: Path) -> None:
    compile_here(mlp(), plan="topk(0.1)" if is_odd() else "topk(0.01)")


def plan_given_to_one(_: Path) -> None:
    compile_here(mlp(), plan=None if is_odd() else "int8")


def saved_plans_differ(folder: Path) -> None:
    plan = compile_here(mlp(), plan="int8").plan
    if is_odd():
        plan.with_strategies([DENSE] * len(plan.buckets)).save(folder / "odd.json")
    compile_here(mlp(), plan=folder / "odd.json" if is_odd() else plan)


def plan_saved_on_rank_0(folder: Path) -> None:
    path = folder / f"of_rank_{dist.get_rank()}.json"
    plan = compile_here(mlp(), plan="int8").plan
    if not is_odd():
        plan.save(path)
    assert compile_here(mlp(), plan=path).plan == plan


def cluster_of_another_size(_: Path) -> None:
    compile_here(mlp(), cluster=Cluster(3, 1, intra=Link(5.0, 5.0), inter=Link(25.0, 1.0)))


def wrong_on_all(_: Path) -> None:
    step = compile_here(mlp())
    rerun_with(step, lambda gm: scale_gradient(gm, "0.bias", 1.01))
    step(JOBS["mlp"].batch(0, dist.get_rank()))


def wrong_on_one(_: Path) -> None:
    step = compile_here(mlp())
    if is_odd():
        rerun_with(step, lambda gm: scale_gradient(gm, "0.bias", 1.01))
    step(JOBS["mlp"].batch(0, dist.get_rank()))


def one_state_on_all_ranks(_: Path) -> None:
    step = compile_here(mlp(), plan="int4")
    states: list[Any] = [None, None]
    dist.all_gather_object(states, step.state_dict())
    step.load_state_dict(states[0])


def state_of_another_model(_: Path) -> None:
    big, small = mlp(), nn.Linear(20, 10)
    compile_here(small, plan="int4").load_state_dict(compile_here(big, plan="int4").state_dict())


def works(_: Path) -> None:
    compile_here(mlp())(JOBS["mlp"].batch(0, dist.get_rank()))


SCENARIOS: dict[Scenario, tuple[str, str]] = {
    models_of_other_width: (
        "ModelsDiffer ModelsDiffer",
        r"rank 1 and rank 0 bring different steps: the shape of '0.(bias|weight)' is .*31",
    ),
    models_of_other_depth: (
        "ModelsDiffer ModelsDiffer",
        r"'1.(bias|weight)'.*on rank 1 and 'missing' on rank 0.*Build the same model",
    ),
    models_frozen_elsewhere: (
        "ModelsDiffer ModelsDiffer",
        r"a gradient of '0.bias' is 'missing' on rank 1|requires_grad of '0.bias' is False",
    ),
    other_learning_rates: (
        "ModelsDiffer ModelsDiffer",
        "lr of parameter group 0 is 0.2 on rank 1 and 0.1 on rank 0",
    ),
    other_optimizers: ("ModelsDiffer ModelsDiffer", "different steps"),
    other_clipping: ("ModelsDiffer ModelsDiffer", "max_grad_norm is 1.0 on rank 1 and None on rank 0"),
    capture_fails_on_one: (
        "PeerFailed CaptureFailed",
        r"rank 1 failed in capturing the step: CaptureFailed.*KeyError|KeyError: 'labels'",
    ),
    plan_for_another_model: (
        "BadPlan BadPlan",
        r"for another model: it plans 'head.weight', which has no gradient here.*Leave plan= out",
    ),
    plan_missing: ("BadPlan PeerFailed", r"cannot read the plan nowhere/plan.json: No such file"),
    plan_corrupt: ("BadPlan PeerFailed", r"cannot read the plan .*plan_0.json: "),
    plan_misspelt: (
        "BadPlan BadPlan",
        r"'topkk\(0.01\)' is neither the path of a saved plan nor a compressor",
    ),
    plan_misspelt_on_one: ("PeerFailed BadPlan", "plan='nope' is neither the path of a saved plan nor a compressor"),
    plans_differ: (
        "ModelsDiffer ModelsDiffer",
        r"the plan is 'topk\(0.1\)' on rank 1 and 'topk\(0.01\)' on rank 0.*pass the same arguments",
    ),
    plan_given_to_one: ("ModelsDiffer ModelsDiffer", "the plan is None on rank 1 and 'int8' on rank 0"),
    saved_plans_differ: (
        "ModelsDiffer ModelsDiffer",
        r"the strategy of '[\w.]+' in the plan is 'all_reduce@world' on rank 1 and 'compress\(int8\).* on rank 0",
    ),
    plan_saved_on_rank_0: ("none none", ""),
    cluster_of_another_size: ("BadCluster BadCluster", "the cluster 3x1 has 3 ranks, the process group has 2"),
    wrong_on_all: ("VerificationFailed VerificationFailed", "step 0: the gradient of '0.bias' differs from eager"),
    wrong_on_one: (
        "VerificationFailed VerificationFailed",
        "the gradient of '0.bias' differs|another rank found a difference",
    ),
    one_state_on_all_ranks: ("BadState BadState", "rank 0 and rank 1 load the state of rank 0: .* would count twice"),
    state_of_another_model: ("BadState BadState", r"of another model: they hold '[02].(weight|bias)', which this"),
    works: ("none none", ""),
}


def outcomes_of(folder: Path) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for scenario in SCENARIOS:
        try:
            scenario(folder)
            found[scenario.__name__] = ("none", "")
        except Exception as error:
            found[scenario.__name__] = (type(error).__name__, str(error))
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    return run_ranks(2, outcomes_of, tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_rank_learns_what_went_wrong(on_two_ranks: Any, scenario: Any):
    expected, text = SCENARIOS[scenario]
    outcomes = [rank[scenario.__name__] for rank in on_two_ranks]
    assert " ".join(name for name, _ in outcomes) == expected, outcomes
    for _, message in outcomes:
        assert re.search(text, message, re.DOTALL), message


def absent_rank() -> None:
    if is_odd():
        time.sleep(600)  # ended when the other rank has failed
    compile_here(mlp())


def test_a_rank_that_never_arrives_ends_the_others_within_the_timeout():
    arrived, _ = try_ranks(2, absent_rank, group_timeout_s=5.0, grace_s=0.0)
    assert arrived.error == "PeerFailed"
    assert "rank 1 did not arrive at compile_step within 5 s" in arrived.text
    assert "every rank must" in arrived.text
