"""Python may decide by values of the batch and of buffers: what it asked is asked again before each step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager import trains_as_eager
from helpers.ranks import run_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import CaptureFailed


class Net(nn.Module):
    """A layer with dropout, a counter and a frozen layer; the draws of a wrong branch would show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 1).requires_grad_(False)
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.hidden: Tensor
        self.register_buffer("hidden", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


def truth(model: Net, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.sum() if batch[1].max() > 2 else out.mean()


def loop(model: Net, batch: Any) -> Tensor:
    x = batch[0]
    for _ in range(int(batch[1].max())):
        x = x + model(x)
    return x.mean()


def rows(model: Net, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.mean() + sum(out[int(row)].sum() for row in (batch[1] > 1).nonzero())


def picked(model: Net, batch: Any) -> Tensor:
    chosen = batch[0][batch[1][:3] > 1]
    return model(chosen).sum() if len(chosen) > 1 else model(batch[0]).mean()


def tree(model: Net, batch: Any) -> Tensor:
    """The second question raises where the first is answered otherwise."""
    out = model(batch[0])
    if batch[1].max() < 3 and model.hidden[batch[1]].sum() > 0:
        return out.sum()
    return out.mean()


def view_of_a_counter(model: Net, batch: Any) -> Tensor:
    model.count.view(-1)[0] += 1
    before = model.count > 2
    model.count.view(-1).mul_(2)
    out = model(batch[0])
    if before:
        out = out * 3
    return out.sum() if model.count.item() % 3 == 0 else out.mean()


def written_after(model: Net, batch: Any) -> Tensor:
    asked = model.count.item()
    model.count.add_(1)
    out = model(batch[0])
    return out.sum() if asked >= 2 else out.mean()


def under_autocast(model: Net, batch: Any) -> Tensor:
    """Only in the lower precision is some sum of this batch above its rounded self."""
    with torch.autocast("cpu", torch.bfloat16):
        low = batch[0] @ batch[0].T
    out = model(batch[0])
    return out.sum() if low.dtype is torch.bfloat16 and low[0, 1] > batch[0][0] @ batch[0][1] else out.mean()


def frozen(model: Net, batch: Any) -> Tensor:
    with torch.no_grad():
        sees = model.frozen(batch[0]).sum() > 0
    return model(batch[0]).sum() if sees else model(batch[0]).mean()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        return (grads[0] * 2 if labels.max() > 2 else grads[0]), None


def in_the_backward_pass(model: Net, batch: Any) -> Tensor:
    return _Backward.apply(model(batch[0]), batch[1]).sum()


def constant(model: Net, batch: Any) -> Tensor:
    scale = torch.sqrt(torch.tensor([batch[0].shape[1], 9.0])).max()
    return model(batch[0]).sum() * (float(scale) if scale > 2 else 1.0)


def speech(model: Net, batch: Any) -> Tensor:
    """The lengths of targets are tensors: no number of them is asked for."""
    frames = model(batch[0]).view(3, 1, 4).log_softmax(-1).expand(3, 2, 4)
    lengths = batch[1][:2].clamp(1, 2)
    targets = torch.tensor([[1, 2], [3, 1]])
    return torch.nn.functional.ctc_loss(frames, targets, torch.tensor([3, 3]), lengths, zero_infinity=True)


def resized(model: Net, batch: Any) -> Tensor:
    height, width = batch[1][0] + 1, batch[1][1] + 2
    image = torch.nn.functional.interpolate(model(batch[0])[None, None], size=(height, width), mode="bilinear")
    return torch.nn.functional.pad(image, (0, 6 - width, 0, 6 - height)).square().sum()


LOSSES = (truth, loop, rows, picked, tree, view_of_a_counter, written_after, under_autocast, frozen)
LOSSES += (in_the_backward_pass, constant, speech, resized)


def batches(labels: Sequence[Sequence[int]] = ((0, 1, 2), (3, 0, 1), (1, 1, 2), (2, 3, 3), (0, 0, 1))) -> list[Any]:
    return [
        (torch.randn(3, 4, generator=torch.Generator().manual_seed(i)), torch.tensor(row))
        for i, row in enumerate(labels)
    ]


@pytest.mark.filterwarnings("ignore:fxcomp. the answer")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_takes_the_side_that_eager_takes(loss: Any):
    torch.manual_seed(0)
    step = trains_as_eager(Net(), loss, batches())
    if loss not in (constant, speech):
        assert len(step.in_force.programs) > 1, "some answer changed"


def test_an_answer_that_was_seen_before_captures_nothing():
    step = trains_as_eager(Net(), truth, batches([[0], [3], [1], [4], [2], [5]]))
    assert len(step.in_force.programs) == 2


@pytest.mark.filterwarnings("ignore:fxcomp. the shape")
@pytest.mark.parametrize("sizes", [(3, 5, 7, 9, 4, 6, 8, 3, 1, 2)])
def test_sizes_may_vary_beside_answers(sizes: Sequence[int]):
    varied = [(torch.randn(n, 4), torch.tensor([i % 4, n])) for i, n in enumerate(sizes)]

    def loss(model: Net, batch: Any) -> Tensor:
        out = model(batch[0])
        if batch[1][1].item() > batch[0].shape[0]:
            raise ValueError("unseen")
        return out.sum() if batch[1][0] > 1 else out.mean()

    trains_as_eager(Net(), loss, varied)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class BadLabel(Exception):
    """A user's own."""


def checked(model: Net, batch: Any) -> Tensor:
    if not (batch[1] >= 0).all():
        raise AssertionError("a label is negative")
    if batch[1].max() >= 4:
        raise BadLabel(f"{batch[1].shape[0]} labels")
    return model(batch[0]).sum()


def test_what_eager_python_raises_reaches_the_user_and_the_next_batch_trains():
    model, (good, large, negative) = Net(), batches([[0, 1], [4, 1], [-1, 2]])
    step = fxcomp.compile_step(model, checked, sgd(model), good, compress="dense")
    step(good)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadLabel, match="2 labels"):
        step(large)
    with pytest.raises(AssertionError, match="a label is negative"):
        step(negative)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(good)
    assert len(step.in_force.programs) == 1
    assert not torch.equal(model.layer.weight, before["layer.weight"])


def by_a_trained_value(model: Net, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.sum() if model.layer.weight[0, 0] > batch[0][0, 0] else out.mean()


def by_a_written_buffer(model: Net, batch: Any) -> Tensor:
    out = model(batch[0])
    with torch.no_grad():
        model.hidden.copy_(out.mean(dim=1))
    return out.sum() if model.hidden[0] > 0 else out.mean()


def by_a_rounded_number(model: Net, batch: Any) -> Tensor:
    out = model(batch[0])
    return out.sum() if batch[0].mean().item() + 0.1 + 0.2 > 0.3 else out.mean()


@pytest.mark.parametrize("loss", [by_a_trained_value, by_a_written_buffer, by_a_rounded_number])
def test_what_only_the_step_itself_can_tell_is_refused(loss: Any):
    model = Net()
    with pytest.raises(CaptureFailed, match="decides by the values of tensors"):
        fxcomp.compile_step(model, loss, sgd(model), batches()[0])


def test_a_prelude_keeps_no_batch_and_writes_nothing():
    model, (first, second) = Net(), batches([[0, 1], [1, 2]])
    step = fxcomp.compile_step(model, view_of_a_counter, sgd(model), first, compress="dense")
    prelude = step.in_force.program.captured.prelude
    assert prelude is not None
    count = model.count.clone()
    assert prelude.other_answer(list(second)) is None
    assert torch.equal(model.count, count)
    step(first)
    leaves = [weakref.ref(leaf) for leaf in first]
    step(second)
    del first
    gc.collect()
    assert [leaf() for leaf in leaves] == [None, None]


def test_what_may_fail_is_asked_after_what_came_before_it():
    step = fxcomp.compile_step(model := Net(), tree, sgd(model), (torch.randn(3, 4), torch.tensor([0, 1])))
    prelude = step.in_force.program.captured.prelude
    assert prelude is not None
    assert (len(prelude), prelude.reads) == (2, 2)
    other = prelude.other_answer([torch.randn(3, 4), torch.tensor([0, 7])])
    assert other is not None
    question, answer = other
    assert (question.answer, answer) == (True, False)


def test_questions_that_cannot_fail_are_read_together():
    def loss(model: Net, batch: Any) -> Tensor:
        if batch[1].min() < 0 or batch[1].max() >= 4 or not batch[0].isfinite().all():
            raise ValueError
        return model(batch[0]).sum()

    step = fxcomp.compile_step(model := Net(), loss, sgd(model), batches()[0])
    prelude = step.in_force.program.captured.prelude
    assert prelude is not None
    assert (len(prelude), prelude.reads) == (3, 1)
    assert "3 decisions over values are evaluated in one read" in step.explain()


def test_an_answer_that_changes_again_and_again_is_told():
    model = Net()
    labels = batches([[k] for k in range(1, 7)])
    step = fxcomp.compile_step(model, loop, sgd(model), labels[0], compress="dense")
    for batch in labels[:3]:
        step(batch)
    with pytest.warns(UserWarning, match=r"(?s)test_preludes\.py:\d+ .*changed: 1, 2, 3, 4.*torch\.where"):
        step(labels[3])


def rank_loss(model: Net, batch: Any) -> Tensor:
    if batch[1].max() >= 4:
        raise BadLabel("of one rank")
    out = model.layer(batch[0])
    return out.sum() if batch[1].max() > 2 else out.mean()


def on_ranks() -> tuple[list[bool], str, str, bool]:
    """Ranks answer otherwise in the same step; then one rank's Python raises, and all go on with the next batch."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    optimizer, eager = sgd(model), sgd(reference)
    ddp = nn.parallel.DistributedDataParallel(reference.layer)
    labels = [[0, 1], [3, 1], [1, 1]] if rank == 0 else [[1, 0], [2, 1], [3, 3]]
    step = fxcomp.compile_step(model, rank_loss, optimizer, batches(labels)[0], compress="dense")

    def trained(batch: Any) -> bool:
        step(batch)
        eager.zero_grad()
        out = ddp(batch[0])
        (out.sum() if batch[1].max() > 2 else out.mean()).backward()
        eager.step()
        return torch.equal(model.layer.weight, reference.layer.weight)

    same = [trained(batch) for batch in batches(labels)]
    try:
        step(batches([[9] if rank == 0 else [1]])[0])
        raised, text = "", ""
    except Exception as error:
        raised, text = type(error).__name__, str(error)
    return same, raised, text, rank == 0


def test_ranks_may_answer_otherwise_and_an_error_on_one_reaches_all():
    for same, raised, text, is_first in run_ranks(2, on_ranks):
        assert all(same), same
        assert raised == ("BadLabel" if is_first else "PeerFailed"), text
        assert "of one rank" in text


def by_moved_statistics(model: Any, batch: Tensor) -> Tensor:
    loss = (model.layer(model.norm(batch))).square().mean()
    return loss * 2 if model.norm.running_mean.sum().item() > 0.15 else loss


def normalized(*, affine: bool) -> nn.Module:
    model = nn.Module()
    model.norm, model.layer = nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 3)
    return model


def test_statistics_that_the_step_has_moved_decide_as_they_are_then():
    torch.manual_seed(0)
    trains_as_eager(normalized(affine=False), by_moved_statistics, [torch.rand(5, 4) for _ in range(4)], verify="never")


def test_statistics_that_an_operator_with_trained_weights_has_moved_decide_nothing():
    model = normalized(affine=True)
    with pytest.raises(CaptureFailed, match=r"decides by the values(?s:.*)test_preludes\.py:\d+"):
        fxcomp.compile_step(
            model, by_moved_statistics, torch.optim.SGD(model.parameters(), lr=0.0), torch.rand(5, 4), compress="dense"
        )
