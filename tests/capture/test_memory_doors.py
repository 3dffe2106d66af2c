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
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda x: x.share_memory_(),
    "shared storage": lambda x: x.untyped_storage().share_memory_(),
    "apply_": lambda x: x.apply_(lambda v: v),
}


@pytest.mark.parametrize("of_the_model", [False, True], ids=["batch", "model"])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.filterwarnings("ignore")
def test_memory_is_not_handed_out(door: Callable[[Any], Any], of_the_model: bool) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        door(out.detach() if of_the_model else batch)
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
    with pytest.raises(CaptureFailed, match="in whose memory"):
        fxcomp.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), anchor)
