"""Kinds of tensors: those that are captured are part of a batch's type, the others are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.eager import sgd, trains_as_eager
from helpers.followed import compile_alone
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fxcomp import errors

ROWS = torch.linspace(-1, 1, 18).view(3, 6)
WAVES = torch.complex(ROWS, ROWS + 1)


class Marked(Tensor):
    """A harmless subclass, but for who asks."""


class MarkedParameter(nn.Parameter):
    """One of a parameter."""


def compiled(model: nn.Module, batch: Any, loss: Any) -> Any:
    return compile_alone(model, loss, batch=batch, verify="never")


def by_class(kind: Any) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, x: model(x).mean() if isinstance(x, kind) else model(x).square().mean()


def of_waves(model: nn.Module, waves: Tensor) -> Tensor:
    return (model(waves.real) * model(waves.imag)).mean()


def of_sparse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to_dense()).square().mean() + torch.sparse.mm(x, model.weight.t()).mean()


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def fewer() -> Tensor:
    return torch.where(ROWS > 0, ROWS, 0).to_sparse()


CARRIED: dict[str, tuple[Sequence[Tensor], Callable[[nn.Module, Any], Tensor]]] = {
    "parameter": ((ROWS, nn.Parameter(ROWS.clone()), ROWS), by_class(nn.Parameter)),
    "buffer": ((nn.Buffer(ROWS.clone()), ROWS), by_class(nn.Buffer)),
    "conjugated": ((WAVES, WAVES.conj(), WAVES), of_waves),
    "negated": ((WAVES.imag, WAVES.conj().imag, WAVES.imag), plainly),
    "coo": ((ROWS.to_sparse(), fewer(), ROWS.to_sparse()), of_sparse),
    "meta": (((ROWS, ROWS.to("meta")),) * 2, lambda model, x: model(x[0]).mean() * x[1].shape[0]),
    "transposed": ((ROWS, ROWS.t().contiguous().t(), ROWS), plainly),
    "expanded": ((ROWS, ROWS[:1].expand(3, 6), ROWS), plainly),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_kinds_that_are_captured_are_told_apart(kind: str):
    torch.manual_seed(0)
    batches, loss = CARRIED[kind]
    trains_as_eager(nn.Linear(6, 4), loss, batches, sgd, verify="never")


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(3, 6)


def nested(layout: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=layout)


REFUSED: dict[str, Callable[[], Any]] = {
    r"Marked, a subclass of torch.Tensor.*as_subclass": lambda: ROWS.as_subclass(Marked),
    r"MarkedParameter, a subclass": lambda: MarkedParameter(ROWS.clone()),
    r"MaskedTensor, a subclass": lambda: torch.masked.masked_tensor(ROWS, ROWS > 0),
    r"FakeTensor, a subclass": fake,
    r"is nested.*Pad it": lambda: nested(torch.strided),
    r"is nested, .*lengths": lambda: nested(torch.jagged),
    r"as sparse_csr, .*to_dense": ROWS.to_sparse_csr,
    r"as sparse_csc, ": ROWS.to_sparse_csc,
    r"as sparse_bsr, ": lambda: ROWS[:2].to_sparse_bsr((2, 2)),
    r"as sparse_bsc, ": lambda: ROWS[:2].to_sparse_bsc((2, 2)),
    r"as mkldnn, ": ROWS.to_mkldnn,
    r"is quantized \(torch.qint8\).*dequantize": lambda: torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
    r"is zero without any memory.*clone": lambda: torch._efficientzerotensor((3, 6)),
    r"view of a sparse tensor.*clone": lambda: ROWS.t().to_sparse().t(),
    r"is not initialised": nn.UninitializedParameter,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", REFUSED)
def test_kinds_that_are_not_captured_are_refused_in_the_first_batch_and_later(text: str):
    model, odd = nn.Linear(6, 4), REFUSED[text]()
    with pytest.raises(errors.Unsupported, match=f"(?s)number 1 of the batch .*{text}"):
        compiled(model, (ROWS, odd), lambda m, b: plainly(m, b[0]))
    step = compiled(model, (ROWS, ROWS), lambda m, b: plainly(m, b[0]))
    with pytest.raises(errors.Unsupported, match=f"(?s){text}"):
        step((ROWS, odd))


class Beside(nn.Module):
    """A layer with a parameter or a buffer of some kind."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        if isinstance(tensor, nn.Parameter):
            self.odd = tensor
        else:
            self.register_buffer("odd", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.odd.shape[0]


IN_MODELS: dict[str, Callable[[], nn.Module]] = {
    r"parameter 'odd' is a .*Marked, a subclass": lambda: Beside(nn.Parameter(ROWS.as_subclass(Marked))),
    r"parameter 'odd' is a .*MarkedParameter, a": lambda: Beside(MarkedParameter(ROWS.clone(), requires_grad=False)),
    r"elements of the parameter 'odd' overlap": lambda: Beside(nn.Parameter(torch.ones(8).as_strided((3, 4), (2, 1)))),
    r"buffer 'odd' is a .*Marked, a subclass": lambda: Beside(ROWS.as_subclass(Marked)),
    r"'1.running_mean' is not initialised": lambda: nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False)),
}
"""tests/helpers/refused_losses.py has more, with what each error advises."""


