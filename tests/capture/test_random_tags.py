"""An operator's arguments say if it draws, not its tag alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.eager import trains_as_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, p: float):
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(8, 24), nn.Linear(8, 4), p
        self.dropout = nn.Dropout(0.5)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(checkpoint(self.block, x, use_reentrant=False)))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_attention_without_dropout_may_be_checkpointed():
    torch.manual_seed(0)
    trains_as_eager(Checkpointed(0.0), square, [torch.randn(2, 5, 8) for _ in range(2)])


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


def test_a_table_that_makes_modules_when_asked_is_left_alone():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    trains_as_eager(model, lambda m, b: ACTIVATIONS["relu"](m(b)).square().mean(), [torch.randn(2, 8)])
