"""Models with unusual parameters and buffers train as in eager PyTorch, or are refused with an advice that works.

All models of a test share a spawn: ranks report distances to eager PyTorch, which the tests judge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fxcomp


class Added(nn.Module):
    """A layer, and parameters whose means are added to its result."""

    def __init__(self, *parameters: Tensor):
        super().__init__()
        self.layer, self.more = nn.Linear(6, 4), nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + sum(p.sum() / max(p.numel(), 1) for p in self.more)


class OfNoRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.embedding = nn.Linear(6, 4), nn.Embedding(0, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), self.embedding(torch.empty(0, dtype=torch.long))])


class EmptyBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([functional.linear(x, self.weight), x[:, :0] + self.bias], 1)


class EmptyBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("flat", torch.empty(0))
        self.register_buffer("rows", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.flat.add_(1)
        return self.layer(x) + self.flat.sum() + self.rows.sum()


class OneOfMany(nn.Module):
    """Every parameter but one is empty."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.a.sum() + self.b.sum()


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 4))
    model[0].requires_grad_(False)
    return model


EMPTY: dict[str, Callable[[], nn.Module]] = {
    "no result": lambda: nn.Linear(6, 0),
    "two layers": lambda: nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 4)),
    "three layers": lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 0, bias=False), nn.Linear(0, 2)),
    "behind a norm": lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 0)),
    "among others": lambda: Added(torch.empty(0), torch.empty(3, 0), torch.randn(3, 3) / 9),
    "among large ones": lambda: Added(torch.empty(0, 100), torch.randn(50, 50) / 2500, torch.empty(64, 0)),
    "of other types": lambda: Added(torch.empty(0).bfloat16(), torch.empty(0).double(), torch.empty(2, 0)),
    "scalars": lambda: Added(torch.tensor(2.0), torch.ones(1), torch.empty(0)),
    "all but one": OneOfMany,
    "rows of an embedding": OfNoRows,
    "a bias": EmptyBias,
    "buffers": EmptyBuffers,
    "frozen": partly_frozen,
}