@pytest.mark.filterwarnings("ignore:Lazy")
@pytest.mark.parametrize("text", IN_MODELS)
def test_kinds_in_a_model_that_are_not_captured_are_refused_by_name(text: str):
    with pytest.raises(errors.Unsupported, match=f"(?s){text}"):
        compiled(IN_MODELS[text](), ROWS, plainly)


def test_a_buffer_of_a_kind_that_comes_later_is_refused_too():
    model = Beside(ROWS.clone())
    step = compiled(model, ROWS, plainly)
    step(ROWS)
    model.odd = ROWS.as_subclass(Marked)
    with pytest.raises(errors.Unsupported, match="buffer 'odd' is a"):
        step(ROWS)


# Tensors of a batch that are one tensor, share memory, or require gradients


def doubles_the_first(model: nn.Module, batch: Any) -> Tensor:
    batch[0].mul_(2)
    return differs(model, batch)


def differs(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def aware(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean() * (2.0 if batch[0].requires_grad else 1.0)


def drawn(seed: int, columns: int = 4) -> Tensor:
    return torch.randn(3, columns, generator=torch.Generator().manual_seed(seed))


def shifted(i: int) -> Any:
    x = drawn(i, 6)
    return (x[:, :4], x[:, 2:])


RELATED: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "sometimes one": (doubles_the_first, lambda i: (x := drawn(i), x if i % 2 else x.clone())),
    "sometimes differentiable": (aware, lambda i: (drawn(i).requires_grad_(i > 2),)),
    "views of one memory": (differs, shifted),
}


@pytest.mark.parametrize("name", RELATED)
def test_what_a_batchs_tensors_are_to_each_other_is_followed(name: str):
    loss, batch_at = RELATED[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    reference = copy.deepcopy(model)
    theirs = sgd(reference)
    step = compile_alone(model, loss, "plain", batch_at(0))
    for i in range(1, 5):
        ours, other = batch_at(i), batch_at(i)
        theirs.zero_grad()
        expected = loss(reference, other)
        expected.backward()
        theirs.step()
        assert step(ours) == expected
        assert torch.equal(ours[0], other[0]), "what the step writes"
    assert torch.equal(model.weight, reference.weight)


@pytest.mark.parametrize(
    ("batch_at", "text"),
    [
        (shifted, r"writes batch\[0\], which shares memory with batch\[1\].*\n.*clone"),
        (lambda i: (drawn(i)[:1].expand(3, 4), drawn(i)), r"writes batch\[0\], whose elements overlap.*\n.*clone"),
    ],
)
def test_writing_into_memory_that_is_shared_is_refused(batch_at: Any, text: str):
    with pytest.raises(errors.CaptureFailed, match=text):
        compiled(nn.Linear(4, 4), batch_at(0), doubles_the_first)
