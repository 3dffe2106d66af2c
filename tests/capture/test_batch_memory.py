"""Tensors of a batch that are one tensor, share memory, or require gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomp
from fxcomp import errors


def noisy(model: nn.Module, batch: Any) -> Tensor:
    batch[0].mul_(2)
    return (model(batch[0]) - batch[1]).square().mean()


def aware(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean() * (2.0 if batch[0].requires_grad else 1.0)


def trained(loss: Any, batches: Callable[[int], Any], compile_it: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = (
        fxcomp.compile_step(model, loss, optimizer, batches(0), checks=fxcomp.Checks(verify=1)) if compile_it else None
    )
    results: list[Tensor] = []
    for i in range(1, 5):
        batch = batches(i)
        if step is None:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        else:
            step(batch)
        results += [model.weight.detach().clone(), batch[0].detach().clone()]
    return results


def rows(seed: int, columns: int = 4) -> Tensor:
    return torch.randn(3, columns, generator=torch.Generator().manual_seed(seed))


def sometimes_one(i: int) -> Any:
    x = rows(i)
    return (x, x if i % 2 else x.clone())


def sometimes_differentiable(i: int) -> Any:
    return (rows(i).requires_grad_(i > 2),)


@pytest.mark.parametrize(("loss", "batches"), [(noisy, sometimes_one), (aware, sometimes_differentiable)])
def test_what_a_batchs_tensors_are_to_each_other_is_followed(loss: Any, batches: Any):
    for ours, theirs in zip(trained(loss, batches, True), trained(loss, batches, False), strict=True):
        assert torch.equal(ours, theirs)


def test_writing_into_memory_that_two_tensors_share_is_refused():
    def shifted(i: int) -> Any:
        x = rows(i, 6)
        return (x[:, :4], x[:, 2:])

    with pytest.raises(errors.CaptureFailed, match=r"writes batch\[0\], in whose memory batch\[1\] lies.*\n.*clone"):
        trained(noisy, shifted, True)


def test_writing_into_memory_in_which_several_elements_lie_is_refused():
    with pytest.raises(errors.CaptureFailed, match=r"writes batch\[0\], several elements.*\n.*clone"):
        trained(noisy, lambda i: (rows(i)[:1].expand(3, 4), rows(i)), True)


def test_views_of_one_memory_that_are_only_read_train():
    def shifted(i: int) -> Any:
        x = rows(i, 6)
        return (x[:, :4], x[:, 2:])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    assert all(map(torch.equal, trained(loss, shifted, True), trained(loss, shifted, False)))