class AddedToOneAnother(nn.Module):
    """Parameters that are added to one another have one gradient."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.prompts = nn.ParameterDict({"first": torch.randn(6), "second": torch.randn(6), "third": torch.randn(6)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.bias + sum(self.prompts.values())


class ViewsOfOneTensor(nn.Module):
    def __init__(self):
        super().__init__()
        flat = torch.randn(28)
        self.weight, self.bias = nn.Parameter(flat[:24].view(4, 6)), nn.Parameter(flat[24:])

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class LazyViews(nn.Module):
    """Buffers that are conjugated, and negated, when they are read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("conjugated", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("negated", torch.randn(4, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.conjugated.real + self.conjugated.imag + self.negated


class FrozenOfOtherTypes(nn.Module):
    """Frozen parameters and buffers of types that nothing trains, and that no fp32 holds as they are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.codes = nn.Parameter(torch.randint(-5, 5, (4, 6), dtype=torch.int8), requires_grad=False)
        self.eighth = nn.Parameter(torch.randn(4, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        fixed = functional.linear(x, self.codes.float() + self.eighth.float()) * self.turn.abs()
        return self.layer(x) + fixed.where(self.mask, 0.0)


class NotInRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.randn(8)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "added to one another": AddedToOneAnother,
    "views of one tensor": ViewsOfOneTensor,
    "lazily conjugated": LazyViews,
    "other types": FrozenOfOtherTypes,
    "not in rows": NotInRows,
}


def loss_of(call: Callable[..., Any], batch: Tensor) -> Tensor:
    result = call(batch).float()
    return result.square().sum() / 8


def batches(*, empty_on: int | None = None) -> list[Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(0 if rank == empty_on else 4, 6, generator=generator) for _ in range(3)]


def eagerly(model: nn.Module, given: list[Tensor], call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Train with gradients that are averaged by hand."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for batch in given:
        optimizer.zero_grad()
        loss_of(model if call is None else call, batch).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
    return values_of(model)


def values_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def by_step(model: nn.Module, given: list[Tensor], plan: str) -> list[Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = fxcomp.compile_step(model, loss_of, optimizer, given[0], **gathered(plan=plan, verify=1))
    for batch in given:
        step(batch)
    return values_of(model)


def by_backend(model: nn.Module, given: list[Tensor], plan: str) -> list[Tensor]:
    torch._dynamo.reset()
    options = {"model": model, "compress": plan}
    return by_loop(model, given, torch.compile(model, backend="fxcomp", options=options))


def by_hook(model: nn.Module, given: list[Tensor], plan: str) -> list[Tensor]:
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, fxcomp.ddp_hook(compress=plan))
    return by_loop(model, given, wrapper)


def by_loop(model: nn.Module, given: list[Tensor], call: Callable[..., Any]) -> list[Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in given:
        optimizer.zero_grad()
        loss_of(call, batch).backward()
        optimizer.step()
    return values_of(model)


FRONTENDS = {"compile_step": by_step, "backend": by_backend, "ddp_hook": by_hook}


def distances(models: dict[str, Callable[[], nn.Module]], plan: str, empty_on: int | None) -> dict[str, float | str]:
    """The largest difference from eager PyTorch, or the error, by model and frontend."""
    found: dict[str, float | str] = {}
    given = batches(empty_on=empty_on)
    for name, build in models.items():
        torch.manual_seed(7)
        model = build()
        expected = eagerly(copy.deepcopy(model), given)
        for frontend, train in FRONTENDS.items():
            if frontend == "ddp_hook" and isinstance(model, FrozenOfOtherTypes):
                continue  # DistributedDataParallel itself cannot send them with gloo
            try:
                trained = train(copy.deepcopy(model), given, plan)
            except Exception as error:
                found[f"{name}: {frontend}"] = f"{type(error).__name__}: {error}"
                continue
            assert [t.dtype for t in trained] == [t.dtype for t in expected]
            far = [
                (one.to(torch.complex128) - other.to(torch.complex128)).abs().max().item()
                for one, other in zip(trained, expected, strict=True)
                if one.numel()
            ]
            found[f"{name}: {frontend}"] = max(far, default=0.0)
    return found


def empty_ones(plan: str, empty_on: int | None) -> dict[str, float | str]:
    return distances(EMPTY, plan, empty_on)


SOME = ("two layers", "among large ones", "of other types", "all but one")


def some_empty_ones(plan: str) -> dict[str, float | str]:
    return distances({name: EMPTY[name] for name in SOME}, plan, None)


def unusual_ones(plan: str) -> dict[str, float | str]:
    return distances(UNUSUAL, plan, None)


@pytest.mark.parametrize(("plan", "empty_on", "within"), [("dense", None, 1e-5), ("dense", 1, 1e-5), ("int8", 0, 0.02)])
@pytest.mark.one_in(2)
def test_models_with_empty_parameters_train_as_in_eager_also_with_an_empty_batch(
    plan: str, empty_on: int | None, within: float
):
    for found in run_ranks(2, empty_ones, plan, empty_on):
        assert found == {case: pytest.approx(0.0, abs=within) for case in found}
        assert len(found) == len(EMPTY) * len(FRONTENDS)


@pytest.mark.parametrize("plan", ["topk(0.5)", "powersgd(2)", "balanced"])
@pytest.mark.one_in(3)
def test_empty_parameters_are_taken_by_every_kind_of_plan(plan: str):
    for found in run_ranks(2, some_empty_ones, plan):
        assert found == {case: pytest.approx(0.0, abs=1.0) for case in found}, "compression leaves out less than that"
        assert len(found) == len(SOME) * len(FRONTENDS)


def test_shared_gradients_views_and_frozen_types_train_as_in_eager():
    for found in run_ranks(2, unusual_ones, "dense"):
        assert found == {case: pytest.approx(0.0, abs=1e-5) for case in found}
        assert len(found) == len(UNUSUAL) * len(FRONTENDS) - 1


# Under fully_shard


def shard_empty_ones() -> dict[str, str | bool]:
    """Errors of both frontends, and if training goes on once the advice is followed."""
    found: dict[str, str | bool] = {}
    for name in ("average_replicas", "compress_reduce_scatter"):
        for advised in (False, True):
            model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 0))
            if advised:
                for parameter in model[1].parameters():
                    parameter.requires_grad_(False)
            try:
                if name == "average_replicas":
                    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
                    fully_shard(model, mesh=mesh["shard"])
                    average: Any = fxcomp.average_replicas(model, mesh["replicate"], compress="dense")
                else:
                    fully_shard(model)
                    average = fxcomp.compress_reduce_scatter(model, compress="dense")
                (model(torch.ones(3, 6)).sum() + model[0](torch.ones(3, 6)).sum()).backward()
                average.close()
                gradient: Any = model[0].weight.grad
                found[f"{name}, {advised}"] = gradient is not None and bool(gradient.full_tensor().any())
            except fxcomp.FxcompError as error:
                found[f"{name}, {advised}"] = f"{type(error).__name__}: {error}"
    return found


def test_an_empty_parameter_under_fully_shard_is_refused_by_name_and_trains_once_it_is_frozen():
    for found in run_ranks(2, shard_empty_ones):
        for name in ("average_replicas", "compress_reduce_scatter"):
            text = str(found[f"{name}, False"])
            assert text.startswith("Unsupported: the parameter '1.weight' has no elements, [0, 4]"), text
            assert f".requires_grad_(False) for it before fully_shard and {name}" in text
            assert found[f"{name}, True"] is True


# `.data =` inside of forward, under the backend


class Teaches(nn.Module):
    """A layer, a frozen copy that follows it in a way that the test gives, and a buffer."""

    def __init__(self, before: Callable[[Teaches], None], after: Callable[[Teaches], None] | None = None):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        self.before(self)
        result = self.student(x) + self.teacher(x) + self.mean
        if self.after is not None:
            self.after(self)
        return result


def follow(model: Teaches) -> None:
    model.teacher.weight.data = model.teacher.weight.data * 0.9 + model.student.weight.data * 0.1


def follow_all(model: Teaches) -> None:
    """Momentum contrast, as it is usually written."""
    with torch.no_grad():
        for own, kept in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
            kept.data = kept.data * 0.9 + own.data * 0.1


def follow_in_place(model: Teaches) -> None:
    model.teacher.weight.data.copy_(model.teacher.weight.data * 0.9 + model.student.weight.data * 0.1)


def normalise(model: Teaches) -> None:
    model.student.weight.data = model.student.weight.data / model.student.weight.data.norm()


def count_in_data(model: Teaches) -> None:
    model.mean.data = model.mean.data + 1


def reassign(model: Teaches) -> None:
    model.mean = model.mean * 0.5 + model.student.bias.detach()


def share(model: Teaches) -> None:
    model.teacher.weight.data = model.student.weight.data


def double(model: Teaches) -> None:
    model.mean.data = model.mean.data * 2


def turn(model: Teaches) -> None:
    model.teacher.weight.data = model.teacher.weight.data.t().contiguous().t()


def set_it(model: Teaches) -> None:
    with torch.no_grad():
        model.mean.set_(model.mean * 0.9 + 0.1)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "a frozen parameter": lambda: Teaches(follow),
    "all frozen parameters": lambda: Teaches(follow_all),
    "a frozen parameter in place": lambda: Teaches(follow_in_place),
    "a trained parameter": lambda: Teaches(normalise),
    "a buffer": lambda: Teaches(count_in_data),
    "a buffer twice": lambda: Teaches(count_in_data, double),
    "a buffer and a parameter": lambda: Teaches(follow, count_in_data),
    "a buffer by name": lambda: Teaches(reassign),
    "the memory of a trained one": lambda: Teaches(share),
    "other strides": lambda: Teaches(turn),
    "a buffer by set_": lambda: Teaches(set_it),
}


def write_data() -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    given = batches()
    for name, build in WRITTEN.items():
        torch.manual_seed(7)
        model = build()
        reference, ours = copy.deepcopy(model), copy.deepcopy(model)
        torch._dynamo.reset()
        expected = eagerly(reference, given, torch.compile(reference, backend="aot_eager"))
        try:
            torch._dynamo.reset()
            options = {"model": ours, "compress": "dense"}
            trained = by_loop(ours, given, torch.compile(ours, backend="fxcomp", options=options))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = max((a - b).abs().max().item() for a, b in zip(trained, expected, strict=True))
    return found


def test_data_that_forward_assigns_is_as_under_aot_eager():
    for found in run_ranks(2, write_data):
        assert found == {case: pytest.approx(0.0, abs=1e-5) for case in WRITTEN}


def test_one_rank_alone_assigns_data_in_forward_as_under_aot_eager():
    (found,) = run_ranks(1, write_data)
    assert found == {case: pytest.approx(0.0, abs=1e-6) for case in WRITTEN}
