"""Every mistake in what a user hands in is met with its own error: what is wrong, where, and what to do."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.edits import rerun_with, scale_gradient
from helpers.followed import BATCH, compile_alone
from helpers.gathered import gathered
from helpers.jobs import OPTIMIZERS, cross_entropy, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp import errors
from fxcomp.capture.batch_type import batch_type
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.errors import FxcompError

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


def in_complex() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(torch.zeros(300, 20, dtype=torch.complex64))
    return model


def all_frozen() -> nn.Module:
    return mlp().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (on_two_devices, errors.Unsupported, r": '0.weight' on cpu, '2.weight' on meta.*model.to\(device\)"),
        (lambda: hooked("register_hook"), errors.Unsupported, "'0.weight' has a gradient hook.*Remove it"),
        (
            lambda: hooked("register_post_accumulate_grad_hook"),
            errors.Unsupported,
            "'0.weight' has a gradient hook.*Remove it",
        ),
        (in_complex, errors.Unsupported, "'0.weight' is torch.complex64.*Keep torch.view_as_real.p. as"),
        (all_frozen, errors.Unsupported, "updates no trainable parameter"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_rightly_is_refused(model: Any, error: type[FxcompError], text: str):
    with pytest.raises(error, match=f"(?s){text}"):
        compile_alone(model())


def vector_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def number_loss(model: nn.Module, batch: Any) -> float:  # noqa: ARG001
    return 1.0


def unsummed_count(model: nn.Module, batch: Any) -> Any:
    return fxcomp.WeightedLoss(cross_entropy(model, batch), torch.ones(4))


def no_count(model: nn.Module, batch: Any) -> Any:
    nothing: Any = None
    return fxcomp.WeightedLoss(cross_entropy(model, batch), nothing)


def constant_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
    return batch[0].sum()


def deciding_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.sum() if out.sum() > 0 else out.mean()


def raising_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (vector_loss, errors.Unsupported, r"a loss of shape \(4,\); it must be a scalar.*\.mean\(\)"),
        (number_loss, errors.Unsupported, r"returned a float; it must return the scalar loss, or a pair.*\.loss"),
        (
            unsummed_count,
            errors.Unsupported,
            r"count of a WeightedLoss has the shape \(4,\); it must be one",
        ),
        (
            no_count,
            errors.Unsupported,
            "count of a WeightedLoss is a NoneType; it must be a tensor of one element or",
        ),
        (constant_loss, errors.Unsupported, "does not depend on any trainable parameter"),
        (deciding_loss, errors.CaptureFailed, "decides by the values of tensors.*Move the decision out.*torch.where"),
        (
            raising_loss,
            KeyError,
            r"(?s)labels.*loss_fn raised this while it was traced.*test_errors\.py:\d+",
        ),
    ],
)
def test_a_loss_that_is_no_graph_with_one_number_is_refused(loss: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=f"(?s){text}"):
        compile_alone(mlp(), loss)


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 2))], lr=0.1)


def step_hooked(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
        return optimizer

    return build


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        (of_another_model, errors.Unsupported, r"number 4 of parameter group 0, shape \(3, 2\).*Build the"),
        (step_hooked("pre"), errors.Unsupported, "has a step pre-hook, which.*Remove it"),
        (step_hooked("post"), errors.Unsupported, "has a step post-hook, which.*Remove it"),
        (
            lambda m: torch.optim.Adam(m.parameters(), capturable=True),
            errors.Unsupported,
            "capturable=True is for parameters on an accelerator.*Build the optimizer without it",
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
        ({"max_grad_value": -1}, "max_grad_value must be above 0"),
        ({"max_grad_value": 1, "max_grad_norm": 1}, "max_grad_norm clips gradients by their norm.*keep one"),
        ({"verify": "sample"}, "verify must be .*it is .sample."),
        ({"verify": -1}, "verify must be 'sampled', 'never' or a number of steps, 0 for never; it is -1"),
        ({"within": "fast"}, "lossless.*balanced.*aggressive.*lossy"),
        ({"within": None}, "within= is a mode, a number or like.*it is a NoneType"),
        ({"max_grad_norm": "1"}, "max_grad_norm is a number, or None for no clipping; it is '1', a str"),
        ({"max_grad_value": True}, "max_grad_value is a number.*True, a bool"),
        ({"skip_nonfinite": "no"}, "skip_nonfinite is True or False; it is 'no'"),
        ({"find_unused_parameters": "no"}, "find_unused_parameters is True or False; it is 'no'"),
        ({"cluster": "2x2"}, "cluster= takes a fxcomp.Cluster; it is a str"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], text: str):
    model = mlp()
    with pytest.raises(errors.BadOption, match=f"(?s){text}"):
        fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), BATCH, **gathered(**options))


def test_what_is_no_model_is_refused():
    nothing: Any = None
    with pytest.raises(errors.Unsupported, match=r"the model is a NoneType, which is no torch.nn.Module"):
        fxcomp.compile_step(nothing, cross_entropy, OPTIMIZERS["sgd"](mlp().parameters()), BATCH)


def test_a_cluster_of_several_ranks_needs_a_process_group():
    cluster = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(25.0, 1.0))
    with pytest.raises(errors.BadCall, match=r"(?s)has 4 ranks, but torch.distributed is not.*init_process_group"):
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


# Models


class Checkpointed(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Dropout(dropout) if dropout else nn.Identity())
        self.head = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False))


def test_a_recomputation_that_draws_other_masks_is_refused():
    with pytest.raises(
        errors.CaptureFailed, match=r"(?s)around dropout with preserve_rng_state=False.*leave.* at True"
    ):
        compile_alone(Checkpointed(0.5))


def wrapped(kind: str) -> nn.Module:
    """A class of torch's name: the real one needs a process group, or a device."""
    wrapper = type(kind, (nn.Sequential,), {"__module__": "torch.nn.parallel.somewhere"})
    return wrapper(nn.Linear(20, 10))


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_communicates_by_itself_is_refused_by_name(kind: str, inside: bool):
    model = nn.Sequential(wrapped(kind)) if inside else wrapped(kind)
    where = "the module '0'" if inside else "the model"
    with pytest.raises(errors.Unsupported, match=f"(?s){where} is wrapped by torch.nn.*{kind}.*the plain model"):
        compile_alone(model)


def test_data_parallel_is_refused_by_name():
    with pytest.raises(errors.Unsupported, match=r"the model is wrapped by torch.nn.parallel.*DataParallel"):
        compile_alone(nn.DataParallel(mlp()))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(20, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


def test_a_model_that_counts_its_calls_is_refused():
    with pytest.raises(
        errors.StepChanged, match=r"changes the model: model.calls changed from 1 to 2.*does not run that"
    ):
        compile_alone(Counting())


# Batches


def test_a_batch_that_holds_something_else_is_refused():
    step = compile_alone(mlp())
    with pytest.raises(errors.Unsupported, match="a batch holds a object; it may hold tensors, numbers, strings"):
        step((BATCH[0], object()))


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
    with pytest.raises(errors.Unsupported, match=rf"a batch holds a (numpy\.)?{kind}; .*\n.*Make it one of these"):
        compile_alone(mlp(), batch=(*BATCH, value))


def test_a_pass_that_is_not_there_is_answered_with_those_that_are():
    step = compile_alone(mlp())
    with pytest.raises(
        FxcompError, match=r"there is no pass 'inline'; the passes are sum_gradients, .*order_for_overlap"
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
