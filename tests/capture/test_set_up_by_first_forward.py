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
from helpers.followed import compile_alone
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import CaptureFailed, StepChanged, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit and torch.ao.quantization

BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]

Then = Callable[[Any, Tensor, Tensor], Tensor]


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def compiled(model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_fn) -> fxcomp.CompiledStep:
    return compile_alone(model, loss, batch=batch, compress="dense")


class SetsItselfUp(nn.Module):
    """A layer after which something happens that `then` says."""

    def __init__(self, then: Then, **buffers: Tensor | None) -> None:
        super().__init__()
        self.fc, self.then = nn.Linear(6, 4), then
        self.is_ready, self.rows, self.last, self.scale = False, 0, 0.0, [2.0]
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x, self.fc(x))


# Buffers that the first forward pass makes, or makes larger


def unless(is_ready: Callable[[Any], bool], grow: Callable[[Any, Tensor], Any]) -> Then:
    def then(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if not is_ready(model):
            with torch.no_grad():
                grow(model, x)
        return y + model.kept.sum()

    return then


def has_elements(model: Any) -> bool:
    return model.kept.numel() > 0


def forgets(model: Any, _: Tensor, y: Tensor) -> Tensor:
    if hasattr(model, "kept"):
        del model.kept
    return y


def makes_a_longer_table(model: Any, x: Tensor, y: Tensor) -> Tensor:
    if len(x) > len(model.kept):
        model.register_buffer("kept", torch.ones(len(x), 1))
    return y * model.kept[: len(x)]


def quiet(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def prepared(*layers: nn.Module, config: str = "fbgemm") -> nn.Module:
    """A model prepared for quantization-aware training."""
    layers = layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), quantization.DeQuantStub())
    model: Any = nn.Sequential(quantization.QuantStub(), *layers).train()
    model.qconfig = quantization.get_default_qat_qconfig(config)
    return quiet(lambda: quantization.prepare_qat(model))


def prepared_by_fx() -> nn.Module:
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
    return quiet(lambda: prepare_qat_fx(nn.Sequential(nn.Linear(6, 8), nn.ReLU()).train(), mapping, (BATCHES[0],)))


ONES = {"grow": lambda model, _: setattr(model, "kept", torch.ones(4))}

SET_UP: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resized": (
        lambda: SetsItselfUp(unless(has_elements, lambda m, _: m.kept.resize_(4).fill_(1.0)), kept=torch.empty(0)),
        "puts float32[4] where 'kept' was float32[0]",
    ),
    "set": (
        lambda: SetsItselfUp(unless(has_elements, lambda m, _: m.kept.set_(torch.ones(4))), kept=torch.empty(0)),
        "puts float32[4] where 'kept' was float32[0]",
    ),
    "replaced": (
        lambda: SetsItselfUp(unless(has_elements, **ONES), kept=torch.empty(0)),
        "puts float32[4] where 'kept' was float32[0]",
    ),
    "converted": (
        lambda: SetsItselfUp(unless(lambda m: m.kept.dtype is torch.float32, **ONES), kept=torch.ones(4).double()),
        "puts float32[4] where 'kept' was float64[4]",
    ),
    "registered": (
        lambda: SetsItselfUp(
            unless(lambda m: hasattr(m, "kept"), lambda m, _: m.register_buffer("kept", torch.ones(4)))
        ),
        "puts float32[4] where 'kept' was nothing",
    ),
    "from nothing": (
        lambda: SetsItselfUp(
            unless(lambda m: m.kept is not None, lambda m, x: setattr(m, "kept", x.mean(0))), kept=None
        ),
        "puts float32[6] where 'kept' was nothing",
    ),
    "deleted": (lambda: SetsItselfUp(forgets, kept=torch.ones(4)), "puts nothing where 'kept' was float32[4]"),
    "a longer table": (
        lambda: SetsItselfUp(makes_a_longer_table, kept=torch.ones(2, 1)),
        "puts float32[4, 1] where 'kept' was float32[2, 1]",
    ),
    "observed": (
        lambda: nn.Sequential(nn.Linear(6, 4), quantization.PerChannelMinMaxObserver()),
        "puts float32[4] where '1.min_val' was float32[0]",
    ),
    "prepare_qat": (prepared, "puts float32[8] where '1.weight_fake_quant.scale' was"),
    "prepare_qat_fx": (prepared_by_fx, "weight_fake_quant.scale' was float32[1]"),
    "a convolution": (
        lambda: prepared(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Flatten()),
        "puts float32[3] where '2.weight_fake_quant.scale' was float32[1]",
    ),
}


