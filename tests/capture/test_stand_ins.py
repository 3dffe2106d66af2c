"""Attributes and identity of parameters, buffers and tensors outside: traced as in eager PyTorch, and guarded."""

from __future__ import annotations

import builtins
import functools
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager import sgd, trains_as_eager
from helpers.followed import compile_alone
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fxcomp
from fxcomp import errors
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture

BATCHES = [torch.full((2, 3), 1.0 + i) for i in range(6)]

PLACES = ("parameter", "buffer", "outside")


class Owner(nn.Module):
    """Has a tensor of each kind, and a way to it that loss functions name."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.place, self.outside = nn.Linear(3, 3), place, [torch.ones(3)]
        self.register_buffer("kept", torch.ones(3))

    @property
    def marked(self) -> Any:
        return {"parameter": self.fc.bias, "buffer": self.kept, "outside": self.outside[0]}[self.place]


def made(place: str, prepare: Callable[[Any], None]) -> Owner:
    model = Owner(place)
    prepare(model.marked)
    return model


def same_as_eager(
    make: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Tensor], Tensor],
    change: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Six steps, with a change before the fourth, are eager's. Returns the model that we trained."""
    model, reference = make(), make()  # a deep copy would lose attributes of parameters
    between: Any = lambda model, _, number: change(model) if number == 3 else None  # noqa: E731
    trains_as_eager(model, loss_fn, BATCHES, sgd, reference=reference, change=between, verify=1)
    return model


# Attributes

READS: dict[str, Callable[[Any], Any]] = {
    "a default": lambda t: getattr(t, "factor", 3.0),
    "hasattr": lambda t: 2.0 if hasattr(t, "factor") else 5.0,
    "vars": lambda t: vars(t).get("factor", 7.0),
    "__dict__": lambda t: t.__dict__.get("factor", 7.0),
    "an attribute of it": lambda t: getattr(getattr(t, "about", None), "factor", 11.0),
    "a tensor": lambda t: getattr(t, "lora", torch.zeros(())).sum(),
    "a module": lambda t: t.adapter(torch.ones(1, 3)).sum() if hasattr(t, "adapter") else 1.0,
}


class About:
    """A plain object that a tensor carries."""

    def __init__(self, factor: float):
        self.factor = factor


def nothing(tensor: Any) -> None:
    pass


def give(tensor: Any, factor: float = 2.0) -> None:
    torch.manual_seed(int(factor))
    tensor.factor, tensor.about, tensor.lora = factor, About(factor), torch.full((2,), factor)
    tensor.adapter = nn.Linear(3, 3).requires_grad_(False)


def give_another(tensor: Any) -> None:
    give(tensor, 4.0)


def take(tensor: Any) -> None:
    del tensor.factor, tensor.about, tensor.lora, tensor.adapter


