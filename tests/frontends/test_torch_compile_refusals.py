"""Refusals of `torch.compile(model, backend="fxcomp")`, and cases that only look like them.

All cases share a spawn: ranks report error texts and numbers, which the tests judge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.torch_compiled import compiled, seeded, step
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.frontends import torch_compile as backend


class Broken(nn.Module):
    """Its forward breaks the graph between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Reduced(torch.autograd.Function):
    """Hands a parameter on, and sums its gradient over the ranks as the user asks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, operation: str, divide: bool) -> Tensor:
        ctx.operation, ctx.divide = operation, divide
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = collectives.all_reduce(gradient, ctx.operation, dist.group.WORLD)
        return total / dist.get_world_size() if ctx.divide else total, None, None


class ReducesItself(nn.Module):
    def __init__(self, operation: str, divide: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.how = operation, divide

    def forward(self, x: Tensor) -> Tensor:
        return x * Reduced.apply(self.weight, *self.how)


def failure(work: Callable[[], Any]) -> str:
    """The error's class and text, or what came back. Warnings come first."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = work()
            text = "" if result is None else str(result)
        except BackendCompilerFailed as error:
            text = str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    told = [str(w.message) for w in caught if "fxcomp" in str(w.message) and "cannot see" not in str(w.message)]
    return "\n".join([*told, text])


def break_without_model() -> None:
    step(compiled(seeded(Broken)))


def break_with_model() -> None:
    model = seeded(Broken)
    step(compiled(model, model=model))


def unused() -> str:
    model = seeded(Unused)
    step(compiled(model, model=model))
    return f"no gradient for {[name for name, p in model.named_parameters() if p.grad is None]}"


def used_outside() -> None:
    model = seeded(Unused)
    net = compiled(model, model=model)
    (net(torch.randn(3, 4)).sum() + model.unused.weight.sum()).backward()


def unused_but_ignored() -> float:
    """`used.bias` is ignored too: it keeps this rank's own gradient."""
    model = nn.ModuleList([seeded(Unused)])[0]
    step(compiled(model, model=model, ignore=["unused.weight", "unused.bias", "used.bias"]))
    assert model.used.weight.grad is not None
    return model.used.weight.grad.mean().item()


def wrapped() -> None:
    step(compiled(DistributedDataParallel(seeded(Unused), find_unused_parameters=True)))


def wraps_inside() -> None:
    step(DistributedDataParallel(compiled(seeded(lambda: nn.Linear(4, 4)))))


def other_start() -> None:
    torch.manual_seed(dist.get_rank())
    step(compiled(nn.Linear(4, 4)))


def other_start_shared() -> float:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    step(compiled(model, model=model))
    return model.weight.sum().item()


def other_model() -> None:
    step(compiled(seeded(lambda: nn.Linear(4, 4 + dist.get_rank()))))


def drift() -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    call = compiled(model)
    step(call)
    with torch.no_grad():
        model.bias.add_(dist.get_rank())
    step(call)


def eager_behind_its_back() -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    call = compiled(model)
    step(call)
    step(call)
    step(model)


def two_models() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4))
    calls = compiled(first, model=first), compiled(second, model=second)
    step(lambda x: calls[1](calls[0](x)))


def two_alike_without_options() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4))
    step(compiled(first))
    step(compiled(second))


def two_models_without_options() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 3))
    calls = (
        torch.compile(first, backend="fxcomp"),
        torch.compile(second, backend="fxcomp"),
    )
    step(lambda x: calls[1](calls[0](x)))


def shared_gradient() -> float:
    """Two parameters whose gradients are one tensor, which goes on into the layer before."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 4)
            self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.before(x) + self.a + self.b

    model, other = seeded(Shared), DistributedDataParallel(seeded(Shared))
    x, weight = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for call in (compiled(model), other):
        (call(x) * weight).sum().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None)


def reduces_itself(operation: str, divide: bool) -> float:
    """Return the distance of its own reduction from the mean over the ranks; of a mean that it divides, the half."""
    model = ReducesItself(operation, divide)
    compiled(model)(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
    assert model.weight.grad is not None
    mean = 0.75 if operation == "avg" and divide else 1.5
    return (model.weight.grad - mean).abs().max().item()


class Contrasts(nn.Module):
    """Compares its embeddings with all ranks', normalised by a count over all ranks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = self.body(x)
        everyone = collectives.all_gather_tensor_autograd(own, 0, dist.group.WORLD)
        count = (x[:, 0] > 0).sum()
        dist.all_reduce(count)
        return (own @ everyone.T).logsumexp(1) / (count + 1)


def exchanges_inside() -> float:
    """Return the gradients' distance from eager DDP's where the forward and backward pass communicate by themselves."""
    models = [seeded(Contrasts), seeded(Contrasts)]
    calls = [compiled(models[0], model=models[0]), DistributedDataParallel(models[1])]
    for model, call in zip(models, calls, strict=True):
        torch.manual_seed(dist.get_rank())
        step(call)
        assert model.body.weight.grad is not None
    assert "rt.exchange(" in backend.compiled_model(models[0]).source
    return max((p.grad - q.grad).abs().max().item() for p, q in zip(*(m.parameters() for m in models), strict=True))


def other_feedback() -> None:
    feedback = fxcomp.ErrorFeedback(everywhere=dist.get_rank() == 1)
    model = nn.Linear(4, 4)
    options = {"model": model, "compress": fxcomp.Compress(feedback=feedback)}
    torch.compile(model, backend="fxcomp", options=options)(torch.ones(2, 4))


def missing_state() -> None:
    backend.compiled_model(nn.Linear(2, 2))


