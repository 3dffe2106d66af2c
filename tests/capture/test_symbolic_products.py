"""Matrix products keep the sizes of a batch symbols, on every version of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from fxcomp import compat

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: linear(x, w),
    "linear of a transposed input": lambda x, w: linear(x.transpose(0, 1), w, w[0]),
    "batches and a matrix": lambda x, w: x @ w,
    "a matrix and batches": lambda x, w: w @ x.transpose(1, 2),
    "batches": lambda x, _: x @ x.transpose(1, 2),
    "batches and a vector": lambda x, w: x @ w[0],
    "einsum": lambda x, w: torch.einsum("bld,ed->ble", x, w),
    "matrices": lambda x, w: x[0] @ w,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.one_in(3)
def test_a_product_and_its_gradients_make_no_number_of_a_symbol(name: str):
    def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        return list(torch.autograd.grad(PRODUCTS[name](x, w).sum(), [x, w], allow_unused=True))

    mode, _ = compat.fake_mode()
    x = compat.fake_with_dynamic_dims(mode, torch.ones(2, 5, 4), frozenset([1]), "x")
    w = compat.fake_with_dynamic_dims(mode, torch.ones(4, 4), frozenset(), "w")
    with mode:
        compat.trace(gradients, [x, w])
    assert compat.is_open(x.shape[1])
    assert torch.equal(torch.ones(2, 5, 4) @ torch.ones(4, 4), torch.full((2, 5, 4), 4.0)), "others are as before"