HISTORIES = {
    "stays": (give, nothing),
    "changes": (give, give_another),
    "comes": (nothing, give),
    "goes": (give, take),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", PLACES)
def test_attributes_of_tensors_are_read_as_in_eager(place: str, read: str, history: str) -> None:
    before, change = HISTORIES[history]
    look = READS[read]

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        return model.fc(batch).square().mean() * look(model.marked)

    same_as_eager(lambda: made(place, before), loss_fn, lambda model: change(model.marked))


def test_an_attribute_that_is_a_parameter_is_traced_as_that_parameter() -> None:
    def partners() -> Owner:
        model: Any = Owner("parameter")
        model.fc.bias.partner = model.fc.weight
        return model

    same_as_eager(partners, lambda model, batch: model.fc(batch).mean() + model.fc.bias.partner.square().sum())


@pytest.mark.parametrize("place", PLACES)
def test_an_attribute_that_the_step_sets_once_is_captured(place: str) -> None:
    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        model.marked.factor = 2.0
        return model.fc(batch).mean() * model.marked.factor

    model = same_as_eager(lambda: Owner(place), loss_fn)
    assert vars(model.marked) == {"factor": 2.0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("comes", [True, False])
def test_an_attribute_that_is_none_comes_and_goes(place: str, comes: bool) -> None:
    model = made(place, nothing if comes else lambda tensor: setattr(tensor, "first", None))

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        is_second = hasattr(model.marked, "first") == comes
        if not is_second:
            model.marked.first = None
            if not comes:
                del model.marked.first
        return model.fc(batch).mean() * (1.0 if is_second else 2.0)

    with pytest.raises(errors.StepChanged, match="sets itself up at its first call"):
        compile_alone(model, loss_fn, batch=BATCHES[0])


# Identity

FACTORS = (2.0, 3.0)


def by_key(model: Any) -> Any:
    return dict(zip(model.fc.parameters(), FACTORS, strict=False))


def by_id(model: Any) -> Any:
    return dict(zip(map(id, model.fc.parameters()), FACTORS, strict=False))


LOOKUPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "a dict": (by_key, lambda table, p: table[p] * (p in table)),
    "get": (by_key, lambda table, p: table.get(p, 1.0)),
    "a set": (lambda model: {model.fc.bias, model.kept}, lambda chosen, p: 2.0 if p in chosen else 1.0),
    "a frozenset": (lambda model: frozenset([model.fc.bias]), lambda chosen, p: 2.0 if p in chosen else 1.0),
    "two sets": (lambda model: {model.fc.bias}, lambda chosen, p: 1.0 + len({p} & chosen)),
    "a list": (lambda model: [model.fc.bias], lambda chosen, p: 2.0 if p.dim() == 1 and p in chosen else 1.0),
    "ids": (by_id, lambda table, p: table.get(id(p), 1.0)),
    "ids of all": (by_id, lambda table, p: 1.0 + sum(i in table for i in map(id, [p, p]))),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_keys_made_before_compiling_are_found(lookup: str) -> None:
    make, look = LOOKUPS[lookup]
    torch.manual_seed(0)
    tables: dict[Any, Any] = {}

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        tensors = [*model.parameters(), *model.buffers()][:2] if lookup == "a list" else [*model.fc.parameters()]
        table = tables[model.place]
        return model.fc(batch).square().mean() + sum(look(table, p) * p.square().sum() for p in tensors)

    model, reference = Owner("ours"), Owner("eager")
    tables.update(ours=make(model), eager=make(reference))
    trains_as_eager(model, loss_fn, BATCHES[:3], sgd, reference=reference, verify=1)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1>", f"{os.__file__[:-5]}/site-packages/a.py"])
def test_users_code_has_any_file(file: str) -> None:
    model, code = Owner("parameter"), "lambda model, batch: model.fc(batch).mean() * (id(model.fc.bias) in chosen)"
    loss_fn = eval(compile(code, file, "eval"), {"chosen": {id(model.fc.bias)}})
    assert compile_alone(model, loss_fn, batch=BATCHES[0])(BATCHES[0]).item() != 0.0


def test_a_comparison_with_the_kept_tensor_is_one_of_elements() -> None:
    def owner() -> Owner:
        model: Any = Owner("buffer")
        model.outside = [model.kept]
        return model

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        return model.fc(batch).mean() + ((model.kept == model.outside[0]) * model.fc.bias.sum()).sum()

    same_as_eager(owner, loss_fn)


@pytest.mark.parametrize("maxsize", [None, 8])
def test_a_cached_function_forgets_what_it_kept_of_a_trace(maxsize: int | None) -> None:
    @functools.lru_cache(maxsize)
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    @functools.lru_cache(maxsize)
    def size_of(parameter: Tensor) -> int:
        return parameter.numel()

    factor = [1.0]

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        return (model.fc(batch) @ mask(3)).mean() * factor[0] * size_of(model.fc.bias)

    model = same_as_eager(lambda: Owner("parameter"), loss_fn, lambda _: factor.__setitem__(0, 2.0))
    assert type(mask(3)) is Tensor
    assert size_of(model.fc.bias) == 3


@pytest.mark.parametrize("collects", [False, True])
def test_a_cache_that_was_made_while_tracing_forgets_too(collects: bool) -> None:
    made = threading.local()  # is not watched

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        if not hasattr(made, "mask"):
            made.mask = functools.cache(lambda size: torch.ones(size, size).tril())
            if collects:
                gc.collect()
        return (model.fc(batch) @ made.mask(3)).mean()

    model = Owner("parameter")
    fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), BATCHES[0])
    assert type(made.mask(3)) is Tensor


def test_identity_within_a_step_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        seen: set[Tensor] = set()
        total: Any = model.two(model.one(batch)).mean()
        for p in (model.one.weight, model.two.weight, model.one.bias, model.two.bias):
            hidden = p * 2
            total = total + (hidden.sum() if p not in seen else 100.0) + 1000.0 * (hidden in seen)
            seen |= {p, hidden}
        return total * len({id(p) for p in (model.one.weight, model.two.weight, model.two.bias)})

    same_as_eager(Tied, loss_fn)


def test_threads_compile_one_after_the_other() -> None:
    models = [Owner("parameter") for _ in range(3)]
    chosen = {id(model.fc.bias) for model in models}
    found: list[Any] = []

    def loss_fn(model: Any, batch: Tensor) -> tuple[Tensor, bool]:
        return model.fc(batch).mean(), id(model.fc.bias) in chosen

    def work(training: Training) -> None:
        found.append(capture(training, BATCHES[0]).aux[0])

    trainings = [Training.of(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    threads = [threading.Thread(target=work, args=(training,)) for training in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [constant.value for constant in found] == [True, True, True]
    assert id.__self__ is builtins


def test_an_id_that_somebody_kept_while_tracing_is_true_later() -> None:
    model, kept = Owner("parameter"), []

    def loss_fn(model: Owner, batch: Tensor) -> Tensor:
        if not kept:
            kept.append(vars(builtins)["id"])
        return model.fc(batch).mean()

    compile_alone(model, loss_fn, batch=BATCHES[0])
    assert kept[0](model) == id(model)


def test_the_python_of_others_is_as_before_after_tracing() -> None:
    before = id
    compile_alone(Owner("parameter"), lambda model, batch: model.fc(batch).mean(), batch=BATCHES[0])
    assert id is before
    assert "__hash__" not in vars(FakeTensor)
