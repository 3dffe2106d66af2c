"""Changes around a compiled step are followed as eager PyTorch follows them, or refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp import errors
from fxcomp.errors import CaptureFailed, StepChanged, Unsupported

Optimizer = Callable[[Any], torch.optim.Optimizer]


def square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def rows(step: int, *shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*(shape or (6, 4)), generator=torch.Generator().manual_seed(step)),)


class Pair:
    """The same model twice: one trained by a compiled step, one by eager PyTorch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Any = square, batch: Any = None):
        self.model, self.eager = model, copy.deepcopy(model)
        self.optimizer, self.eager_optimizer = optimizer(model.parameters()), optimizer(self.eager.parameters())
        self.loss = loss
        self.step = fxcomp.compile_step(model, loss, self.optimizer, batch or rows(0), checks=fxcomp.Checks(verify=1))

    def train(self, batch: Any) -> tuple[Any, Any]:
        self.eager_optimizer.zero_grad()
        result = self.loss(self.eager, batch)
        (result[0] if isinstance(result, tuple) else result).backward()
        self.eager_optimizer.step()
        return self.step(batch), result

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
        change(self.model, self.optimizer)
        change(self.eager, self.eager_optimizer)

    def check(self) -> None:
        ours, theirs = self.model.state_dict(), self.eager.state_dict()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                ours[name], tensor, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
            )


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(**options: Any) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options)


def test_momentum_that_is_switched_on_later_keeps_its_state():
    pair = Pair(linear(), sgd())
    pair.train(rows(0))
    pair.both(lambda _, optimizer: optimizer.param_groups[0].update(momentum=0.9))
    for i in range(4):
        pair.train(rows(i))
    pair.check()


def test_a_state_loaded_before_the_first_step_is_no_fresh_state():
    pair = Pair(linear(), sgd(momentum=0.9, dampening=0.5))
    donor = Pair(linear(), sgd(momentum=0.9, dampening=0.5))
    for i in range(3):
        donor.train(rows(i))
    saved = donor.eager_optimizer.state_dict()
    pair.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(saved)))
    for i in range(3):
        pair.train(rows(i))
    pair.check()


