"""Criteria and queues outside the model, which the loss function writes at every step, are written as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp import errors


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, out: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(out.detach().mean(0))
        return (out - self.mean).square().mean()


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, out: Tensor) -> Tensor:
        self.calls += 1
        self.queue.copy_(torch.cat([self.queue[3:], out.detach()]))
        return (out @ self.queue.T).mean() / self.calls


class Slices(nn.Module):
    """A tensor that is no buffer, written through views, and read between two writings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(6, 4)

    def forward(self, out: Tensor) -> Tensor:
        self.rows[:3] = out.detach()
        before = self.rows[1:4].clone()
        self.rows[1:2].add_(1)
        return (out * before).mean() + self.rows.sum()


class Replaced(Mean):
    def forward(self, out: Tensor) -> Tensor:
        self.mean = self.mean + out.detach().mean(0)
        return (out - self.mean).square().mean()


def written(criterion: Any) -> list[Tensor]:
    return [*criterion.buffers(), *(value for value in vars(criterion).values() if isinstance(value, Tensor))]


@pytest.mark.parametrize("kind", [Mean, Queue, Slices])
@pytest.mark.parametrize("verify", [1, "never"])
def test_what_lies_outside_the_model_is_written_at_every_step(kind: type[nn.Module], verify: Any):
    torch.manual_seed(0)
    model, criterion, batches = nn.Linear(6, 4), kind(), [torch.randn(3, 6) for _ in range(4)]
    reference, beside = copy.deepcopy((model, criterion))
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    step = fxcomp.compile_step(
        model, lambda m, b: criterion(m(b)), ours, batches[0], checks=fxcomp.Checks(verify=verify)
    )
    assert all(map(torch.equal, written(criterion), written(beside))), "tracing writes nothing"
    for batch in batches:
        theirs.zero_grad()
        loss = beside(reference(batch))
        loss.backward()
        theirs.step()
        assert step(batch) == loss
        assert all(map(torch.equal, written(criterion), written(beside)))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_a_criterion_that_puts_another_buffer_in_the_place_is_told_to_write_in_place():
    model, criterion = nn.Linear(6, 4), Replaced()
    with pytest.raises(errors.CaptureFailed, match=r"(?s)stores a tensor in .*mean.*buffer\.copy_\(value\)"):
        fxcomp.compile_step(
            model, lambda m, b: criterion(m(b)), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6)
        )
    assert type(criterion.mean) is Tensor
    assert not criterion.mean.any()


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda c, _: c.mul_(0.5),
    "add_": lambda c, _: c.add_(1.5),
    "sub_": lambda c, _: c.sub_(0.25),
    "div_": lambda c, _: c.div_(3),
    "+=": lambda c, _: c.__iadd__(1),
    "*=": lambda c, _: c.__imul__(0.7),
    "out=": lambda c, _: torch.mul(c, 0.9, out=c),
    "a moving average": lambda c, out: c.mul_(0.9).add_(out.mean() * 0.1),
    "a view": lambda c, _: c.view(-1, 1).mul_(0.5),
    "a number as a tensor": lambda c, _: c.mul_(torch.tensor(0.5)),
    "foreach": lambda c, _: torch._foreach_mul_([c], 0.5),
    "foreach of numbers": lambda c, _: torch._foreach_add_([c], [2.0]),
    "foreach of a tensor": lambda c, _: torch._foreach_mul_([c], torch.tensor(0.5)),
    "a decision": lambda c, _: c.mul_(0.5) if c.sum() > c.numel() * 0.6 else c.add_(0.3),
    "a decision by what was written": lambda c, _: c.add_(0.8) if c.mul_(0.5).sum() < 0.4 * c.numel() else None,
}
"""Writings of a tensor that is no buffer of the model, given what the model returns."""


class Criterion(nn.Module):
    """Writes its buffers, or tensors that it is given."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._write = write
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"c{number}", tensor)

    def forward(self, out: Tensor, given: Sequence[Tensor] = ()) -> Tensor:
        found = torch.zeros(())
        for c in (*self.buffers(), *given):
            with torch.no_grad():
                self._write(c, out)
            found = found + (out.mean() - c).square().mean()
        return found


_in_a_global: list[Tensor] = []


def writing(place: str, write: Callable[[Tensor, Tensor], Any], tensors: list[Tensor]) -> Any:
    """Make a loss function that writes tensors, which it finds in a closure, a criterion or a global."""
    criterion = Criterion(write, tensors if place == "criterion" else ())
    if place == "closure":
        return lambda model, batch: criterion(model(batch), tensors)
    if place == "global":
        _in_a_global[:] = tensors
        return lambda model, batch: criterion(model(batch), _in_a_global)
    return lambda model, batch: criterion(model(batch))


PLACES = ("closure", "criterion", "global")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "place"), [(name, PLACES[number % 3]) for number, name in enumerate(WRITES)])
def test_numbers_written_outside_the_model_are_eagers_in_every_capture(name: str, place: str):
    torch.manual_seed(0)
    reference, batches = nn.Linear(6, 4), [torch.randn(rows, 6) for rows in (3, 4, 5, 3)]
    model, begin = copy.deepcopy(reference), [torch.linspace(1.2, 0.2, elements) for elements in (1, 3, 300)]
    mine, others = copy.deepcopy(begin), copy.deepcopy(begin)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    expected: list[tuple[Tensor, list[Tensor]]] = []
    eager = writing(place, WRITES[name], others)
    for batch in batches:
        theirs.zero_grad()
        loss = eager(reference, batch)
        loss.backward()
        theirs.step()
        expected.append((loss.detach(), copy.deepcopy(others)))
    compiled = writing(place, WRITES[name], mine)
    step = fxcomp.compile_step(model, compiled, ours, batches[0], compress="dense", checks=fxcomp.Checks(verify=2))
    assert all(map(torch.equal, mine, begin)), "tracing writes nothing"
    for batch, (loss, after) in zip(batches, expected, strict=True):
        assert step(batch) == loss
        assert all(map(torch.equal, mine, after))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.parametrize("write", [lambda c: c.t_(), lambda c: c.unsqueeze_(0), lambda c: c.resize_(2, 2)])
def test_a_changed_shape_of_a_tensor_outside_the_model_is_refused(write: Callable[[Tensor], Any]):
    model, c = nn.Linear(6, 4), torch.ones(4, 3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        write(c)
        return model(batch).mean() * c.sum()

    with pytest.raises(
        errors.CaptureFailed, match=r"(?s)changes the shape of a tensor .*test_written_outside.py.*view"
    ):
        fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))
    assert c.shape == (4, 3)


def test_one_tensor_twice_in_a_list_that_is_written_is_refused():
    model, c = nn.Linear(6, 4), torch.ones(4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        torch._foreach_add_([c, c], [1.0, 2.0])
        return (model(batch) - c).square().mean()

    with pytest.raises(errors.CaptureFailed, match=r"(?s)_foreach_add_.* one tensor is twice.*call the operator once"):
        fxcomp.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 6))
    assert torch.equal(c, torch.ones(4))
