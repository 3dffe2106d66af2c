"""Public scripts that are refused train after their error's advice is followed, or train as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.followed import BATCH, compile_alone
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_sequence

import fxcomp
from fxcomp import errors

Build = Callable[[], nn.Module]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_trains(
    model: nn.Module, reference: nn.Module, loss: Any = cross_entropy, eager_loss: Any = None, batches: Any = None
) -> None:
    """Train one model compiled, another one eagerly, by the same batches, and compare the bits."""
    batches = batches or [JOBS["mlp"].batch(i) for i in range(3)]
    optimizer, eager = sgd(model), sgd(reference)
    step = compile_alone(model, loss, optimizer, batches[0])
    for batch in batches:
        returned = step(batch)
        eager.zero_grad()
        expected = (eager_loss or loss)(reference, batch)
        expected.backward()
        eager.step()
        assert torch.equal(returned, expected)
    assert_alike(model, reference)


def assert_alike(model: nn.Module, reference: nn.Module) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


# What torch.compile has made


def whole() -> nn.Module:
    return torch.compile(small(), backend="aot_eager")


def inside() -> nn.Module:
    model = small()
    model[0] = torch.compile(model[0], backend="aot_eager")
    return model


def in_place() -> nn.Module:
    model = small()
    model.compile(backend="aot_eager")
    return model


def twice() -> nn.Module:
    return torch.compile(inside(), backend="aot_eager")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("build", [whole, inside, in_place, twice])
def test_a_compiled_model_trains_as_the_model_inside(build: Build):
    assert_trains(build(), small())


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_keeps_its_names_and_the_plan_has_those_of_the_model_inside():
    model = torch.compile(small(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    step = compile_alone(model, optimizer=optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(BATCH)
    assert list(before) == ["_orig_mod.0.weight", "_orig_mod.0.bias", "_orig_mod.2.weight", "_orig_mod.2.bias"]
    assert not torch.equal(before["_orig_mod.0.weight"], model.state_dict()["_orig_mod.0.weight"])
    assert [owner.name for owner in step.training.owned] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model.load_state_dict(before)
    assert step(BATCH) == cross_entropy(small(), BATCH)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_functions_in_a_loss_are_traced_and_a_compiled_loss_is():
    model, reference = small(), small()
    compiled = torch.compile(model, backend="aot_eager")
    soft = torch.compile(lambda x: x.tanh(), backend="aot_eager")
    assert_trains(model, reference, lambda _, batch: cross_entropy(lambda x: soft(compiled(x)), batch), _softly)
    assert_trains(small(), small(), torch.compile(cross_entropy, backend="aot_eager"), cross_entropy)


def _softly(model: Any, batch: Any) -> Tensor:
    return cross_entropy(lambda x: model(x).tanh(), batch)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_is_not_compiled_to_verify_a_step():
    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        raise AssertionError(gm)

    model = small()
    model[0] = torch.compile(model[0], backend=backend)
    step = compile_alone(model)
    assert torch.equal(step(BATCH), cross_entropy(small(), BATCH))


# Parameters outside of the model


class Scale(nn.Module):
    """A criterion with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(10, 10)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(out), target)