@pytest.mark.parametrize("name", SET_UP)
@pytest.mark.one_in(3)
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
    trains_as_eager(prepared(config="qnnpack"), loss_fn, BATCHES)


def test_a_buffer_made_in_inference_mode_is_refused_and_trains_once_it_is_copied():
    with torch.inference_mode():
        kept = torch.ones(4)
    model: Any = SetsItselfUp(lambda model, _, y: y + model.kept, kept=kept)
    with pytest.raises(Unsupported, match=r"buffer 'kept' was made in torch.inference_mode[^\n]*\n.*\.clone\(\)"):
        compiled(model, BATCHES[0])
    model.kept = model.kept.clone()
    trains_as_eager(model, loss_fn, BATCHES)


# Attributes that the first call sets


def initialises_from_data(model: Any, _: Tensor, y: Tensor) -> Tensor:
    if not model.is_ready:
        model.mean.copy_(y.detach().mean(0))
        model.is_ready = True
    return y - model.mean


def scales_the_first(model: Any, _: Tensor, y: Tensor) -> Tensor:
    scaled = y * (1.0 if model.is_ready else 2.0)
    model.is_ready = True
    return scaled


def scales_other_sizes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scaled = y * (2.0 if len(x) != model.rows else 1.0)
    model.rows = len(x)
    return scaled


def scales_by_the_batch_before(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scaled = y * (1.0 + model.last)
    model.last = float(x.max())
    return scaled


def takes_a_constant_once(model: Any, _: Tensor, y: Tensor) -> Tensor:
    scaled = y * torch.tensor(model.scale)
    model.scale = [3.0]
    return scaled


@pytest.mark.parametrize(
    "then",
    [initialises_from_data, scales_the_first, scales_other_sizes, scales_by_the_batch_before, takes_a_constant_once],
)
def test_a_first_call_that_computes_otherwise_is_refused(then: Then):
    with pytest.raises(StepChanged, match=r"(?s)first call, which computes something else.*model\..* changed from"):
        compiled(SetsItselfUp(then, mean=torch.zeros(4)), BATCHES[0])


def test_a_model_that_was_called_once_is_captured():
    model: Any = SetsItselfUp(initialises_from_data, mean=torch.zeros(4))
    model(BATCHES[0])
    assert model.mean.abs().sum() > 0
    trains_as_eager(model, loss_fn, BATCHES)


def test_a_first_call_that_computes_the_same_is_captured_and_a_later_one_that_does_not_is_refused():
    model: Any = SetsItselfUp(lambda model, x, y: setattr(model, "rows", len(x)) or y)
    compiled(model, BATCHES[0])
    assert model.rows == 4
    model = SetsItselfUp(scales_other_sizes)
    model.rows = 4
    step = compiled(model, BATCHES[0])
    step(BATCHES[0])
    with pytest.raises(StepChanged, match="first call, which computes something else"):
        step(BATCHES[0][:3])


# Modules of torch.jit


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))


SCRIPTED: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (lambda: torch.jit.script(layers()), "the model is a RecursiveScriptModule of torch.jit"),
    "traced": (lambda: torch.jit.trace(layers(), BATCHES[0]), "the model is a TopLevelTracedModule of torch.jit"),
    "a part": (
        lambda: nn.Sequential(nn.Linear(6, 6), torch.jit.script(layers())),
        "the module '1' is a RecursiveScriptModule of torch.jit",
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