def changed(change: Callable[[nn.Linear], Any]) -> str:
    """Return a refusal, and in the last line the difference between ranks once its advice has been followed.

    `change` replaces `.data` of a compiled model's parameters by another shape or type.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def pass_of(call: Callable[..., Any]) -> None:
        rows = torch.full((3, 4), 1.0 + dist.get_rank(), dtype=model.weight.dtype)
        call(rows).sum().backward()

    call = fxcomp.compile_model(model, compress="dense")
    pass_of(call)
    model.zero_grad()
    change(model)
    with pytest.raises(Exception, match="was resized or cast") as refused:
        pass_of(call)
    torch._dynamo.reset()
    pass_of(fxcomp.compile_model(model, compress="dense"))
    assert model.weight.grad is not None
    mean = model.weight.grad.clone()
    dist.all_reduce(mean)
    difference = (model.weight.grad - mean / dist.get_world_size()).abs().max().item()
    return f"{refused.value}\n{difference}"


def grow(model: nn.Linear) -> None:
    model.weight.data, model.bias.data = torch.zeros(6, 4), torch.zeros(6)


CASES: dict[str, Callable[[], Any]] = {
    "resized": lambda: changed(grow),
    "cast": lambda: changed(nn.Linear.double),
    "break": break_without_model,
    "break_with_model": break_with_model,
    "unused": unused,
    "used_outside": used_outside,
    "ignored": unused_but_ignored,
    "wrapped": wrapped,
    "wraps_inside": wraps_inside,
    "other_start": other_start,
    "other_start_shared": other_start_shared,
    "other_model": other_model,
    "drift": drift,
    "eager": eager_behind_its_back,
    "two_models": two_models,
    "two_alike_without_options": two_alike_without_options,
    "two_models_without_options": two_models_without_options,
    "shared_gradient": shared_gradient,
    "own_mean": lambda: reduces_itself("avg", False),
    "own_sum_divided": lambda: reduces_itself("sum", True),
    "own_sum": lambda: reduces_itself("sum", False),
    "own_mean_divided": lambda: reduces_itself("avg", True),
    "exchanges_inside": exchanges_inside,
    "other_feedback": other_feedback,
    "missing_state": missing_state,
}


def failures() -> dict[str, str]:
    return {name: failure(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def texts() -> list[dict[str, str]]:
    """For each rank, how each case ended."""
    return run_ranks(2, failures)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "break",
            [
                "CaptureFailed: a second graph has other trainable",
                "test_torch_compile_refusals.py:",
                "fullgraph=True",
                "ends early, at",
            ],
        ),
        ("break_with_model", ["CaptureFailed: the gradient of 'second.weight' never", "The graph broke at"]),
        (
            "unused",
            ["does not depend on 'unused.weight'", "skipped, as eager PyTorch", "for ['unused.weight', 'unused.bias']"],
        ),
        (
            "used_outside",
            ["CaptureFailed: the gradient of 'unused.weight' never", "\"ignore\": ['unused.weight']"],
        ),
        ("wrapped", ["Unsupported: the model is wrapped in DistributedDataParallel", "unwrapped"]),
        ("wraps_inside", ["Unsupported: the model is wrapped in DistributedDataParallel"]),
        (
            "other_start",
            ["ReplicasDiffer: the parameter 'bias' starts with other values on rank 1", "Seed all ranks alike"],
        ),
        (
            "other_model",
            ["ReplicasDiffer: rank 1 and rank 0", "the shape of 'bias' is [5] on rank 1 and [4] on rank 0"],
        ),
        ("other_feedback", ["ReplicasDiffer: rank 1 and", "feedback is", "everywhere=True", "on rank 1 and"]),
        ("drift", ["ReplicasDiffer: the parameter 'bias' differs between ranks"]),
        ("eager", ["CaptureFailed: the gradient of 'bias' never reaches", "fullgraph=True", "fxcomp.ddp_hook"]),
        ("resized", ["was resized or cast after the model was compiled", "of [6] now", "of [4].", "all ranks"]),
        ("cast", ["was resized or cast after the model was compiled", "it is torch.float64 of", "torch.float32 of"]),
        ("two_models_without_options", ["CaptureFailed", "fxcomp.compile_model"]),
        ("two_alike_without_options", ["CaptureFailed: the parameter 'weight' is another object", "own options"]),
        ("own_sum", ["Unsupported: the gradient of 'weight' is summed", "divide the sum"]),
        ("missing_state", ["FxcompError: this model has no compiled backward pass yet"]),
    ],
)
def test_every_rank_says_what_is_wrong(texts: list[dict[str, str]], case: str, expected: list[str]):
    for rank in texts:
        for part in expected:
            assert part in rank[case]


@pytest.mark.parametrize("case", ["ignored", "other_start_shared"])
def test_all_ranks_find_the_same(texts: list[dict[str, str]], case: str):
    assert float(texts[0][case]) == float(texts[1][case])


@pytest.mark.parametrize("case", ["resized", "cast"])
def test_a_model_that_changed_is_compiled_again_as_advised(texts: list[dict[str, str]], case: str):
    assert all(float(rank[case].splitlines()[-1]) == 0.0 for rank in texts)


@pytest.mark.parametrize("case", ["shared_gradient", "own_mean", "own_sum_divided", "own_mean_divided"])
def test_every_gradient_is_averaged_once(texts: list[dict[str, str]], case: str):
    assert all(float(rank[case]) < 1e-6 for rank in texts)


def test_collectives_inside_the_forward_and_backward_pass_are_kept(texts: list[dict[str, str]]):
    assert all(float(rank["exchanges_inside"].splitlines()[-1]) < 1e-6 for rank in texts)


def test_two_models_each_have_a_graph(texts: list[dict[str, str]]):
    assert [rank["two_models"].strip() for rank in texts] == ["", ""]
