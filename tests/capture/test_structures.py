"""Batches and auxiliary results may be mappings, dataclasses and collections that torch does not take apart."""

from __future__ import annotations

import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from helpers.eager import sgd, trains_as_eager
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import ModelOutput

from fxcomp import errors
from fxcomp.capture.batch_type import batch_change, batch_type
from fxcomp.capture.structures import flatten, flatten_with_paths


@dataclass
class Plain:
    x: Tensor
    y: Tensor
    scale: float = 1.0

    def halves(self) -> Tensor:
        return self.x / 2


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    x: Tensor
    y: Tensor


@dataclass
class Nested:
    inner: Plain
    rows: list[Frozen]
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.rows)
        self.seen = self.inner.x.shape[0]


class Attributes(dict[str, Any]):
    """A dict whose items are attributes too, as many libraries write it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Eager(UserDict[str, Any]):
    """Of its class a lookup of any attribute before `data` is there never ends."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Own(Mapping[str, Any]):
    """A mapping that is no dict, with slots."""

    __slots__ = ("_held",)

    def __init__(self, held: dict[str, Any]):
        self._held = held

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Default(defaultdict[str, Any]):
    pass


class Pair(tuple[Any, ...]):
    __slots__ = ()


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Output(ModelOutput):
    x: Tensor | None = None
    y: Tensor | None = None


def item(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def attribute(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.x, batch.y


def default(x: Tensor, y: Tensor) -> Default:
    made = Default(list)
    made.update(x=x, y=y)
    return made


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dataclass": (Plain, lambda b: (b.halves() * 2 * b.scale, b.y)),
    "frozen": (Frozen, attribute),
    "frozen with slots": (Slots, attribute),
    "nested": (
        lambda x, y: Nested(Plain(x, y), [Frozen(x, y), Frozen(x * 2, y)]),
        lambda b: (b.inner.x + b.rows[1].x * b.length / b.seen, b.rows[0].y),
    ),
    "BatchEncoding": (lambda x, y: BatchEncoding({"x": x, "y": y}), lambda b: (b["x"], b.y)),
    "UserDict of attributes": (lambda x, y: Eager(x=x, y=y), attribute),
    "dict of attributes": (lambda x, y: Attributes(x=x, y=y), attribute),
    "own mapping": (lambda x, y: Own({"x": x, "y": y}), item),
    "ChainMap": (lambda x, y: ChainMap({"x": x}, {"y": y}), item),
    "mapping proxies": (
        lambda x, y: types.MappingProxyType({"held": [types.MappingProxyType(OrderedDict(x=x, y=y))]}),
        lambda b: item(b["held"][0]),
    ),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), item),
    "defaultdict": (lambda x, y: defaultdict(int, x=x, y=y), item),
    "subclass of defaultdict": (default, item),
    "subclass of tuple": (lambda x, y: Pair((x, y)), lambda b: (b[0], b[1])),
    "namedtuple": (Named, attribute),
    "ModelOutput": (Output, attribute),
    "mapping in a dataclass": (lambda x, y: Frozen(x, UserDict(y=y)), lambda b: (b.x, b.y["y"])),
}


def rows(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, 20, generator=generator), torch.randint(0, 10, (length,), generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_apart_is_put_together_as_it_was(name: str):
    build, read = CASES[name]
    batch = build(*rows(3))
    leaves, structure = flatten(batch)
    again = pytree.tree_unflatten([leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    assert type(again) is type(batch)
    assert len(flatten_with_paths(batch)) == len(leaves)
    expected = build(*rows(3))
    assert torch.equal(read(again)[1], read(expected)[1] * 2)
    assert batch_type(batch)[0] == batch_type(expected)[0]
    assert hash(batch_type(batch)[0]) == hash(batch_type(expected)[0])


@pytest.mark.parametrize(
    "name", ["dataclass", "frozen with slots", "nested", "BatchEncoding", "own mapping", "ChainMap", "mapping proxies"]
)
def test_steps_train_as_eager_with_batches_of_any_structure(name: str):
    build, read = CASES[name]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        x, y = read(batch)
        out = model(x)
        return nn.functional.cross_entropy(out, y), build(out.detach(), y)

    torch.manual_seed(0)
    trains_as_eager(nn.Linear(20, 10), loss, [build(*rows(4)), build(*rows(4)), build(*rows(6))], sgd, verify=1)


def test_plain_values_in_a_dataclass_are_part_of_its_type():
    one, other = (Plain(*rows(3), scale=scale) for scale in (1.0, 2.0))
    kinds = [batch_type(each)[0] for each in (one, other)]
    assert str(batch_change(other, *kinds)) == "batch['scale'] changed from 1.0 to 2.0"
    assert batch_type(Frozen(*rows(3)))[0] != batch_type(Slots(*rows(3)))[0]


def test_a_values_change_in_a_dataclass_is_captured_again():
    def loss(model: nn.Module, batch: Plain) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x) * batch.scale, batch.y)

    torch.manual_seed(0)
    trains_as_eager(nn.Linear(20, 10), loss, [Plain(*rows(4), scale=s) for s in (1.0, 0.5, 1.0, 2.0)])


def test_encodings_of_a_tokenizer_are_left_out_of_the_step():
    encoded = BatchEncoding({"x": rows(3)[0]}, encoding=[object()], n_sequences=1)
    leaves, structure = flatten(encoded)
    again = pytree.tree_unflatten(leaves, structure)
    assert torch.equal(again["x"], encoded["x"])
    with pytest.raises(AttributeError):
        again.word_ids()


@dataclass
class Held:
    x: Tensor
    y: Any


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (Held(torch.ones(3), object()), "object"),
        (UserDict(x=torch.ones(3), y=object()), "object"),
        (Held, "type"),
    ],
)
def test_what_cannot_be_followed_in_a_structure_is_refused_by_its_class(batch: Any, kind: str):
    with pytest.raises(errors.Unsupported, match=f"a batch holds a {kind}; it may hold tensors.*"):
        batch_type(batch)


class Attributed:
    """A class of attributes that is no dataclass."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


@pytest.mark.parametrize("kind", [types.SimpleNamespace, Attributed])
def test_an_object_of_attributes_is_refused_and_taken_as_the_refusal_advises(kind: Any):
    batches = [kind(x=rows(4)[0], y=rows(4)[1], held=[1.0]) for _ in range(2)]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    for batch in (batches[0], [batches[0]], {"inner": batches[0]}):
        with pytest.raises(errors.Unsupported, match=rf"a batch holds a .*{kind.__name__}; .*\n.*pass vars\(\) of"):
            batch_type(batch)
    torch.manual_seed(0)
    trains_as_eager(nn.Linear(20, 10), loss, [vars(batch) for batch in batches])
