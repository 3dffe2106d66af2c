"""No address of a stand-in leaves a trace: whatever hands out a tensor's memory is refused, and nothing crashes."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import dlpack

import fxcomp
from fxcomp.errors import CaptureFailed


def saved(x: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


DOORS: dict[str, Callable[[Any], Any]] = {
    "to_dlpack": lambda x: torch.from_dlpack(dlpack.to_dlpack(x)),
    "__dlpack__": lambda x: x.__dlpack__(),
    "from_dlpack": torch.from_dlpack,
    "NumPy from_dlpack": np.from_dlpack,
    "numpy": lambda x: x.numpy(),
    "numpy by force": lambda x: x.numpy(force=True),
    "asarray": np.asarray,
    "ufunc": lambda x: np.add(x, 1),
    "data_ptr": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "storage's data_ptr": lambda x: x.untyped_storage().data_ptr(),
    "typed storage's data_ptr": lambda x: x.storage().data_ptr(),
    "element of the storage": lambda x: x.untyped_storage()[0],
    "list of the storage": lambda x: x.storage().tolist(),
    "bytes of the storage": lambda x: bytes(x.untyped_storage()),
    "clone of the storage": lambda x: x.untyped_storage().clone(),
    "size of the storage": lambda x: x.untyped_storage().resize_(0),
    "file of the storage": lambda x: x.storage()._write_file(io.BytesIO(), False, True, 4),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).sum(),
    "save": lambda x: saved(x).sum(),
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda x: x.share_memory_(),
    "shared storage": lambda x: x.untyped_storage().share_memory_(),
    "apply_": lambda x: x.apply_(lambda v: v),
    "map_": lambda x: torch.zeros(2, 3).map_(x, lambda a, b: a + b).sum(),
}


NO_VALUES = {"to_dlpack", "size of the storage", "file of the storage", *(name for name in DOORS if "data_ptr" in name)}
"""Doors that are open for a real tensor outside the model, whose address is true in every step."""

CASES = [(name, whose) for whose in ("batch", "model") for name in DOORS]
CASES += [(name, "outside") for name in DOORS if name not in NO_VALUES]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "whose"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_memory_is_not_handed_out(name: str, whose: str) -> None:
    outside = torch.ones(2, 3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        DOORS[name]({"batch": batch, "model": out.detach(), "outside": outside}[whose])
        return out.sum()

    model = nn.Linear(3, 3)
    with pytest.raises(CaptureFailed, match=r"memory past torch's operators|reads a tensor's values") as caught:
        fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
    assert Path(__file__).name in str(caught.value)


def test_a_tensor_of_the_first_batch_may_be_read_from_outside_too() -> None:
    anchor = torch.ones(2, 3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - model(anchor)).square().mean() + batch.sum()

    model = nn.Linear(3, 3)
    step = fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), anchor)
    other = torch.randn(2, 3)
    expected = loss_fn(model, other).item()
    assert step(other).item() == expected


def test_a_tensor_of_the_first_batch_is_not_written_from_outside() -> None:
    anchor = torch.ones(2, 3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        anchor.add_(1)
        return model(batch).sum()

    model = nn.Linear(3, 3)
    with pytest.raises(CaptureFailed, match="which shares memory with"):
        fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), anchor)
