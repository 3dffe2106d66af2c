"""Inductor may compile regions; what they compute stays the same, and what they draw."""

import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import captured_step, cross_entropy
from helpers.torch_compiled import QUICK
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.fx import Graph, GraphModule

import fxcomp
from fxcomp import compat
from fxcomp.codegen import program
from fxcomp.codegen.load import compile_with_inductor
from fxcomp.graph.edit import call
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.regions import Region

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own


class Attending(nn.Module):
    """Attention, and every kind of draw: fills of fresh memory, transposed ones, and dropout that is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.embed(tokens), 0.3).transpose(0, 1)
        inner = nn.functional.dropout(inner, 0.3).transpose(0, 1)
        inner = inner + self.attend(inner, inner, inner, need_weights=False)[0]
        return self.head(inner)


class Dropping(Attending):
    """Two draws that Inductor keeps inside its code."""

    def forward(self, tokens: Tensor) -> Tensor:
        inner = torch.native_dropout(self.embed(tokens), 0.3, True)[0]
        return self.head(torch.native_dropout(inner, 0.5, True)[0])


class Mixed(Dropping):
    """Draws of both kinds: this region stays as it is."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.1)


def trained(
    make: Callable[[], nn.Module], backend: str, monkeypatch: pytest.MonkeyPatch, accumulate: int = 1
) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters after a few steps with regions run by `backend`."""
    monkeypatch.setattr(program, "INDUCTOR_DEVICES", ("cpu",) if backend == "inductor" else ())
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens = [torch.randint(0, 20, (3, 6)) for _ in range(3)]
    batches = [(each, each) for each in tokens]
    with inductor_config.patch(QUICK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        step = fxcomp.compile_step(
            model, cross_entropy, optimizer, batches[0], accumulate=accumulate, checks=fxcomp.Checks(verify=1)
        )
        torch.manual_seed(1)
        return [step(batch, last=batch is batches[-1]).item() for batch in batches], list(model.parameters())


@pytest.mark.parametrize("make", [pytest.param(Attending, marks=pytest.mark.slow), Dropping, Mixed])
@pytest.mark.one_in(2)
def test_regions_compiled_by_inductor_train_the_same(make: type[nn.Module], monkeypatch: pytest.MonkeyPatch):
    losses, parameters = trained(make, "eager", monkeypatch)
    compiled_losses, compiled_parameters = trained(make, "inductor", monkeypatch)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for parameter, other in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_sums_are_written_by_inductor_too(monkeypatch: pytest.MonkeyPatch):
    losses, parameters = trained(Dropping, "eager", monkeypatch, accumulate=2)
    compiled_losses, compiled_parameters = trained(Dropping, "inductor", monkeypatch, accumulate=2)
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for parameter, other in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)


def test_sizes_that_are_equal_while_tracing_may_differ_later():
    mode, _ = compat.fake_mode()
    fake = compat.fake_with_dynamic_dims(mode, torch.zeros(4, 4), frozenset({0, 1}), "x")
    traced = compat.trace(lambda x: (x * 2,), [fake])
    double = compat.standalone_compile(traced, [fake], keeps_order=False)
    for rows, columns in ((4, 4), (3, 7), (7, 3)):
        value = torch.randn(rows, columns)
        assert torch.equal(double(value)[0], 2 * value)


def test_what_a_process_before_has_compiled_for_symbolic_sizes_is_no_trap(tmp_path: Path):
    """Inductor's cache of graphs on disk outlives a process; its entries do not know what symbols stand for."""
    graph, fake = Graph(), with_two_symbols()
    rows = fake.flatten().shape[0]
    (number := graph.placeholder("rows")).meta["val"] = rows
    graph.placeholder("batch").meta["val"] = fake
    with fake.fake_mode:
        filled = call(graph, torch.ops.aten.full.default, ([number], 2.0), NodeInfo(Role.COMPUTE))
    graph.output((filled,))
    gm = GraphModule(nn.Module(), graph)
    with torch.compiler.config.patch(cache_key_tag=str(tmp_path)):
        for _ in range(2):  # the second one would find what the first one left
            run = compat.standalone_compile(gm, [rows, fake], keeps_order=False)
            assert run(24, torch.ones(4, 6))[0].tolist() == [2.0] * 24


def with_two_symbols() -> Any:
    mode, _ = compat.fake_mode()
    return compat.fake_with_dynamic_dims(mode, torch.zeros(4, 6), frozenset({0, 1}), "x")


