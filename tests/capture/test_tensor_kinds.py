"""Kinds of tensors: those that are captured are part of a batch's type, the others are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fxcomp
from fxcomp import errors

ROWS = torch.linspace(-1, 1, 18).view(3, 6)
WAVES = torch.complex(ROWS, ROWS + 1)


class Marked(Tensor):
    """A harmless subclass, but for who asks."""


class MarkedParameter(nn.Parameter):
    """One of a parameter."""


def compiled(model: nn.Module, batch: Any, loss: Any) -> Any:
    return fxcomp.compile_step(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, checks=fxcomp.Checks(verify="never")
    )


def follows(batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> None:
    """Steps have eager's losses, whatever kind of batch comes after which."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    reference = copy.deepcopy(model)
    step = compiled(model, batches[0], loss)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in batches:
        theirs.zero_grad()
        expected = loss(reference, batch)
        expected.backward()
        theirs.step()
        assert step(batch) == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


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
    follows(*CARRIED[kind])


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(3, 6)


def nested(layout: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=layout)


REFUSED: dict[str, Callable[[], Any]] = {
    r"Marked, a subclass of torch.Tensor.*as_subclass": lambda: ROWS.as_subclass(Marked),
    r"MarkedParameter, a subclass": lambda: MarkedParameter(ROWS.clone()),
    r"NestedTensor, a subclass": lambda: nested(torch.jagged),
    r"MaskedTensor, a subclass": lambda: torch.masked.masked_tensor(ROWS, ROWS > 0),
    r"FakeTensor, a subclass": fake,
    r"is nested.*Pad it": lambda: nested(torch.strided),
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


@pytest.mark.parametrize("name", ["_nnz", "values", "indices", "_values", "_indices"])
def test_the_number_of_a_sparse_tensors_entries_is_not_baked_in(name: str):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return of_sparse(model, x) * torch.as_tensor(getattr(x, name)()).sum()

    with pytest.raises(
        errors.CaptureFailed, match=f"(?s)entries of a sparse tensor with .{name}\\(\\).*test_tensor_kinds"
    ):
        compiled(nn.Linear(6, 4), ROWS.to_sparse().coalesce(), loss)


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


IN_MODELS: dict[str, tuple[Callable[[], nn.Module], type[Exception]]] = {
    r"parameter 'odd' is a .*Marked, a subclass": (
        lambda: Beside(nn.Parameter(ROWS.as_subclass(Marked))),
        errors.Unsupported,
    ),
    r"parameter 'odd' is a .*MarkedParameter, a": (
        lambda: Beside(MarkedParameter(ROWS.clone(), requires_grad=False)),
        errors.Unsupported,
    ),
    r"parameter 'weight' is not initialised.*once before": (lambda: nn.LazyLinear(4), errors.Unsupported),
    r"several elements of the parameter 'odd'.*clone\(\)": (
        lambda: Beside(nn.Parameter(torch.ones(1).expand(4))),
        errors.Unsupported,
    ),
    r"several elements of the parameter 'odd'": (
        lambda: Beside(nn.Parameter(torch.ones(8).as_strided((3, 4), (2, 1)))),
        errors.Unsupported,
    ),
    r"buffer 'odd' is a .*Marked, a subclass": (
        lambda: Beside(ROWS.as_subclass(Marked)),
        errors.Unsupported,
    ),
    r"buffer 'odd' lies in memory as sparse_csr": (lambda: Beside(ROWS.to_sparse_csr()), errors.Unsupported),
    r"buffer 'odd' is sparse": (lambda: Beside(ROWS.to_sparse()), errors.Unsupported),
    r"'1.running_mean' is not initialised": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False)),
        errors.Unsupported,
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("text", IN_MODELS)
def test_kinds_in_a_model_that_are_not_captured_are_refused_by_name(text: str):
    make, error = IN_MODELS[text]
    with pytest.raises(error, match=f"(?s){text}"):
        compiled(make(), ROWS, plainly)


def test_a_buffer_of_a_kind_that_comes_later_is_refused_too():
    model = Beside(ROWS.clone())
    step = compiled(model, ROWS, plainly)
    step(ROWS)
    model.odd = ROWS.as_subclass(Marked)
    with pytest.raises(errors.Unsupported, match="buffer 'odd' is a"):
        step(ROWS)
