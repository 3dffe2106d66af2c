"""A step is traced as eager PyTorch runs it, where tracing by itself would do otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.eager import sgd, trains_as_eager
from helpers.followed import compile_alone
from helpers.jobs import JOBS, cross_entropy, mlp
from torch import Tensor, nn
from torch.nn import functional

from fxcomp import errors
from fxcomp.capture.fake_mode import StepFakes
from fxcomp.errors import CaptureFailed

linalg: Any = torch.linalg
INF = float("inf")


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def drawn(*shapes: Any) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


class Forward(nn.Module):
    """Modules, and a forward pass over them."""

    def __init__(self, forward: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.inner, self.parts = forward, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*self.parts, *inputs)


# Models, losses and batches


def repeated(layer: nn.Module, x: Tensor) -> Tensor:
    """Use one weight several times under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            x = torch.tanh(layer(x))
    return x.float()


def transposed(first: nn.Module, norm: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return last(norm(first(x).transpose(1, 2)).transpose(1, 2)).float()


def recurrent(lstm: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    return head(lstm(x.unsqueeze(1))[0][:, -1])


class AssignsToData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mean = nn.Parameter(torch.randn(4)), nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean.data * 0.9 + 0.1
        return x * self.weight + self.mean


class PlainConstant(nn.Module):
    """A tensor that is no buffer is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(20, 10), torch.full((10,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


class Experts(nn.Module):
    """Rows sorted by expert, and one product for all groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.grouped_mm(batch[0], self.weight, offs=batch[1])


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


def with_aux(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    out, labels = model(batch["x"]), batch["labels"][0]
    right = (out.argmax(1) == labels).sum()
    return functional.cross_entropy(out, labels), {"logits": out, "right": right, "pair": [out.max(), batch["scale"]]}


def trees() -> list[dict[str, Any]]:
    rows = [JOBS["mlp"].batch(i) for i in range(3)]
    return [{"x": x, "labels": [y], "scale": 2.0, "name": "train", "nothing": None} for x, y in rows]


def rows() -> list[Any]:
    return [JOBS["mlp"].batch(i) for i in range(3)]


def groups(*ends: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 8), torch.tensor(each, dtype=torch.int32)) for each in ends]


class Makes(dict[str, Any]):
    """Makes something new whenever a value is asked for, as tables of activations do."""

    def __iter__(self) -> Any:  # without it, copies do not ask
        return iter(list(super().keys()))

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def items(self) -> Any:
        raise AssertionError("everything would be made")

    values = items


ACTIVATIONS = Makes(prelu=nn.PReLU, relu=nn.ReLU)

Case = Callable[[], tuple[nn.Module, Any, list[Any]]]

CASES: dict[str, Case] = {
    "a weight that autocast casts once": lambda: (Forward(repeated, nn.Linear(16, 16)), square, drawn((8, 16)) * 3),
    "bf16 behind a transposed norm": lambda: (
        Forward(transposed, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), square, drawn((4, 5, 8)),
    ),
    "the data of a buffer": lambda: (AssignsToData(), square, drawn((3, 4)) * 3),
    "a constant": lambda: (PlainConstant(), cross_entropy, rows()),
    "a grouped product": lambda: (Experts(), square, groups([2, 5, 8], [0, 3, 8])),
    "autocast in the loss": lambda: (mlp(), autocast_loss, rows()),
    "a tree and more than a loss": lambda: (mlp(), with_aux, trees()),
    "a table that makes modules": lambda: (
        nn.Linear(8, 4), lambda m, b: ACTIVATIONS["relu"](m(b)).square().mean(), drawn((2, 8), (2, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_computes_as_eager_pytorch(name: str):
    torch.manual_seed(0)
    trains_as_eager(*CASES[name](), verify=1)


def test_a_recurrent_model_trains_as_eager_up_to_rounding():
    """Eager PyTorch runs oneDNN's fused LSTM, a compiled step its plain operators."""
    torch.manual_seed(0)
    model = Forward(recurrent, nn.LSTM(20, 16, batch_first=True), nn.Linear(16, 10))
    trains_as_eager(model, cross_entropy, rows(), sgd, tolerance=1e-5, verify=1)


OF_NOTHING: list[Callable[..., Tensor]] = [
    functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss,
    functional.binary_cross_entropy_with_logits, functional.soft_margin_loss, functional.poisson_nll_loss,
]  # fmt: skip


@pytest.mark.parametrize("loss", OF_NOTHING)
def test_the_mean_of_nothing_trains_as_in_eager(loss: Callable[..., Tensor]):
    torch.manual_seed(0)
    trains_as_eager(nn.Linear(4, 3), lambda m, x: loss(m(x), torch.zeros(x.shape[0], 3)), drawn((0, 4)), sgd)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_a_step_may_be_compiled_with_gradients_off(around: Any):
    model, (batch,) = nn.Linear(4, 4), drawn((3, 4))
    before = model.weight.detach().clone()
    with around():
        step = compile_alone(model, square, batch=batch)
    step(batch)
    assert not torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad])
def test_sparse_gradients_become_dense_and_update_as_in_eager(kind: Any):
    torch.manual_seed(0)
    tables = nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(9, 4, sparse=True)
    model = Forward(lambda words, bags, places: words(places).sum(1) * bags(places), *tables)
    batches = [torch.randint(0, 9, (3, 2)) for _ in range(3)]
    step = trains_as_eager(model, square, batches, lambda m: kind(m.parameters(), lr=0.1), tolerance=1e-5, verify=1)
    assert "'parts.0.weight' is sparse in eager PyTorch (sparse=True) and dense here: 36 elements" in step.notes[0]


# Norms, sums and covariances


def check_rows(of_rows: Callable[[Tensor], Tensor]) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        rows = model(x)
        return of_rows(rows).square().sum() + rows.sum()

    torch.manual_seed(0)
    trains_as_eager(nn.Linear(4, 4), loss, drawn((6, 4), (6, 4)), sgd, verify="never")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("order", [-INF, -2, -1, 0, 0.5, 1, 1.5, 2, 3, 4.0, 5, INF])
def test_norms_of_all_orders(order: float, dim: Any):
    check_rows(lambda rows: linalg.vector_norm(rows, ord=order, dim=dim, keepdim=True))
    check_rows(lambda rows: rows.norm(order, dim))


OF_ROWS: list[Callable[[Tensor], Tensor]] = [
    *(partial(functional.normalize, p=order) for order in (1.0, 3.0, 4.0, INF)),
    lambda rows: torch.cov(rows.T), lambda rows: torch.corrcoef(rows.T), lambda rows: rows.T.cov(correction=0),
    lambda rows: torch.cov(rows.T, fweights=torch.arange(6), aweights=torch.ones(6)),
]  # fmt: skip
WRITES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.pow_(2.0), lambda x: x.pow_(torch.full((4,), 3.0)), lambda x: x.ldexp_(torch.ones(4)),
    lambda x: x.floor_divide_(torch.ones(4)), lambda x: x.float_power_(2), lambda x: x.mul_(2.0).transpose_(0, 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_ROWS)))
def test_norms_and_covariances_of_rows(number: int):
    check_rows(OF_ROWS[number])


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_operators_in_place_of_numbers_and_of_tensors(number: int):
    check_rows(lambda rows: rows + WRITES[number]((rows.detach().abs() + 1).double()).sum().float())


def test_weights_of_a_covariance_may_come_in_the_batch():
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cov(model(batch[0]).T, fweights=batch[1]).square().sum()

    model, x, weights = nn.Linear(4, 4), torch.randn(6, 4), torch.arange(6)
    step = trains_as_eager(model, loss, [(x, weights), (x, weights + 1)], sgd, verify="never")
    with pytest.raises(CaptureFailed, match="fweights cannot be negative"):
        step((x, weights - 3))


def of_singular_vectors(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows = model(batch[0])
    left = linalg.svd(torch.complex(rows, batch[0]), full_matrices=False)[0]
    return (left.abs().square() + batch[1] * left.real).sum() + rows.square().sum()


def test_the_backward_pass_of_a_complex_svd_checks_as_in_eager():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4).double(), torch.randn(6, 4).double()
    good, bad = (x, torch.zeros(6, 4).double()), (x, torch.arange(24.0).view(6, 4).double())
    step = trains_as_eager(model, of_singular_vectors, [good], sgd, verify="never")
    before = copy.deepcopy(list(model.parameters()))
    for raises in (lambda: of_singular_vectors(copy.deepcopy(model), bad).backward(), lambda: step(bad)):
        with pytest.raises(RuntimeError, match="phase"):
            raises()
    assert all(map(torch.equal, model.parameters(), before))


class Weights(nn.Module):
    """Gradients of sums of these are expanded, one element in memory for many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(67, 133))
        self.kernel = nn.Parameter(torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last))
        self.one = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one + self.empty.sum()


def everything(model: Weights, x: Tensor) -> Tensor:
    """Sum whole parameters: each gradient is one number."""
    return sum((p.sum() for p in model.parameters()), model(x).mean()) * 0.7


def by_row(model: Weights, x: Tensor) -> Tensor:
    """Sum along one dimension: each gradient is one row, or one channel."""
    return model(x).mean() + (model.matrix.sum(0) * x[0]).sum() + model.kernel.sum((2, 3)).pow(2).sum()


def by_column(model: Weights, x: Tensor) -> Tensor:
    return (model.matrix.mean(1) * model(x)[:67, 0]).sum() + model.kernel.mean(1, keepdim=True).exp().sum()


@pytest.mark.parametrize("loss", [everything, by_row, by_column])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_norm_over_expanded_gradients_rounds_as_in_eager(loss: Any, max_grad_norm: float | None):
    batches = [torch.randn(67, 133) * (i + 1) for i in range(3)]
    trains_as_eager(Weights(), loss, batches, max_grad_norm=max_grad_norm)


# Draws


class Layers(nn.Module):
    """A stack whose layers are left out by a draw, with dropout after them: a draw too few or too many would show."""

    def __init__(self, skips: Callable[[], Any]):
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Dropout(0.5)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skips():
                x = self.dropout(layer(x))
        return x


NEVER: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.rand([]) < 0.0,
    "number": lambda: torch.rand(1).item() < 0.0,
    "in place": lambda: torch.empty(()).uniform_(0, 1) < 0.0,
    "negated": lambda: not torch.rand([]) >= 0.0,
    "scaled": lambda: torch.rand(1) * 2 - 1 > 1.0,
    "all": lambda: (torch.rand(3) >= 1.0).any(),
    "arithmetic of Python": lambda: torch.rand(1).item() * 2 + 1 > 4.0,
}


def written_later() -> Tensor:
    """A draw that is written to afterwards, through another view of it."""
    draw = torch.rand(2)
    draw.view(-1).sub_(1.0)
    return draw[0] < 0.0


DRAWN: dict[str, Callable[[], Any]] = {
    "a number": lambda: torch.rand(1).item() < 0.1,
    "beside other data": lambda: torch.rand([]) * torch.randn([]) < 0.0,
    "written later": written_later,
}


@pytest.mark.parametrize("name", NEVER)
def test_a_comparison_that_no_draw_can_change_is_decided_and_drawn_for_all_the_same(name: str):
    torch.manual_seed(0)
    trains_as_eager(Layers(NEVER[name]), square, drawn((3, 4), (3, 4)))


@pytest.mark.parametrize("name", DRAWN)
def test_a_comparison_that_a_draw_decides_is_refused(name: str):
    with pytest.raises(CaptureFailed, match="values of tensors"):
        compile_alone(Layers(DRAWN[name]), square, batch=torch.randn(3, 4))


# Operators alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a", "b"), [((8, 16), (3, 16, 5)), ((3, 8, 16), (3, 16, 5)), ((16, 8), (8, 16))])
def test_a_fake_grouped_product_lies_in_memory_as_the_real_one(a: Any, b: Any, dtype: torch.dtype):
    offsets = torch.tensor([2, 5, 8], dtype=torch.int32) if len(a) == 2 else None
    arguments = torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype)
    if len(b) == 3:
        arguments = arguments[0], arguments[1].transpose(1, 2).contiguous().transpose(1, 2)
    real = functional.grouped_mm(*arguments, offs=offsets)
    with StepFakes() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in arguments]
        fake = functional.grouped_mm(*fakes, offs=None if offsets is None else mode.from_tensor(offsets))
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 2, 0), (0, 1, 2), (0, 3, 1, 2), (2, 3, 0, 1), (3, 0, 1, 2)])
@pytest.mark.one_in(3)
def test_batch_norm_lies_as_its_kernel_lays_it_out(order: tuple[int, ...]):
    x = torch.randn(4, 5, 8, 3)[(..., 0) if len(order) == 3 else ...].permute(order)
    weight, mean, var = (make(x.shape[1]) for make in (torch.ones, torch.zeros, torch.ones))

    def strides(*values: Any) -> list[Any]:
        out, *saved = torch.ops.aten.native_batch_norm.default(*values, weight, mean, mean, var, True, 0.1, 1e-5)
        args = weight, mean, var, *saved, True, 1e-5, [True, True, True]
        back = torch.ops.aten.native_batch_norm_backward.default(values[0], values[0], *args)[0]
        return [out.stride(), back.stride()]

    fakes = StepFakes()
    with fakes:
        faked = strides(fakes.from_tensor(x))
    assert faked == strides(x)


SIX = torch.linspace(-1, 1, 18).view(3, 6)
WRITTEN = {"bool": SIX > 0, "long": SIX.mul(9).long(), "float": SIX, "half": SIX.bfloat16(), "complex": SIX + 0j}
OTHERS = {**WRITTEN, "True": True, "2": 2, "2.5": 2.5, "2j": 2j, "of no dimension": torch.tensor(1.5)}


def writes(method: str, written: Tensor, *others: Any) -> bool:
    """Compare a step that writes a copy of a tensor of the batch in place, or what it raises; say if it ran."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = batch[0].clone()
        getattr(value, method)(*batch[1:])
        return (model(SIX) * value.to(torch.complex64).abs().mean()).mean()

    def result(compute: Callable[[Any, Any], Tensor]) -> Tensor | Exception:
        try:
            return compute(model, copy.deepcopy((written, *others))).detach()
        except Exception as error:
            return error

    model = nn.Linear(6, 4)
    theirs = result(loss)
    ours = result(lambda model, batch: compile_alone(model, loss, batch=batch, verify="never")(batch))
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), (method, ours)
        assert torch.allclose(ours, theirs, equal_nan=True), method
    else:
        assert isinstance(ours, Exception), (method, theirs)
        assert isinstance(ours, errors.CaptureFailed) or str(theirs) == str(ours), (method, ours)
    return isinstance(theirs, Tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.one_in(3)
def test_a_result_in_place_goes_into_the_types_that_eager_lets_it_into(name: str):
    ran = [writes(f"{word}_", WRITTEN[name], x) for word in ("add", "sub", "mul", "div") for x in OTHERS.values()]
    assert any(ran)
    assert not all(ran)
    assert writes("logit_", WRITTEN[name]) == (name in ("float", "half"))