class Running(nn.Module):
    """Puts a new tensor in place of a buffer in each forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0).detach()
        self.seen += (x > 0).sum()
        return self.layer(x - self.mean)


def test_a_buffer_that_forward_replaces_is_written_back():
    torch.manual_seed(0)
    pair = Pair(Running(), sgd(momentum=0.9))
    for i in range(4):
        pair.train(rows(i))
    pair.check()
    assert not isinstance(pair.model.mean, torch._subclasses.FakeTensor)


def test_a_tensor_kept_in_an_attribute_is_refused_and_nothing_is_left_behind():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.last = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.layer(x).detach().mean()
            return self.layer(x) + self.last

    model = Keeps()
    before = model.last
    with pytest.raises(CaptureFailed, match=r"'model.last'.*\n.*buffer"):
        fxcomp.compile_step(model, square, torch.optim.SGD(model.parameters()), rows(0))
    assert model.last is before


def test_a_module_that_is_replaced_is_refused_by_name():
    pair = Pair(linear(), sgd())
    pair.model[2] = nn.Linear(8, 3)
    with pytest.raises(StepChanged, match=r"'2\.weight' is another object"):
        pair.step(rows(0))


def test_a_parameter_that_moves_to_another_group_is_refused():
    model = linear()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step = fxcomp.compile_step(model, square, optimizer, rows(0))
    first, last = optimizer.param_groups[0], optimizer.param_groups[3]
    first["params"], last["params"] = last["params"], first["params"]
    with pytest.raises(StepChanged, match="groups hold other parameters"):
        step(rows(0))


def test_a_tensor_or_a_list_that_the_model_holds_is_followed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.scale = torch.tensor(2.0)
            self.options = {"shift": 0.5}

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.options["shift"]

    torch.manual_seed(0)
    pair = Pair(Scaled(), sgd())
    pair.train(rows(0))
    pair.both(lambda model, _: setattr(model, "scale", torch.tensor(3.0)))
    pair.train(rows(1))
    pair.both(lambda model, _: model.options.update(shift=-1.0))
    pair.train(rows(2))
    pair.check()


def test_autocast_around_the_call_does_not_reach_what_was_captured():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return square(model, batch)

    pair = Pair(linear(), sgd(), loss)
    for i in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair.step(rows(i))
        pair.eager_optimizer.zero_grad()
        loss(pair.eager, rows(i)).backward()
        pair.eager_optimizer.step()
    pair.check()


def test_batches_of_other_strides_are_captured_anew():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0].contiguous().view(-1, 4)).square().mean() + batch[0].as_strided((2,), (1,)).sum()

    pair = Pair(linear(), sgd(), loss, rows(0, 4, 4))
    pair.train(rows(1, 4, 4))
    pair.train((rows(2, 4, 4)[0].t(),))
    pair.check()


def test_a_learning_rate_in_a_tensor_stays_live():
    pair = Pair(linear(), lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False))
    for i in range(4):
        pair.train(rows(i))
        pair.both(lambda _, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
    pair.check()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_step_with_gradients_off_around_it_trains_nothing_and_the_next_one_trains(around: Any):
    pair = Pair(linear(), sgd(momentum=0.9))
    pair.train(rows(0))
    before = [p.detach().clone() for p in pair.model.parameters()]
    with around(), pytest.raises(errors.Unsupported, match=r"(?s)gradients are off.*a step trains.*call the model"):
        pair.step(rows(1))
    assert all(map(torch.equal, before, pair.model.parameters()))
    with around(), torch.inference_mode(False), torch.enable_grad():
        pair.train(rows(2))
    pair.train(rows(3))
    pair.check()


def gradients_off(everywhere: bool) -> list[str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = fxcomp.compile_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4),
        compress="dense", checks=fxcomp.Checks(verify="never"),
    )  # fmt: skip
    said: list[str] = []
    for number in range(3):
        is_off = number == 1 and (everywhere or rank == 1)
        try:
            with torch.set_grad_enabled(not is_off):
                step(torch.full((2, 4), float(rank)))
            said.append("trained")
        except errors.FxcompError as error:
            is_off_here = isinstance(error, Unsupported) and "gradients are off" in str(error)
            said.append("gradients are off" if is_off_here else type(error).__name__)
    return [*said, str(model.weight.tolist())]


def test_ranks_that_all_have_gradients_off_go_on_and_one_alone_stops_all():
    first, second = run_ranks(2, gradients_off, True)
    assert first == second
    assert first[:3] == ["trained", "gradients are off", "trained"]
    first, second = run_ranks(2, gradients_off, False)
    assert first[:3] == ["trained", "PeerFailed", "RanksApart"]
    assert second[:3] == ["trained", "gradients are off", "RanksApart"]


def test_auxiliary_results_keep_what_is_no_tensor():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Any]]:
        return square(model, batch), {"none": None, "count": 3, "flag": True, "mean": model(batch[0]).mean()}

    pair = Pair(linear(), sgd(), loss)
    (_, aux), (_, expected) = pair.train(rows(0))
    assert (aux["none"], aux["count"], aux["flag"]) == (None, 3, True)
    torch.testing.assert_close(aux["mean"], expected["mean"].detach())


def of_sizes(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Any]]:
    x = batch[0]
    rows, columns = x.shape
    sizes = {
        "rows": rows,
        "shape": x.shape,
        "share": rows / 3,
        "percent": 100.0 * x.numel() / (rows + 1),
        "both": (rows, columns),
    }
    return square(model, batch), {**sizes, "half": rows // 2, "text": "rows", "none": None, "of": (max(rows, 8), -rows)}


def texts_of_sizes(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Any]]:
    rows = batch[0].shape[0]
    return square(model, batch), {"text": f"{rows} rows", "rows": rows}


def decided_by_sizes(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Any]]:
    rows = batch[0].shape[0]
    return square(model, batch), {"rows": int(rows), "many": rows > 8, "root": math.sqrt(rows), "length": len(batch[0])}


@pytest.mark.filterwarnings("ignore:fxcomp. the shape of batch.0. changed")
@pytest.mark.parametrize("loss", [of_sizes, texts_of_sizes, decided_by_sizes])
def test_auxiliary_results_that_follow_from_sizes_are_made_anew(loss: Any):
    pair = Pair(linear(), sgd(), loss)
    for length in (6, 7, 8, 9, 11, 20):
        (_, aux), (_, expected) = pair.train(rows(0, length, 4))
        assert aux == expected
        plain = [key for key in aux if key != "shape"]  # flattening makes a tuple of it
        assert [type(aux[key]) for key in plain] == [type(expected[key]) for key in plain]
    assert len(pair.step.in_force.programs) == (3 if loss is of_sizes else 6)


def test_what_cannot_be_returned_again_is_refused_by_name():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        return square(model, batch), {"found": [object(), 1]}

    with pytest.raises(Unsupported, match=r"returns a object with the loss.*\n.*Return tensors, numbers"):
        Pair(linear(), sgd(), loss)


def test_dropout_behind_the_loss_is_no_checkpointing():
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        value = square(model, batch)
        return value, nn.functional.dropout(model(batch[0]).detach(), 0.5)

    pair = Pair(linear(), sgd(), loss)
    pair.step(rows(0))


def test_sparse_gradients_are_refused_by_name():
    class LooksUp(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return torch.embedding(self.weight, input, -1, False, True)

    model = nn.Sequential(LooksUp(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Unsupported, match=r"'0.weight' is sparse.*\n.*sparse=False"):
        fxcomp.compile_step(model, square, optimizer, (torch.tensor([1, 2]),))