def test_a_region_of_flattened_values_is_given_the_batch_that_tells_their_sizes():
    """Of 24 rows alone nobody could tell 4 times 6 from 3 times 8, and Inductor raises AssertionError."""
    graph, fake = Graph(), with_two_symbols()
    graph.placeholder("weight").meta["val"] = torch.empty(6, 2)
    (batch := graph.placeholder("batch")).meta["val"] = fake
    (flat := graph.placeholder("flat")).meta["val"] = fake.flatten()
    doubled = call(graph, torch.ops.aten.mul.Tensor, (flat, 2.0), NodeInfo(Role.COMPUTE))
    graph.output((doubled,))
    region = Region.of("region_0", [doubled])
    assert region.inputs == (flat, batch)
    run = compile_with_inductor(GraphModule(nn.Module(), graph), region, alone_plainly)
    for rows, columns in ((4, 6), (3, 5)):
        assert run(torch.ones(rows * columns), torch.ones(rows, columns)).tolist() == [2.0] * (rows * columns)


def test_attention_without_dropout_draws_nothing():
    assert not any(map(compat.draws, captured_step("transformer").graph.graph.nodes))


class DroppingPaths(nn.Module):
    """Attention without dropout, whose result is left out of some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.embed(tokens)
        heads = inner.unflatten(2, (2, 4)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.head(inner + mixed * inner.new_empty(len(inner), 1, 1).bernoulli_(0.9))


def test_a_fill_beside_attention_leaves_its_region_to_inductor_with_its_passes(monkeypatch: pytest.MonkeyPatch):
    keeping_order: list[bool] = []

    def run_plainly(module: GraphModule, _: Any, *, keeps_order: bool) -> Callable[..., Any]:
        keeping_order.append(keeps_order)
        return lambda *inputs: module(*inputs)

    monkeypatch.setattr(compat, "standalone_compile", run_plainly)
    losses, _ = trained(DroppingPaths, "inductor", monkeypatch)
    assert keeping_order == [False]
    assert losses == trained(DroppingPaths, "eager", monkeypatch)[0]


def test_what_a_line_lists_is_taken_before_the_region():
    """A region's inputs are tensors; what nothing is computed of needs no compiling."""
    mode, _ = compat.fake_mode()
    graph = Graph()
    with mode:
        values = [torch.empty(3), torch.empty(4)]
    (listed := graph.placeholder("listed")).meta["val"] = values
    first, second = (call(graph, operator.getitem, (listed, k), NodeInfo(Role.COMPUTE)) for k in (0, 1))
    alone = Region.of("region_0", [first, second])
    doubled = call(graph, torch.ops.aten.mul.Tensor, (second, 2.0), NodeInfo(Role.COMPUTE))
    graph.output((first, doubled))
    gm = GraphModule(nn.Module(), graph)
    assert compile_with_inductor(gm, alone, alone_plainly) is alone_plainly
    run = compile_with_inductor(gm, Region.of("region_0", [first, second, doubled]), alone_plainly)
    given = [torch.ones(3), torch.ones(4)]
    assert [each.tolist() for each in run(given)] == [[1.0] * 3, [2.0] * 4]


def alone_plainly(*_: object) -> None:
    raise AssertionError("the compiled region was to run")


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_region_that_is_given_another_type_than_the_capture_says_stays_as_it_is(given: torch.dtype):
    """Inductor's code would read the memory as the type that it was made for, whatever lies there."""
    mode, _ = compat.fake_mode()
    graph = Graph()
    with mode:
        (taken := graph.placeholder("taken")).meta["val"] = torch.empty(4, dtype=torch.bfloat16)
    doubled = call(graph, torch.ops.aten.mul.Tensor, (taken, 2.0), NodeInfo(Role.COMPUTE))
    graph.output((doubled,))
    calls = list[torch.dtype]()

    def plainly(value: Tensor) -> Tensor:
        calls.append(value.dtype)
        return value * 2.0

    run = compile_with_inductor(GraphModule(nn.Module(), graph), Region.of("region_0", [doubled]), plainly)
    for _ in range(2):
        assert run(torch.ones(4, dtype=given)).tolist() == [2.0] * 4
    assert calls == ([] if given is torch.bfloat16 else [given] * 2)


def test_a_check_whose_result_nobody_uses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.inv(batch)  # pyright: ignore[reportUnknownMemberType]  # untyped
        return model(inverse).square().mean()

    monkeypatch.setattr(program, "INDUCTOR_DEVICES", ("cpu",))
    model = nn.Linear(3, 3)
    step = fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.eye(3))
    step(torch.eye(3))
    with pytest.raises(RuntimeError, match="could not be completed"):
        step(torch.zeros(3, 3))
