"""Each rule of exact_type holds on drawn values; each refusal has values that are no 16-bit numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.captures import captured
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxcomp.graph.exact_type import exact_types, narrow_types, narrowed, proof_note
from fxcomp.graph.info import NodeInfo, Role, set_info

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS, COLUMNS = 100, 100

Rule = Callable[[Tensor, Tensor], Tensor]

EXACT: dict[str, Rule] = {
    "cast": lambda x, _: x.to(FP32),
    "cast twice": lambda x, _: x.to(FP64).to(FP32),
    "cast of a view": lambda x, _: x.t().to(FP32),
    "copy": lambda x, _: torch.ops.aten.copy(torch.ops.aten.empty_like(x, dtype=FP32), x),
    "view": lambda x, _: x.to(FP32).view(-1),
    "reshape": lambda x, _: x.to(FP32).t().reshape(-1),
    "transposed": lambda x, _: x.to(FP32).transpose(0, 1),
    "permuted": lambda x, _: x.to(FP32).permute(1, 0),
    "clone": lambda x, _: x.to(FP32).t().clone(memory_format=torch.contiguous_format),
    "expanded": lambda x, _: x.to(FP32).unsqueeze(0).expand(2, ROWS, COLUMNS),
    "squeezed": lambda x, _: x.to(FP32).unsqueeze(0).squeeze(0),
    "slice": lambda x, _: x.to(FP32)[3:50:2],
    "row": lambda x, _: x.to(FP32)[7],
    "flipped": lambda x, _: x.to(FP32).flip(0),
    "part of a split": lambda x, _: x.to(FP32).split(30)[1],
    "joined": lambda x, y: torch.cat([x.to(FP32), y.to(FP32)]),
    "stacked": lambda x, y: torch.stack([x.to(FP32), y.to(FP32)]),
    "padded": lambda x, _: nn.functional.pad(x.to(FP32), (1, 2)),
    "joined with zeros": lambda x, _: torch.cat([x.to(FP32), torch.zeros(3, COLUMNS)]),
    "gradient of a slice": lambda x, _: torch.ops.aten.slice_backward(x.to(FP32), [2 * ROWS, COLUMNS], 0, 0, ROWS, 1),
    "gradient of a row": lambda x, _: torch.ops.aten.select_backward(x.to(FP32), [3, ROWS, COLUMNS], 0, 1),
    "a sum in 16 bits": lambda x, y: (x + y).to(FP32),
    "a product in 16 bits": lambda x, y: (x @ y).to(FP32),
}

NOT_EXACT: dict[str, Rule] = {
    "a sum in fp32": lambda x, y: x.to(FP32) + y.to(FP32),
    "a sum in place": lambda x, y: x.to(FP32).add_(y.to(FP32)),
    "a value written later": lambda x, y: _added_to_view(x.to(FP32), y.to(FP32)),
    "a product in fp32": lambda x, y: x.to(FP32) @ y.to(FP32),
    "scaled": lambda x, _: x.to(FP32) * 0.3,
    "padded by a third": lambda x, _: nn.functional.pad(x.to(FP32), (1, 2), value=1 / 3),
    "joined with fp32": lambda x, y: torch.cat([x.to(FP32), y.to(FP32) / 3]),
    "bits taken for another type": lambda x, _: x.view(FP32),
    "a copy of fp32": lambda x, y: torch.ops.aten.copy(torch.ops.aten.empty_like(x, dtype=FP32), y.to(FP32) / 3),
    "a mean": lambda x, _: x.to(FP32).mean(0),
}


def _added_to_view(value: Tensor, other: Tensor) -> Tensor:
    value.view(-1).add_(other.view(-1))
    return value


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    """Draw 10,000 bit patterns: every exponent, subnormals, infinities and NaN among them."""
    bits = torch.randint(-(1 << 15), 1 << 15, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int16).view(dtype)


def moderate(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(rule: Rule, dtype: torch.dtype) -> tuple[GraphModule, Node]:
    gm = make_fx(rule, tracing_mode="fake")(moderate(dtype, 0), moderate(dtype, 1))
    for node in gm.graph.nodes:
        set_info(node, NodeInfo(Role.COMPUTE))
    return gm, gm.graph.output_node().args[0]


def are_numbers_of(dtype: torch.dtype, value: Tensor) -> bool:
    return torch.equal(value.to(dtype).to(value.dtype).nan_to_num(nan=math.pi), value.nan_to_num(nan=math.pi))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_a_proved_value_is_a_16_bit_number_and_is_rebuilt_bit_for_bit(name: str, dtype: torch.dtype):
    gm, result = traced(EXACT[name], dtype)
    assert narrow_types(result) == {dtype}
    given = drawn(dtype, 2), drawn(dtype, 3)
    wide = gm(*given)
    assert are_numbers_of(dtype, wide)

    with gm.graph.inserting_before(gm.graph.output_node()):
        narrow = narrowed(gm.graph, result, dtype)
    gm.graph.output_node().args = (narrow,)
    gm.recompile()
    rebuilt = gm(*given)
    assert rebuilt.dtype is dtype
    assert rebuilt.shape == wide.shape
    assert torch.equal(rebuilt.to(wide.dtype).nan_to_num(nan=math.pi), wide.nan_to_num(nan=math.pi))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NOT_EXACT)
def test_what_is_not_proved_has_other_values(name: str, dtype: torch.dtype):
    gm, result = traced(NOT_EXACT[name], dtype)
    assert not narrow_types(result)
    assert not are_numbers_of(dtype, gm(moderate(dtype, 2), moderate(dtype, 3)))


def test_a_join_of_two_16_bit_types_is_neither():
    gm = make_fx(lambda x, y: torch.cat([x.to(FP32), y.to(FP32)]), tracing_mode="fake")(
        moderate(BF16, 0), moderate(FP16, 1)
    )
    assert not narrow_types(gm.graph.output_node().args[0])


class Everything(nn.Module):
    """Layers with exact gradients, and layers without."""

    def __init__(self, *, twice: bool = True) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.convolution, self.head = nn.Conv1d(16, 16, 3), nn.Linear(16, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.twice = twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.again(self.first(self.embedding(tokens)))) * self.scale
        if self.twice:
            x = self.again(x)
        return self.head(self.convolution(x.transpose(1, 2)).transpose(1, 2))


def exact_of(model: nn.Module, *, cache: bool = True, dtype: torch.dtype = BF16) -> dict[str, torch.dtype]:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, cache_enabled=cache):
            return nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch[:, 2:].flatten())

    return exact_types(captured(model, torch.randint(0, 50, (2, 8)), "sgd", loss_fn).graph)


LINEARS = {"first.weight", "first.bias", "convolution.weight", "convolution.bias", "head.weight"}
TWICE = {"again.weight", "again.bias"}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_linears_and_convolutions_are_exact_under_autocast_and_norms_embeddings_and_scales_are_not(dtype: torch.dtype):
    assert exact_of(Everything(), dtype=dtype) == dict.fromkeys(LINEARS | TWICE, dtype)


def test_a_layer_used_twice_is_exact_only_with_autocasts_cache():
    assert set(exact_of(Everything(), cache=False)) == LINEARS
    assert set(exact_of(Everything(twice=False), cache=False)) == LINEARS | TWICE


def test_nothing_is_exact_without_autocast():
    model = Everything()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch[:, 2:].flatten())

    assert not exact_types(captured(model, torch.randint(0, 50, (2, 8)), "sgd", loss_fn).graph)


def test_the_note_names_operators_and_layers_of_both_kinds():
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch[:, 2:].flatten())

    model = nn.Sequential(Everything(), nn.Identity())
    gm = captured(model, torch.randint(0, 50, (2, 8)), "sgd", loss_fn).graph
    note = proof_note(gm, exact_types(gm))
    exact, _, others = note.partition(" Not so: ")
    assert note.startswith("71.5% of the gradients' values are casts of 16-bit values")
    assert "aten.mm (1,056: *.head.weight, *.first.weight)" in exact
    assert "aten.sum.dim_IntList (16: *.first.bias)" in exact
    assert "aten.sum.dim_IntList (16: *.scale)" in others
    assert "aten.embedding_dense_backward (800: *.embedding.weight)" in others


def test_the_note_names_each_parameter_of_a_layer_that_is_in_both_lists():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return model(batch).float().sum()

    gm = captured(model, torch.randn(4, 16), "sgd", loss_fn).graph
    assert "aten.mm (768: *.weight)" in proof_note(gm, exact_types(gm))
    exact, _, others = proof_note(gm, {"0.weight", "2.weight"}).partition(" Not so: ")
    assert "(512: 2.weight, 0.weight)" in exact
    assert "(256: 1.weight)" in others
