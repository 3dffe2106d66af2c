"""Refusals of models, batches and loss functions, and what their advice makes of each."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxcomp
from helpers.advised import Row, assert_trains, rows, sgd, small
from helpers.followed import compile_alone
from helpers.jobs import cross_entropy

BATCH_TYPE, FAITHFUL, TRACED = "capture/batch_type.py", "capture/faithful.py", "capture/forward_backward.py"


# Models


class WithBuffer(nn.Module):
    """Scales its output by a buffer's mean."""

    def __init__(self, buffer: Tensor):
        super().__init__()
        self.body = small()
        self.register_buffer("kept", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (1 + self.kept.to_dense().mean() if self.kept.is_sparse else self.kept.mean())


class Writes(WithBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:4] = x.detach().mean()
        return super().forward(x)


class Shares(Writes):
    def __init__(self, tail: Any):
        super().__init__(torch.zeros(8))
        self.register_buffer("tail", tail(self.kept))


class Replaces(WithBuffer):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept.shape[0] < len(x):
            self.kept = torch.ones(len(x))
        return super().forward(x)


class Casts(WithBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept.double() + x.detach().mean()
        return super().forward(x)


class Keeps(WithBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = (self.kept.double() + x.detach().mean()).float()
        return super().forward(x)


def lazy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.Linear(12, 10))


def called(model: nn.Module) -> nn.Module:
    model(rows()[0])
    return model


def expanded(parameter: Any) -> nn.Module:
    model = small()
    model[2].bias = nn.Parameter(parameter(torch.zeros(1).expand(10)))
    return model


def csr() -> Tensor:
    return torch.eye(4).to_sparse_csr()


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


class Sub(Tensor):
    pass


def scaled(model: nn.Module, batch: Any) -> Tensor:
    """A loss with a third thing in its batch."""
    return cross_entropy(model, (batch[0] * (1 + batch[2].to_dense().float().mean()), batch[1]))


def numbered(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch[:2]) * (float(batch[2].sum()) if isinstance(batch[2], Tensor) else batch[2])


def with_third(value: Any, loss: Any = scaled) -> Any:
    return lambda: compile_alone(small(), loss, batch=(*rows(), value() if callable(value) else value))


def trains_with_third(value: Any, loss: Any = scaled) -> Any:
    def follow() -> None:
        third = value() if callable(value) else value
        assert_trains(small(), loss=loss, batches=[(*rows(n), third) for n in range(2)])

    return follow


def hooked() -> nn.Module:
    model = small()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def unhooked() -> None:
    model = hooked()
    hook = model[0].weight.register_hook(lambda gradient: gradient)
    hook.remove()
    model[0].weight._backward_hooks.clear()
    assert_trains(model, small())


def two_devices() -> nn.Module:
    model = small()
    model[2].to("meta")
    return model


def moved() -> None:
    model = small()
    model[2].to(torch.float32)
    assert_trains(model.to("cpu"))


def half_with_scaler() -> Any:
    scaler = torch.amp.GradScaler("cpu")
    return compile_alone(small().half(), scaler=scaler, batch=(rows()[0].half(), rows()[1]))


def float_with_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    step = compile_alone(small(), scaler=scaler)
    before = step(rows())
    scaler.update()
    assert step(rows()) < before


def not_updated() -> Any:
    step = compile_alone(small(), scaler=torch.amp.GradScaler("cpu"))
    step(rows())
    return step(rows())


MODELS = {
    "a lazy layer": Row(
        "is not initialised",
        lambda: compile_alone(lazy()),
        lambda: assert_trains(called(lazy())),
        at=f"{BATCH_TYPE}::check_model",
    ),
    "an expanded parameter": Row(
        "elements of the parameter",
        lambda: compile_alone(expanded(lambda value: value)),
        lambda: assert_trains(expanded(torch.clone)),
    ),
    "a sparse buffer": Row(
        "Keep it dense",
        lambda: compile_alone(WithBuffer(torch.eye(4).to_sparse())),
        lambda: assert_trains(WithBuffer(torch.eye(4))),
        at=f"{BATCH_TYPE}::check_model",
    ),
    "a CSR buffer": Row(
        "Pass its .to_dense(), or a COO tensor",
        lambda: compile_alone(WithBuffer(csr())),
        lambda: assert_trains(WithBuffer(csr().to_dense())),
        at=f"{BATCH_TYPE}::check_model",
    ),
    "a quantized buffer": Row(
        "Pass its .dequantize()",
        lambda: compile_alone(WithBuffer(quantized())),
        lambda: assert_trains(WithBuffer(quantized().dequantize())),
        at=f"{BATCH_TYPE}::check_model",
    ),
    "a written buffer that is expanded": Row(
        "whose elements overlap in memory",
        lambda: compile_alone(Writes(torch.zeros(2, 1).expand(2, 4)[0])),
        lambda: assert_trains(Writes(torch.zeros(2, 1).expand(2, 4)[0].clone())),
    ),
    "a written buffer that shares memory": Row(
        "a captured step would not see",
        lambda: compile_alone(Shares(lambda kept: kept[2:])),
        lambda: assert_trains(Shares(lambda kept: kept[2:].clone())),
    ),
    "a buffer that grows": Row(
        "by one forward pass of the longest batch",
        lambda: compile_alone(Replaces(torch.ones(1))),
        lambda: assert_trains(called(Replaces(torch.ones(1)))),
        at=f"{TRACED}::_write_back",
    ),
    "a buffer of another type": Row(
        "Keep a buffer's shape and dtype",
        lambda: compile_alone(Casts(torch.ones(1))),
        lambda: assert_trains(Keeps(torch.ones(1))),
        at=f"{TRACED}::_write_back",
    ),
    "a gradient hook": Row(
        "Remove it, or do its work in the loss",
        lambda: compile_alone(hooked()),
        unhooked,
        at="capture/training.py::_check_parameter",
    ),
    "two devices": Row(
        "Move it to one with model.to(device)",
        lambda: compile_alone(two_devices()),
        moved,
        at="capture/training.py::_check_devices",
    ),
    "a wrapped model": Row(
        "Give compile_step the plain model",
        lambda: compile_alone(nn.DataParallel(small())),
        lambda: assert_trains(nn.DataParallel(small()).module),
    ),
    "no model": Row(
        "which is no torch.nn.Module",
        lambda: fxcomp.compile_step(small, cross_entropy, torch.optim.SGD(small().parameters()), rows()),
        lambda: assert_trains(small()),
    ),
    "fp16 parameters with a scaler": Row("Keep parameters in float32", half_with_scaler, float_with_scaler),
    "a scaler that is not updated": Row("Call scaler.update() once after", not_updated, float_with_scaler),
    "all parameters frozen": Row(
        "updates no trainable parameter",
        lambda: compile_alone(small().requires_grad_(False)),
        lambda: assert_trains(small().requires_grad_(False).requires_grad_(True)),
    ),
}


# Batches

RAGGED = [torch.ones(3), torch.ones(2)]

BATCHES = {
    "a nested tensor": Row(
        "Pad it, and pass the lengths as well",
        with_third(lambda: torch.nested.nested_tensor(RAGGED)),
        trains_with_third(nn.utils.rnn.pad_sequence(RAGGED)),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "a quantized tensor": Row(
        "Pass its .dequantize()",
        with_third(quantized),
        trains_with_third(lambda: quantized().dequantize()),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "a CSR tensor": Row(
        "Pass its .to_dense(), or a COO tensor",
        with_third(csr),
        trains_with_third(lambda: csr().to_dense()),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "a view of a sparse tensor": Row(
        "Pass its .clone()",
        with_third(torch.eye(4).to_sparse().t()),
        trains_with_third(torch.eye(4).to_sparse().t().clone()),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "a subclass": Row(
        "as_subclass(torch.Tensor)",
        with_third(torch.ones(4).as_subclass(Sub)),
        trains_with_third(torch.ones(4).as_subclass(Sub).as_subclass(Tensor)),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "a number of NumPy": Row(
        "call its .item()",
        with_third(np.float64(0.5), numbered),
        trains_with_third(np.float64(0.5).item(), numbered),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "an array of NumPy": Row(
        "pass torch.as_tensor of it",
        with_third(np.ones(3), numbered),
        trains_with_third(torch.as_tensor(np.ones(3)), numbered),
        at=f"{BATCH_TYPE}::_leaf_type",
    ),
    "an object": Row("it may hold tensors, numbers, strings and None", with_third(object(), numbered)),
}


# Loss functions


def losses(wrong: Any, right: Any, batches: Any = None, model: Any = small, **options: Any) -> tuple[Any, Any]:
    """Compile one loss, and train by another one."""
    batch = rows() if batches is None else batches[0]
    return (
        lambda: compile_alone(model(), wrong, batch=batch),
        lambda: assert_trains(model(), loss=right, batches=batches, **options),
    )


def out_of(model: Any, batch: Any) -> Tensor:
    return model(batch[0])


def by_size(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    picked = out[out > 0]
    return picked.sum() if len(picked) > 3 else out.mean()


def masked(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    is_picked = out > 0
    return torch.where(is_picked.sum() > 3, torch.where(is_picked, out, 0.0).sum(), out.mean())


def by_value(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    return out.sum() if out.sum() > 0 else out.square().mean()


def selected(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    return torch.where(out.sum() > 0, out.sum(), out.square().mean())


def logs(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss if loss.item() > 1e9 else loss + 0


def returns_it(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(model, batch)
    return loss, loss.detach()


def distribution(checks: bool) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        made: Any = torch.distributions.Normal(out_of(model, batch), 1.0, validate_args=checks)
        return -made.log_prob(torch.zeros(())).mean()

    return loss


def drops(probability: float) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        out = out_of(model, batch)
        return out.square().mean() if torch.rand([]) < probability else nn.functional.cross_entropy(out, batch[1])

    return loss


def solved(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    return torch.linalg.lstsq(out[:, :2], out[:, 2:3]).solution.square().sum()


def pseudo(model: Any, batch: Any) -> Tensor:
    out = out_of(model, batch)
    return (torch.linalg.pinv(out[:, :2]) @ out[:, 2:3]).square().sum()


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.register_buffer("queue", torch.zeros(6, 10))


def enqueues(queue: Any) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        out = model.body(batch[0])
        held = queue if isinstance(queue, Tensor) else model.queue
        with torch.no_grad():
            held.copy_(torch.cat([held[4:], out.detach()]))
        return (out @ held.detach().T).mean()

    return loss


def turns(in_place: bool) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        held = torch.ones(10, 3)
        return loss_of(model, batch, held)

    outside = torch.ones(10, 3)

    def loss_of(model: Any, batch: Any, _: Tensor) -> Tensor:
        return (out_of(model, batch) @ (outside.t_().t_() if in_place else outside.t().t())).mean()

    return loss


def copied(copy_: Any) -> Any:
    return lambda model, batch: (
        (out_of(model, batch) - copy_(out_of(model, batch).detach())).square().mean() + (cross_entropy(model, batch))
    )


def pickled(value: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(value))


def put_together(function: Any) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        out = out_of(model, batch)
        return cross_entropy(model, batch) * function([out.detach().mean(), out.detach().max()]).sum()

    return loss


def by_numpy(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * float(np.tanh(batch[0].numpy()).mean() + 2)


def by_torch(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * (torch.tanh(batch[0]).mean() + 2)


def by_number(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch[:2]) * batch[2]


SPARSE = torch.eye(4).to_sparse()


def entries(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch[:2]) * batch[2].coalesce().values().sum()


def bilinear(outside: bool) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = out_of(model, batch)
            if outside:
                with torch.autocast("cpu", enabled=False):
                    return torch.bilinear(out.float(), out.float(), torch.ones(1, 10, 10), None).square().mean()
            return torch.bilinear(out, out, torch.ones(1, 10, 10), None).square().mean()

    return loss


def assigns(model: Any, batch: Any) -> Tensor:
    model[0].weight.data = model[0].weight.data * 0.9
    return cross_entropy(model, batch)


def copies(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight * 0.9)
    return cross_entropy(model, batch)


def reads_grad(model: Any, batch: Any) -> Tensor:
    norm = 0.0 if model[0].weight.grad is None else model[0].weight.grad.norm()
    return cross_entropy(model, batch) + 0 * norm


def penalty(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss + torch.autograd.grad(loss, model[0].weight, create_graph=True)[0].norm()


def prints(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    assert str(loss)
    return loss


def names_number(model: Any, batch: Any) -> Tensor:
    text = f"{batch[2]}"
    return cross_entropy(model, batch[:2]) * (2 if text.startswith("tensor") else 3)


def reads_subclass(outside: Tensor) -> Any:
    return lambda model, batch: cross_entropy(model, batch) * outside.item()


def twice(lists: Any) -> Any:
    counts = torch.ones(3)

    def loss(model: Any, batch: Any) -> Tensor:
        lists(counts)
        return cross_entropy(model, batch) + 0 * counts.sum()

    return loss


def add_once_each(counts: Tensor) -> None:
    torch._foreach_add_([counts], 1)
    torch._foreach_add_([counts], 1)


def backs(model: Any, batch: Any) -> Tensor:
    model(batch[0]).square().mean().backward()
    return cross_entropy(model, batch)


def sums(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) + model(batch[0]).square().mean()


class Wrapped:
    def __init__(self, loss: Tensor):
        self.loss = loss


def kept_parameter(is_model: bool) -> tuple[Any, Any]:
    model = small()
    kept = model[0].weight

    def loss(given: Any, batch: Any) -> Tensor:
        return cross_entropy(given, batch) + (given[0].weight if is_model else kept).square().sum()

    return model, loss


def reads_parameter() -> Any:
    model, loss = kept_parameter(False)
    return compile_alone(model, loss)


def through_model() -> None:
    model, loss = kept_parameter(True)
    assert_trains(model, loss=loss)


def checkpointed(model: Any, batch: Any, **options: Any) -> Tensor:
    dropped = checkpoint(lambda x: nn.functional.dropout(model[0](x)), batch[0], use_reentrant=False, **options)
    return nn.functional.cross_entropy(model[2](dropped.tanh()), batch[1])


def makes_generator(model: Any, batch: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return cross_entropy(model, batch) * torch.rand([], generator=generator)


def seeds_default(model: Any, batch: Any) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return cross_entropy(model, batch) * torch.rand([])


def in_python(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * random.random()


class Stores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.body[0](x)
        return self.body[2](self.hidden.tanh())


class StoresInBuffer(Stores):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body[0](x)
        self.hidden = hidden.detach()
        return self.body[2](hidden.tanh())


def marked(name: str) -> nn.Module:
    model = small()
    setattr(model[0].weight, name, "mine")
    return model


def nan_check(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    value = loss.item()
    return loss * 2 if value != value else loss


def weighted(counts: Any) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        each = nn.functional.cross_entropy(out_of(model, batch), batch[1], reduction="none")
        return fxcomp.WeightedLoss(each.sum(), counts(each))

    return loss


def trains_weighted(counts: Any) -> Any:
    def follow() -> None:
        model, reference = small(), small()
        optimizer, eager = sgd(model), sgd(reference)
        step = compile_alone(model, weighted(counts), optimizer)
        for number in range(3):
            step(rows(number))
            eager.zero_grad()
            cross_entropy(reference, rows(number)).backward()
            eager.step()
        assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))

    return follow


class Box:
    """Holds one thing; in a long chain of them nothing is looked for."""

    def __init__(self, held: Any):
        self.held = held


def cached(is_filled: bool) -> Any:
    box: Any = Box(torch.ones(()) if is_filled else None)
    last = box
    for _ in range(20):
        box = Box(box)

    def loss(model: Any, batch: Any) -> Tensor:
        inner = box
        while isinstance(inner.held, Box):
            inner = inner.held
        if inner.held is None:
            inner.held = batch[0].detach().mean() * 0 + 1
        return cross_entropy(model, batch) * inner.held

    assert last.held is None or is_filled
    return loss


def compiled_twice() -> Any:
    loss = cached(False)
    compile_alone(small(), loss)
    return compile_alone(small(), loss)


def gathers(sparse: bool) -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        rows_of = torch.zeros(1, 20, dtype=torch.long)
        picked = torch.gather(model[0].weight, 0, rows_of, sparse_grad=sparse)
        return picked.square().mean() + model[2](batch[0][:, :12]).square().mean()

    return loss


def lists(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * len([x for x in model[0].weight.tolist()[0] if x is not None])


def unused_mask(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(out_of(model, batch), batch[1], reduction="none")


LOSSES = {
    "a size that decides": Row("mask with torch.where", *losses(by_size, masked), at=f"{FAITHFUL}::explaining"),
    "a value that decides": Row("select with torch.where", *losses(by_value, selected), at=f"{FAITHFUL}::explaining"),
    "a number for a log": Row(
        "return the tensor with the loss", *losses(logs, returns_it), at=f"{FAITHFUL}::explaining"
    ),
    "a distribution's check": Row(
        "validate_args=False", *losses(distribution(True), distribution(False)), at=f"{FAITHFUL}::explaining"
    ),
    "layer drop": Row("Set the probability to 0", *losses(drops(0.5), drops(0.0)), at=f"{FAITHFUL}::explaining"),
    "an operator whose sizes are values": Row(
        "linalg.pinv(a) @ b", *losses(solved, pseudo), at=f"{FAITHFUL}::explaining"
    ),
    "a queue that requires a gradient": Row(
        "Register that tensor as a buffer of the model",
        *losses(enqueues(torch.zeros(6, 10, requires_grad=True)), enqueues(None), model=Queue),
    ),
    "a shape that changes outside": Row("as .t() and .unsqueeze() make them", *losses(turns(True), turns(False))),
    "a copy by pickle": Row(
        "Copy with .clone()",
        *losses(copied(pickled), copied(torch.clone)),
        at=f"{FAITHFUL}::_Refusing.__torch_function__",
    ),
    "a tensor of tensors": Row(
        "put tensors together with torch.stack",
        *losses(put_together(torch.tensor), put_together(torch.stack)),
        at=f"{FAITHFUL}::explaining",
    ),
    "an address": Row(
        "do it outside of loss_fn",
        losses(lambda m, b: cross_entropy(m, b) * (1 + 0 * b[0].data_ptr()), None)[0],
        trains_with_third(rows()[0].data_ptr() * 0 + 2, numbered),
        at=f"{FAITHFUL}::explaining",
    ),
    "values by NumPy": Row("Compute with torch instead", *losses(by_numpy, by_torch)),
    "entries of a sparse tensor": Row(
        "Pass clones of indices and values in the batch",
        lambda: compile_alone(small(), entries, batch=(*rows(), SPARSE)),
        trains_with_third(SPARSE.coalesce().values().clone(), lambda m, b: cross_entropy(m, b[:2]) * b[2].sum()),
    ),
    "bilinear under autocast": Row("torch.autocast(..., enabled=False)", *losses(bilinear(False), bilinear(True))),
    "an assignment to data": Row("tensor.copy_(value)", *losses(assigns, copies)),
    "a gradient that is read": Row("with torch.autograd.grad", *losses(reads_grad, penalty)),
    "a text of a tensor": Row("return the tensor with the loss", *losses(prints, returns_it)),
    "a text of the batch": Row(
        "The text of a number read from the batch (.item())",
        with_third(torch.ones(2), names_number),
        trains_with_third(
            torch.ones(()), lambda m, b: cross_entropy(m, b[:2]) * (2 if f"{b[2].item()}" == "1.0" else 3)
        ),
    ),
    "values of a subclass": Row(
        ".as_subclass(torch.Tensor)",
        *losses(
            reads_subclass(torch.ones(()).as_subclass(Sub)),
            reads_subclass(torch.ones(()).as_subclass(Sub).as_subclass(Tensor)),
        ),
    ),
    "one tensor twice": Row(
        "call the operator once for each",
        *losses(twice(lambda c: torch._foreach_add_([c, c], 1)), twice(add_once_each)),
    ),
    "a backward pass inside": Row(
        "Return the sum of all losses", *losses(backs, sums), at=f"{TRACED}::_check_no_backward"
    ),
    "a number for a loss": Row(
        "Leave out .item(): return loss", *losses(lambda m, b: cross_entropy(m, b).item(), cross_entropy)
    ),
    "an output object": Row(
        "model(**batch).loss",
        *losses(lambda m, b: Wrapped(cross_entropy(m, b)), lambda m, b: Wrapped(cross_entropy(m, b)).loss),
    ),
    "losses of rows": Row("for example with .mean()", *losses(unused_mask, lambda m, b: unused_mask(m, b).mean())),
    "a loss of the batch alone": Row(
        "does not depend on any trainable parameter", losses(lambda _, b: b[0].sum(), None)[0]
    ),
    "an object beside the loss": Row(
        "Return tensors, numbers, strings and None",
        *losses(lambda m, b: (cross_entropy(m, b), np.float64(1)), lambda m, b: (cross_entropy(m, b), 1.0)),
    ),
    "a parameter past the model": Row("through the attributes of the model", reads_parameter, through_model),
    "other masks": Row(
        "preserve_rng_state", *losses(lambda m, b: checkpointed(m, b, preserve_rng_state=False), checkpointed)
    ),
    "a tensor in a cache": Row(
        "that it kept from an earlier trace", compiled_twice, lambda: assert_trains(small(), loss=cached(True))
    ),
    "a sparse gradient": Row("Build the layer with sparse=False", *losses(gathers(True), gathers(False))),
    "a long list": Row(
        "which takes minutes to trace", *losses(lists, lambda m, b: cross_entropy(m, b) * m[0].weight.shape[1])
    ),
    "a generator of the step's": Row("torch.random.fork_rng()", *losses(makes_generator, seeds_default)),
    "a draw of Python's": Row(
        "Draw outside and pass the numbers in the batch",
        losses(in_python, None)[0],
        trains_with_third(random.Random(1).random(), by_number),
    ),
    "a tensor that is kept": Row(
        "Register it as a buffer", lambda: compile_alone(Stores()), lambda: assert_trains(StoresInBuffer())
    ),
    "a name of tracing's": Row(
        "Give the attribute another name",
        lambda: compile_alone(marked("fake_mode")),
        lambda: assert_trains(marked("my_mode")),
    ),
    "a number that may be nan": Row("return the number with the loss", *losses(nan_check, returns_it)),
    "counts of rows": Row(
        "Sum it up in loss_fn",
        lambda: compile_alone(small(), weighted(torch.ones_like)),
        trains_weighted(lambda each: torch.ones_like(each).sum()),
    ),
    "no count": Row(
        "a tensor of one element or a number",
        lambda: compile_alone(small(), weighted(lambda _: None)),
        trains_weighted(lambda each: len(each)),
    ),
    "no function": Row(
        "is called with the model and a batch", lambda: compile_alone(small(), "loss"), lambda: assert_trains(small())
    ),
}
