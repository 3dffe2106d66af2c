"""Real tensors among an operator's arguments are exchanged for their fakes, wherever they lie."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxcomp.compat.constants import Constants

REAL = torch.ones(2)
PLACES = {
    "by itself": REAL,
    "in a list": [REAL, 1],
    "in a list of tuples": [(1, REAL)],
    "in a dict": {"x": REAL},
    "in lists of dicts": [1, {"x": [{"y": REAL}]}],
}


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("given", PLACES.values(), ids=PLACES)
def test_a_real_tensor_is_exchanged_wherever_it_lies(given: Any, as_keyword: bool):
    seen: list[Any] = []

    def traced(value: Tensor) -> Tensor:
        mode = Constants((value,))
        if as_keyword:
            return value + mode.__torch_dispatch__(operator, (), (), {"given": given})
        return value + mode.__torch_dispatch__(operator, (), (given,))

    def operator(given: Any) -> Tensor:
        seen.extend(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return seen[-1]

    make_fx(traced, tracing_mode="fake")(torch.zeros(2))
    assert [type(tensor) for tensor in seen] == [FakeTensor]