def test_a_criterion_with_parameters_trains_in_one_module_with_the_model():
    model, criterion = small(), Scale()

    def outside(model: Any, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    both = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(errors.Unsupported, match=r"nn.ModuleList\(\[model, criterion\]\): loss_fn is called"):
        compile_alone(model, outside, both)
    with pytest.raises(
        errors.CaptureFailed, match=r"(?s)shape \[10, 10\] .* nn.ModuleList\(\[model, criterion\]\): loss"
    ):
        compile_alone(model, outside)

    def loss(models: Any, batch: Any) -> Tensor:
        return models[1](models[0](batch[0]), batch[1])

    together = nn.ModuleList([model, criterion])
    assert_trains(together, copy.deepcopy(together), loss)
    together = nn.ModuleList([model, criterion])
    assert_trains(together, copy.deepcopy(together), lambda _, batch: outside(model, batch), loss)


class Adapter(nn.Module):
    """A low-rank network that changes what a frozen layer gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.down, self.up = nn.Linear(20, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def test_an_adapter_network_trains_as_the_model_or_with_it():
    base, network = nn.Linear(20, 10).requires_grad_(False), Adapter()

    def loss(network: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(base(batch[0]) + network(batch[0]), batch[1])

    with pytest.raises(errors.Unsupported, match=r"number 0 of parameter group 0.*\n.*an adapter outside"):
        compile_alone(base, lambda _, batch: loss(network, batch), sgd(network))
    assert_trains(network, copy.deepcopy(network), loss)
    both = nn.ModuleList([base, network])
    assert_trains(both, copy.deepcopy(both), lambda m, b: nn.functional.cross_entropy(m[0](b[0]) + m[1](b[0]), b[1]))


class Gan:
    """A generator and a discriminator, each with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.generator, self.discriminator = nn.Linear(4, 20), nn.Linear(20, 1)
        self.of_generator, self.of_discriminator = sgd(self.generator), sgd(self.discriminator)

    def fools(self, generator: Any, noise: Tensor) -> Tensor:
        return -self.discriminator(generator(noise)).mean()

    def tells(self, discriminator: Any, batch: Any) -> Tensor:
        real, noise = batch
        return discriminator(self.generator(noise).detach()).mean() - discriminator(real).mean()


def test_a_gan_trains_with_its_discriminator_frozen_in_the_generators_step():
    gan, reference = Gan(), Gan()
    noise, real = torch.randn(6, 4), torch.randn(6, 20)
    with pytest.raises(
        errors.CaptureFailed, match=r"(?s)\[1, 20\] that requires.*discriminator.requires_grad_\(False\)"
    ):
        compile_alone(gan.generator, gan.fools, gan.of_generator, noise)
    gan.discriminator.requires_grad_(False)
    generate = compile_alone(gan.generator, gan.fools, gan.of_generator, noise)
    gan.discriminator.requires_grad_(True)
    discriminate = compile_alone(gan.discriminator, gan.tells, gan.of_discriminator, (real, noise))
    for _ in range(4):
        gan.discriminator.requires_grad_(True)
        discriminate((real, noise))
        reference.of_discriminator.zero_grad()
        reference.tells(reference.discriminator, (real, noise)).backward()
        reference.of_discriminator.step()
        gan.discriminator.requires_grad_(False)
        generate(noise)
        reference.of_generator.zero_grad()
        reference.fools(reference.generator, noise).backward()
        reference.of_generator.step()
    assert_alike(gan.generator, reference.generator)
    assert_alike(gan.discriminator, reference.discriminator)


def test_a_tensor_outside_that_no_gradient_reaches_may_require_one():
    teacher = nn.Linear(20, 10)

    def distil(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return nn.functional.mse_loss(model(batch[0]), target) + nn.functional.mse_loss(
            model(batch[0]), teacher(batch[0]).detach() * 2
        )

    assert_trains(small(), small(), distil)


# Parameters that a forward pass writes


class Momentum(nn.Module):
    """MoCo's two encoders; how the second follows the first is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.query, self.key = nn.Linear(20, 10), nn.Linear(20, 10).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            key = self.key(x)
        return (self.query(x) * key).sum(-1)


class Copying(Momentum):
    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.copy_(key * 0.9 + query * 0.1)


class InPlace(Momentum):
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).mean()


MOMENTUM = (Momentum, Copying, InPlace)


@pytest.mark.parametrize("build", MOMENTUM)
def test_a_momentum_encoder_that_the_forward_pass_updates_trains_as_in_eager(build: Build):
    assert_trains(build(), build(), contrast)


def momentum_on_ranks() -> list[bool]:
    alike: list[bool] = []
    for build in MOMENTUM:
        model, wrapped = build(), nn.parallel.DistributedDataParallel(build())
        optimizer = sgd(model)
        step = compile_alone(model, contrast, optimizer, plan="dense")
        eager = sgd(wrapped)
        for number in range(3):
            batch = JOBS["mlp"].batch(number, dist.get_rank())
            step(batch)
            eager.zero_grad()
            contrast(wrapped, batch).backward()
            eager.step()
        alike += [torch.allclose(a, b) for a, b in zip(model.parameters(), wrapped.parameters(), strict=True)]
    return alike


def test_a_momentum_encoder_may_be_updated_by_the_forward_pass_on_several_ranks():
    assert run_ranks(2, momentum_on_ranks) == [[True] * 12] * 2


class Sharing(Momentum):
    def follow(self) -> None:
        self.key.weight.data = self.query.weight.data


class Trained(Momentum):
    def follow(self) -> None:
        self.query.weight.data = self.query.weight.data * 0.9


class TrainedInPlace(Momentum):
    @torch.no_grad()
    def follow(self) -> None:
        self.query.weight.copy_(self.query.weight * 0.9)


class Activation(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        out = self.query(x)
        out.data = out.data * 2
        return out


@pytest.mark.parametrize("build", [Sharing, Trained, Activation])
def test_what_no_copy_stands_for_is_not_assigned(build: Build):
    with pytest.raises(errors.CaptureFailed, match=r"(?s)assigns to `.data` of .*test_advised.py.*copy_\(value\). Or"):
        compile_alone(build(), contrast)


def test_a_copy_in_the_place_of_an_assignment_trains_as_in_eager():
    assert_trains(TrainedInPlace(), TrainedInPlace(), contrast)


# Weights that hooks compute


class Mask(nn.Module):
    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def with_layer(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = small()
    torch.manual_seed(7)
    change(model[0])
    return model


HOOKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "parametrizations.weight_norm": (weight_norm, parametrizations.weight_norm),
    "parametrizations.spectral_norm": (spectral_norm, parametrizations.spectral_norm),
    "parametrize.register_parametrization": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "weight", Mask(torch.ones(12, 20).tril())),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", HOOKS)
def test_a_weight_that_a_hook_computes_is_refused_and_its_parametrization_trains(name: str):
    old, new = HOOKS[name]
    with pytest.raises(errors.Unsupported, match=f"the module '0' has a .* hook.*\n  Use torch.nn.utils.{name}"):
        compile_alone(with_layer(old))
    assert_trains(with_layer(new), with_layer(new))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_states_of_the_old_weight_norm_load_into_the_new_one():
    state = with_layer(weight_norm).state_dict()
    model = with_layer(parametrizations.weight_norm)
    model.load_state_dict(state)
    compile_alone(model)(BATCH)


# Losses scaled by hand


@pytest.mark.parametrize("is_new", [True, False])
def test_a_loss_that_is_scaled_by_hand_is_refused_and_scaler_takes_the_scaler(is_new: bool):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if not is_new:
        scaler.scale(torch.ones(()))
    with pytest.raises(errors.CaptureFailed, match=r"(?s)scales the loss by a GradScaler.*test_advised.*scaler=scaler"):
        compile_alone(small(), lambda model, batch: scaler.scale(cross_entropy(model, batch)))
    model, reference = small(), small()
    step, eager = compile_alone(model, optimizer=sgd(model), scaler=scaler), sgd(reference)
    for number in range(3):
        step(JOBS["mlp"].batch(number))
        scaler.update()
        eager.zero_grad()
        cross_entropy(reference, JOBS["mlp"].batch(number)).backward()
        eager.step()
    assert_alike(model, reference)


def test_a_scaler_that_is_switched_off_may_scale():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert_trains(small(), small(), lambda model, batch: scaler.scale(cross_entropy(model, batch)))


# Packed sequences


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM):
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.head = kind(4, 6), nn.Linear(6, 2)

    def forward(self, given: Any) -> Tensor:
        last = self.layer(given)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


class Padded(Recurrent):
    """Follows the advice: the padded batch, and the last output of each sequence by its length."""

    def forward(self, given: Any) -> Tensor:
        rows, lengths = given
        return self.head(self.layer(rows)[0].transpose(0, 1)[torch.arange(len(lengths)), lengths - 1])


SEQUENCES = [torch.randn(length, 4, generator=torch.Generator().manual_seed(length)) for length in (5, 3)]
TARGET = torch.tensor([0, 1])
LENGTHS = torch.tensor([5, 3])


def packed_inside(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, (pack_padded_sequence(batch[0], batch[1]), batch[2]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.one_in(3)
def test_packed_sequences_are_refused_and_padded_ones_train_alike(kind: type[nn.RNNBase]):
    packed: PackedSequence = pack_sequence(SEQUENCES)
    padded = pad_sequence(SEQUENCES)
    text = r"(?s)is given a PackedSequence.*Give it the padded batch.*fxcomp.ddp_hook, which takes packed"
    with pytest.raises(errors.CaptureFailed, match=text):
        compile_alone(Recurrent(kind), batch=(packed, TARGET))
    with pytest.raises(errors.CaptureFailed, match=text):
        compile_alone(Recurrent(kind), packed_inside, batch=(padded, LENGTHS, TARGET))
    model, reference = Padded(kind), Recurrent(kind)
    step, eager = compile_alone(model, optimizer=sgd(model), batch=((padded, LENGTHS), TARGET)), sgd(reference)
    for _ in range(3):
        loss = step(((padded, LENGTHS), TARGET))
        eager.zero_grad()
        expected = cross_entropy(reference, (packed, TARGET))
        expected.backward()
        eager.step()
        assert torch.allclose(loss, expected)
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def hooked_recurrent() -> bool:
    model, reference = (nn.parallel.DistributedDataParallel(Recurrent()) for _ in range(2))
    model.register_comm_hook(None, fxcomp.ddp_hook(compress="dense"))
    return _train_both(model, reference, sgd, (pack_sequence(SEQUENCES), TARGET))


def _train_both(model: nn.Module, reference: nn.Module, optimizer: Any, batch: Any) -> bool:
    for each in (model, reference):
        steps = optimizer(each)
        for _ in range(3):
            steps.zero_grad()
            cross_entropy(each, batch).backward()
            steps.step()
    return all(torch.allclose(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


# Optimizers that look at more than one parameter


class ScheduleFree(torch.optim.Optimizer):
    """SGD of the structure of schedulefree: a mode that is set by train(), and counts in its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, share).add_(parameter.grad, alpha=-group["lr"] * (1 - share))
                    z.sub_(parameter.grad, alpha=group["lr"])
            group["k"] += 1


class Prodigy(torch.optim.Optimizer):
    """SGD of the structure of Prodigy: one estimate of the step size from all parameters, kept in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0):
        super().__init__(params, {"lr": lr, "d": 0.05, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        group = self.param_groups[0]
        numerator, denominator = group["d_numerator"], 0.0
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                start = state.setdefault("p0", parameter.clone())
                total = state.setdefault("s", torch.zeros_like(parameter))
                numerator += group["d"] * torch.dot(parameter.grad.flatten(), (start - parameter).flatten()).item()
                total.add_(parameter.grad, alpha=group["d"])
                denominator += total.abs().sum().item()
        group["d"] = max(group["d"], numerator / (denominator + 1e-8))
        group["d_numerator"] = numerator
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-group["d"] * group["lr"])
        group["k"] += 1


@pytest.mark.parametrize("kind", [ScheduleFree, Prodigy])
def test_optimizers_of_one_count_for_all_are_refused_with_the_frontends_that_take_them(kind: Any):
    model = small()
    with pytest.raises(errors.Unsupported, match=r"(?s)Or: fxcomp.ddp_hook and .*leave the optimizer yours"):
        compile_alone(model, optimizer=kind(model.parameters()))


def advised_on_ranks() -> dict[str, bool]:
    """Train by the frontends that leave the optimizer alone."""
    right = {"packed sequences in the hook": hooked_recurrent()}
    batch = JOBS["mlp"].batch(0, dist.get_rank())
    for kind in (ScheduleFree, Prodigy):
        model, reference = (nn.parallel.DistributedDataParallel(small()) for _ in range(2))
        model.register_comm_hook(None, fxcomp.ddp_hook(compress="dense"))
        right[f"{kind.__name__} in the hook"] = _train_both(
            model, reference, lambda m, k=kind: k(m.parameters()), batch
        )
        model = small()
        compiled = torch.compile(model, backend="fxcomp", options={"compress": "dense", "model": model})
        reference = nn.parallel.DistributedDataParallel(small())
        right[f"{kind.__name__} in the backend"] = _train_both(
            compiled, reference, lambda m, k=kind: k(m.parameters()), batch
        )
    return right


def test_the_hook_and_the_backend_train_what_compile_step_refuses():
    for right in run_ranks(2, advised_on_ranks):
        assert len(right) == 5
        assert all(right.values()), right
