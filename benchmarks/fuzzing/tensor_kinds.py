"""Dtypes, layouts and aliases of tensors in a batch: from the first step on, from the second one, or in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4

Kind = Callable[[Tensor], Tensor]
"""From plain numbers (3, 4) to a tensor of a kind."""


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


KINDS: dict[str, Kind] = {
    "csr": lambda x: x.to_sparse_csr(),
    "coo": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[:2], x[2:]]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "complex": lambda x: torch.complex(x, x + 1),
    "imag": lambda x: torch.complex(x, x + 1).imag,
    "parameter": nn.Parameter,
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(3, WIDTH),
    "expanded_columns": lambda x: x[:, :1].expand(3, WIDTH),
    "offset": lambda x: torch.cat((x.new_ones(2, WIDTH), x))[2:],
    "strided": lambda x: torch.stack((x, x + 1), -1)[..., 0],
    "flipped_strides": lambda x: torch.empty_strided((3, WIDTH), (1, 5)).copy_(x),
    "overlapping": lambda x: x.flatten().as_strided((3, WIDTH), (2, 1)),
    "channels_last": lambda x: x.view(1, 1, 3, WIDTH).repeat(2, 2, 1, 1).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(3, 2, 2).permute(2, 0, 1),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "not_a_leaf": lambda x: x.clone().requires_grad_() * 2,
    "number": lambda x: x[0, 0],
    "one": lambda x: x[:1, :1].clone(),
    "empty_dim": lambda x: x[:, :0],
    "int8": lambda x: (x * 10).to(torch.int8),
    "uint8": lambda x: (x.abs() * 10).to(torch.uint8),
    "int32": lambda x: (x * 10).to(torch.int32),
    "long": lambda x: (x * 10).long(),
    "bool": lambda x: x > 0,
    "uint16": lambda x: (x.abs() * 10).to(torch.uint16),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "complex128": lambda x: torch.complex(x.double(), x.double()),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "inference": _inference,
    "negative_zero": lambda x: torch.where(x > 0, x, -0.0),
}


def as_numbers(x: Any) -> Tensor:
    """Whatever a leaf is, as one number that depends on all of it."""
    if x.is_nested:
        x = x.to_padded_tensor(0.0)
    if x.is_quantized:
        x = x.dequantize()
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.to(torch.complex64).resolve_conj())
    if not x.is_floating_point() or x.element_size() == 1:
        x = x.float()
    return x.sin().sum().float()


LOOKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "none": lambda x, v: v,  # noqa: ARG005
    "is_contiguous": lambda x, v: v * 3 if x.is_contiguous() else v,
    "stride": lambda x, v: v * (1 + x.stride(-1)) if x.layout == torch.strided and x.dim() else v,
    "is_leaf": lambda x, v: v * 3 if x.is_leaf else v,
    "requires_grad": lambda x, v: v * 3 if x.requires_grad else v,
    "is_conj": lambda x, v: v * 3 if x.is_conj() else v,
    "layout": lambda x, v: v * 3 if x.layout == torch.strided else v,
    "dtype": lambda x, v: v * x.element_size(),
    "dim": lambda x, v: v * (x.dim() + 1),
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(2) if not x.requires_grad else None,
    "first": lambda x: x[:1].zero_() if not x.requires_grad and x.dim() else None,
}

RELATIONS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "alone": lambda x: (x,),
    "twice": lambda x: (x, x),
    "and_a_view": lambda x: (x, x[:1]),
    "and_a_clone": lambda x: (x, x.clone()),
    "and_its_transpose": lambda x: (x, x.t()),
    "halves": lambda x: (x[:1], x[1:]),
    "overlapping": lambda x: (x[:2], x[1:]),
}


class Layered(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Kinds(World):
    """Plain rows, and beside them a leaf of a kind."""

    def build(self) -> tuple[Any, Any, Any]:
        look, write = LOOKS[self.program.get("look", "none")], WRITES.get(self.program.get("write"))
        # Eager cannot save a tensor of inference mode.
        through = self.program.has("through") and self.program.get("kind") != "inference"

        def compute(model: nn.Module, batch: Any) -> Any:
            x, others = batch
            if write is not None:
                write(others[0])
            value = model(x).sum()
            for other in others:
                value = value * (1 + 0.1 * look(other, as_numbers(other)))
            if through:  # the leaf itself goes through a layer
                value = value + model(others[0]).sum()
            return value

        return Layered(), compute, lambda _: None

    def batch(self, step: int) -> Any:
        program, g = self.program, torch.Generator()
        g.manual_seed(1000 * program.seed + 10 * step + self.rank)
        x, other = torch.randn(2, WIDTH, generator=g), torch.randn(3, WIDTH, generator=g)
        order = program.get("order", "first")
        is_odd = {"first": True, "second": step > 0, "alternating": step % 2 == 1, "now": step % 2 == 0}[order]
        turn = program.get("other_kind", "plain") if order == "alternating" else "plain"
        name = program.get("kind", "plain") if is_odd else turn
        made = KINDS[name](other) if name in KINDS else other
        related = program.get("relation", "alone") if is_odd else program.get("plain_relation", "alone")
        try:
            return x, list(RELATIONS[related](made))
        except (RuntimeError, IndexError):  # sparse, nested, of more or of no dimensions
            return x, [made]


def draw_kinds(r: random.Random, add: Add, ranks: int) -> int:  # noqa: ARG001
    add("kind", tuple(KINDS), 0.9)
    add("other_kind", tuple(KINDS), 0.3)
    add("order", ("first", "second", "alternating", "now"))
    add("look", tuple(LOOKS), 0.6)
    add("write", tuple(WRITES), 0.2)
    add("relation", tuple(RELATIONS), 0.4)
    add("plain_relation", tuple(RELATIONS), 0.2)
    add("through", ("yes",), 0.3)
    return r.choice((3, 4, 5))
