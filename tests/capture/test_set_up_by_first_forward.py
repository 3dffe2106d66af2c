"""Models that set themselves up by their first forward pass, and modules of torch.jit: refused, with working advice."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from helpers.eager import trains_as_eager
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import CaptureFailed, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit and torch.ao.quantization


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def compiled(model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_fn) -> fxcomp.CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxcomp.compile_step(model, loss, optimizer, batch, compress="dense", checks=fxcomp.Checks(verify=1))


BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]


# Buffers that the first forward pass makes, or makes larger


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)


class Resized(Layer):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.numel() == 0:
            self.grow()
        return self.layer(x) + self.kept

    def grow(self) -> None:
        self.kept.resize_(4).fill_(1.0)


class Exchanged(Resized):
    def grow(self) -> None:
        with torch.no_grad():
            self.kept.set_(torch.ones(4))  # pyright: ignore[reportArgumentType, reportCallIssue]


class Replaced(Resized):
    def grow(self) -> None:
        self.kept = torch.ones(4)


class Converted(Layer):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.dtype is torch.float64:
            self.kept = self.kept.float()
        return self.layer(x) + self.kept


class Registered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.register_buffer("kept", torch.ones(4))
        return self.layer(x) + self.kept


class Centred(Layer):
    kept: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.mean(0)
        return self.layer(x - self.kept)


class Forgotten(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        if hasattr(self, "kept"):
            del self.kept
        return result


class Table(Layer):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.kept):
            self.register_buffer("kept", torch.ones(len(x), 1))
        return self.layer(x) * self.kept[: len(x)]


class Observed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.observer = quantization.PerChannelMinMaxObserver()

    def forward(self, x: Tensor) -> Tensor:
        return self.observer(self.layer(x))


def prepared(config: str, mapped: bool) -> nn.Module:
    """A model prepared for quantization-aware training."""
    layers = (quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), quantization.DeQuantStub())
    model = nn.Sequential(*layers).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mapped:
            from torch.ao.quantization.quantize_fx import prepare_qat_fx

            mapping = quantization.get_default_qat_qconfig_mapping(config)
            return prepare_qat_fx(model, mapping, (BATCHES[0],))
        model.qconfig = quantization.get_default_qat_qconfig(config)  # pyright: ignore[reportArgumentType]
        return quantization.prepare_qat(model)


def prepared_convolution() -> nn.Module:
    parts = (quantization.QuantStub(), nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Flatten())
    model = nn.Sequential(*parts).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.prepare_qat(model)


SET_UP: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resized": (Resized, "puts float32[4] where 'kept' was float32[0]"),
    "set": (Exchanged, "puts float32[4] where 'kept' was float32[0]"),
    "replaced": (Replaced, "puts float32[4] where 'kept' was float32[0]"),
    "converted": (Converted, "puts float32[4] where 'kept' was float64[4]"),
    "registered": (Registered, "puts float32[4] where 'kept' was nothing"),
    "from nothing": (Centred, "puts float32[6] where 'kept' was nothing"),
    "deleted": (Forgotten, "puts nothing where 'kept' was float32[4]"),
    "a longer table": (Table, "puts float32[4, 1] where 'kept' was float32[2, 1]"),
    "observed": (Observed, "puts float32[4] where 'observer.min_val' was float32[0]"),
    "prepare_qat": (lambda: prepared("fbgemm", False), "puts float32[8] where '1.weight_fake_quant.scale' was"),
    "prepare_qat_fx": (lambda: prepared("fbgemm", True), "weight_fake_quant.scale' was float32[1]"),
    "a convolution": (prepared_convolution, "puts float32[3] where '2.weight_fake_quant.scale' was float32[1]"),
}


@pytest.mark.parametrize("name", SET_UP)
def test_a_model_that_sets_itself_up_is_refused_by_name_and_trains_after_one_forward_pass(name: str):
    build, text = SET_UP[name]
    torch.manual_seed(7)
    model = build()
    with pytest.raises(CaptureFailed) as caught:
        compiled(copy.deepcopy(model), BATCHES[0])
    assert text in str(caught.value)
    assert "by one forward pass of the longest batch" in str(caught.value)
    model(BATCHES[0])
    trains_as_eager(model, loss_fn, BATCHES)


def test_a_prepared_model_whose_ranges_are_single_numbers_trains_without_a_first_forward_pass():
    torch.manual_seed(7)
    trains_as_eager(prepared("qnnpack", False), loss_fn, BATCHES)


@pytest.mark.parametrize(
    "build", [lambda: nn.LazyLinear(4), lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())]
)
def test_a_lazy_module_is_refused_by_name_and_trains_after_one_call(build: Callable[[], nn.Module]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build()
    with pytest.raises(Unsupported, match=r"is not initialised.*\n.*Call the model once before compile_step"):
        compiled(model, BATCHES[0])
    model(BATCHES[0])
    trains_as_eager(model, loss_fn, BATCHES)


def test_a_buffer_made_in_inference_mode_is_refused_and_trains_once_it_is_copied():
    model = Layer()
    with torch.inference_mode():
        model.register_buffer("kept", torch.ones(4))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return (model.layer(batch) + model.kept).square().mean()

    with pytest.raises(Unsupported, match=r"buffer 'kept' was made in torch.inference_mode[^\n]*\n.*\.clone\(\)"):
        compiled(model, BATCHES[0], loss)
    model.kept = model.kept.clone()
    trains_as_eager(model, loss, BATCHES)


# Modules of torch.jit


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))


def scripted_class() -> nn.Module:
    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        @torch.jit.script_method
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    return Scripted()


SCRIPTED: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (lambda: torch.jit.script(layers()), "the model is a RecursiveScriptModule of torch.jit"),
    "traced": (lambda: torch.jit.trace(layers(), BATCHES[0]), "the model is a TopLevelTracedModule of torch.jit"),
    "a class": (scripted_class, "the model is a Scripted of torch.jit"),
    "a part": (
        lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.script(layers())),
        "the module '1' is a RecursiveScriptModule of torch.jit",
    ),
    "a traced part": (
        lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.trace(layers(), BATCHES[0])),
        "the module '1' is a TopLevelTracedModule of torch.jit",
    ),
    "a frozen part": (
        lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.freeze(torch.jit.script(layers().eval()))),
        "the module '1' is a RecursiveScriptModule of torch.jit",
    ),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_module_of_torch_jit_is_refused_by_name(name: str):
    build, text = SCRIPTED[name]
    with pytest.raises(Unsupported) as caught:
        compiled(build(), BATCHES[0])
    assert text in str(caught.value)
    assert "without torch.jit.script and torch.jit.trace, and script it after training" in str(caught.value)
    assert "wrap it in DistributedDataParallel and use fxcomp.ddp_hook" in str(caught.value)


def test_the_model_without_torch_jit_trains_and_can_be_scripted_afterwards():
    model = layers()
    trains_as_eager(model, loss_fn, BATCHES)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(BATCHES[0]), model(BATCHES[0]))


def train_with_the_hook() -> list[float]:
    """Train each module of torch.jit with the hook and without; returns the largest differences."""
    found: list[float] = []
    for build, _ in SCRIPTED.values():
        trained: list[list[Tensor]] = []
        for hooked in (False, True):
            torch.manual_seed(7)
            model = build()
            wrapper = DistributedDataParallel(model)
            if hooked:
                wrapper.register_comm_hook(None, fxcomp.ddp_hook(compress="dense"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in BATCHES:
                optimizer.zero_grad()
                loss_fn(wrapper, batch * (1 + torch.distributed.get_rank())).backward()
                optimizer.step()
            trained.append([p.detach().clone() for p in model.parameters()])
        found.append(max((a - b).abs().max().item() for a, b in zip(*trained, strict=True)))
    return found


def test_the_hook_takes_modules_of_torch_jit():
    for found in run_ranks(2, train_with_the_hook):
        assert found == pytest.approx([0.0] * len(SCRIPTED), abs=1e-6)


def frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


TEACHERS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: frozen(torch.jit.script(layers())),
    "traced": lambda: frozen(torch.jit.trace(layers(), BATCHES[0])),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(layers().eval())),
    "a function": lambda: torch.jit.trace(lambda x: x[:, :4].sin(), (BATCHES[0],)),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_loss_may_call_what_torch_jit_made(name: str):
    teacher = TEACHERS[name]()
    trains_as_eager(nn.Linear(6, 4), lambda model, batch: (model(batch) - teacher(batch)).square().mean(), BATCHES)


def test_a_scripted_teacher_that_requires_gradients_is_refused_with_the_advice_to_freeze_it():
    teacher = torch.jit.script(layers())

    def loss(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) - teacher(batch)).square().mean()

    with pytest.raises(CaptureFailed, match="freeze it while the step is compiled and called"):
        compiled(nn.Linear(6, 4), BATCHES[0], loss)
    frozen(teacher)
    trains_as_eager(nn.Linear(6, 4), loss, BATCHES)
