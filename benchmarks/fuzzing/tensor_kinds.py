"""Tensors of every kind in a batch, from the first step on, from the second one, or in turn with plain ones."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from fuzzing.program import Add
from fuzzing.world import World

WIDTH = 4


class Doubling(Tensor):
    """A subclass whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func in (Tensor.sin, torch.sin) else result


class Marked(Tensor):
    """A subclass that computes as plain tensors do; a loss asks for its type."""


class Dispatched(Tensor):
    """A subclass by dispatch."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Dispatched, lambda x: x.inner, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


Kind = Callable[[Tensor], Tensor]
"""From plain numbers (3, 4) to a tensor of a kind."""


def _with_hook(x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    y.register_hook(lambda g: g * 2)
    return y


def _with_attribute(x: Tensor) -> Tensor:
    y: Any = x.clone()
    y.weight = 2.0
    return y


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _nested(layout: torch.layout) -> Kind:
    return lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)


def _fake(x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_like(x)


def _read_only(x: Tensor) -> Tensor:
    array = x.numpy().copy()
    array.flags.writeable = False
    return torch.from_numpy(array)


def _subnormal(x: Tensor) -> Tensor:
    return x * 1e-39


def _offset(x: Tensor) -> Tensor:
    return torch.cat((x.new_ones(2, WIDTH), x))[2:]


def _quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def _resized(x: Tensor) -> Tensor:
    y = x.clone()
    y.untyped_storage().resize_(4 * 64)
    return y


def _conj_of_neg(x: Tensor) -> Tensor:
    return torch.complex(x, x + 1).conj().imag


KINDS: dict[str, Kind] = {
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: torch.cat((x, x[:1])).to_sparse_bsr((2, 2)),
    "coo": lambda x: x.to_sparse(),
    "coo_uncoalesced": lambda x: torch.sparse_coo_tensor(torch.zeros(2, 2, dtype=torch.long), x[0, :2], (3, WIDTH)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged),
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "complex": lambda x: torch.complex(x, x + 1),
    "neg": _conj_of_neg,
    "resolved": lambda x: torch.complex(x, x + 1).conj().resolve_conj(),
    "conj_of_real": lambda x: x.conj(),
    "imag": lambda x: torch.complex(x, x + 1).imag,
    "as_real": lambda x: torch.view_as_real(torch.complex(x, x + 1)),
    "doubling": lambda x: x.as_subclass(Doubling),
    "marked": lambda x: x.as_subclass(Marked),
    "dispatched": Dispatched,
    "parameter": nn.Parameter,
    "buffer": lambda x: nn.Buffer(x),
    "masked": lambda x: masked_tensor(x, x > 0),
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(3, WIDTH),
    "expanded_columns": lambda x: x[:, :1].expand(3, WIDTH),
    "offset": _offset,
    "strided": lambda x: torch.stack((x, x + 1), -1)[..., 0],
    "flipped_strides": lambda x: torch.empty_strided((3, WIDTH), (1, 5)).copy_(x),
    "overlapping": lambda x: x.flatten().as_strided((3, WIDTH), (2, 1)),
    "channels_last": lambda x: x.view(1, 1, 3, WIDTH).repeat(2, 2, 1, 1).to(memory_format=torch.channels_last),
    "channels_last_of_one": lambda x: x.view(1, 1, 3, WIDTH).contiguous(memory_format=torch.channels_last),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "not_a_leaf": lambda x: x.clone().requires_grad_() * 2,
    "with_hook": _with_hook,
    "with_attribute": _with_attribute,
    "with_grad": lambda x: _graded(x.clone().requires_grad_()),
    "number": lambda x: x[0, 0],
    "number_clone": lambda x: x[0, 0].clone(),
    "one": lambda x: x[:1, :1].clone(),
    "int8": lambda x: (x * 10).to(torch.int8),
    "uint8": lambda x: (x.abs() * 10).to(torch.uint8),
    "int16": lambda x: (x * 10).to(torch.int16),
    "int32": lambda x: (x * 10).to(torch.int32),
    "long": lambda x: (x * 10).long(),
    "bool": lambda x: x > 0,
    "uint16": lambda x: (x.abs() * 10).to(torch.uint16),
    "uint32": lambda x: (x.abs() * 10).to(torch.uint32),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "complex32": lambda x: torch.complex(x.half(), x.half()),
    "complex128": lambda x: torch.complex(x.double(), x.double()),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "fake": _fake,
    "quantized": _quantized,
    "inference": _inference,
    "read_only": _read_only,
    "resized": _resized,
    "subnormal": _subnormal,
    "zero": lambda x: torch._efficientzerotensor((3, WIDTH)),  # noqa: ARG005
    "shared_memory": lambda x: x.clone().share_memory_(),
    "zero_strides": lambda x: torch.as_strided(x.flatten(), (3, WIDTH), (0, 0)),
    "empty_dim": lambda x: x[:, :0],
    "permuted": lambda x: x.view(3, 2, 2).permute(2, 0, 1),
    "bits_viewed": lambda x: x.view(torch.int32),
    "as_double_viewed": lambda x: x.view(torch.float64),
    "vmap_free": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "from_numpy": lambda x: torch.from_numpy(numpy.asfortranarray(x.numpy())),
    "data": lambda x: x.clone().requires_grad_().data,
    "detached_view": lambda x: x.view(WIDTH, 3).detach(),
    "negative_zero": lambda x: torch.where(x > 0, x, -0.0),
}


def _graded(x: Tensor) -> Tensor:
    x.grad = torch.ones_like(x)
    return x


def as_numbers(x: Any) -> Tensor:
    """Whatever a leaf is, as one number that depends on all of it."""
    if x.layout == torch.jagged:
        return x.values().sin().sum()
    if x.is_nested:
        return x.to_padded_tensor(0.0).sin().sum()
    if x.is_quantized:
        return x.dequantize().sin().sum()
    if x.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return x.to_dense().sin().sum()
    if x.layout != torch.strided:
        return x.to_dense().sin().sum()
    if x.is_complex():
        x = torch.view_as_real(x.to(torch.complex64).resolve_conj())
    if not x.is_floating_point() or x.element_size() == 1:
        x = x.float()
    return x.sin().sum().float()


LOOKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "none": lambda x, v: v,  # noqa: ARG005
    "is_subclass": lambda x, v: v * 3 if isinstance(x, Doubling | Dispatched) else v,
    "is_marked": lambda x, v: v * 3 if isinstance(x, Marked | nn.Parameter) else v,
    "is_contiguous": lambda x, v: v * 3 if x.is_contiguous() else v,
    "stride": lambda x, v: v * (1 + x.stride(-1)) if x.layout == torch.strided and x.dim() else v,
    "is_leaf": lambda x, v: v * 3 if x.is_leaf else v,
    "requires_grad": lambda x, v: v * 3 if x.requires_grad else v,
    "is_conj": lambda x, v: v * 3 if x.is_conj() else v,
    "is_neg": lambda x, v: v * 3 if x.is_neg() else v,
    "layout": lambda x, v: v * 3 if x.layout == torch.strided else v,
    "dtype": lambda x, v: v * x.element_size(),
    "attribute": lambda x, v: v * getattr(x, "weight", 1.0),
    "dim": lambda x, v: v * (x.dim() + 1),
    "grad": lambda x, v: v * (3 if x.is_leaf and x.requires_grad and x.grad is not None else 1),
    "storage": lambda x, v: (
        v * (1 + x.untyped_storage().nbytes()) if x.layout == torch.strided and not isinstance(x, Dispatched) else v
    ),
    "device": lambda x, v: v * 3 if x.device.type == "cpu" else v,
    "pointer": lambda x, v: v * 3 if x.layout == torch.strided and x.data_ptr() % 2 == 0 else v,
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "mul_": lambda x: x.mul_(2) if not x.requires_grad else None,
    "first": lambda x: x[:1].zero_() if not x.requires_grad and x.dim() else None,
}

RELATIONS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "alone": lambda x: (x,),
    "twice": lambda x: (x, x),
    "and_a_view": lambda x: (x, x[:1]),
    "and_a_clone": lambda x: (x, x.clone()),
    "and_detached": lambda x: (x, x.detach()),
    "and_its_transpose": lambda x: (x, x.t()),
    "halves": lambda x: (x[:1], x[1:]),
    "overlapping": lambda x: (x[:2], x[1:]),
    "and_its_data": lambda x: (x.data, x),
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
        look, write = LOOKS[self.program.get("look", "none")], WRITES[self.program.get("write", "none")]
        # Eager cannot save a tensor of inference mode.
        through = self.program.has("through") and self.program.get("kind") != "inference"

        def compute(model: nn.Module, batch: Any) -> Any:
            x, others = batch
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = KINDS[name](other) if name in KINDS else other
            related = program.get("relation", "alone") if is_odd else program.get("plain_relation", "alone")
            try:
                return x, list(RELATIONS[related](made))
            except (RuntimeError, NotImplementedError, TypeError, IndexError):  # not every kind has views
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
