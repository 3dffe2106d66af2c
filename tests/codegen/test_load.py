"""Emitted source becomes a file that people and tracebacks find; without a place to write, it still runs."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.graphs import linear_step
from torch.utils._python_dispatch import TorchDispatchMode

from fxcomp import compat
from fxcomp.codegen.load import load, replace_regions

SOURCE = "def region_0(x):\n    return x + 1\n\n\ndef step(x):\n    return region_0(x) / x\n"


def test_the_source_lies_where_its_traceback_points(tmp_path: Path):
    module = load(SOURCE, linear_step(), tmp_path / "steps")
    assert Path(module.__file__).read_text() == SOURCE
    with pytest.raises(ZeroDivisionError) as error:
        module.step(0)
    assert "return region_0(x) / x" in "".join(traceback.format_tb(error.value.__traceback__))


def test_the_same_source_has_the_same_name(tmp_path: Path):
    files = [load(text, linear_step(), tmp_path).__file__ for text in (SOURCE, SOURCE, SOURCE + "\n")]
    assert files[0] == files[1] != files[2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    module = load(SOURCE, linear_step(), tmp_path / "file" / "steps")
    assert module.step(1) == 2
    with pytest.raises(ZeroDivisionError) as error:
        module.step(0)
    assert "return region_0(x) / x" in "".join(traceback.format_tb(error.value.__traceback__))


def test_regions_can_be_replaced(tmp_path: Path):
    module = load(SOURCE, linear_step(), tmp_path)
    replace_regions(module, lambda name, run: lambda x: 10 * run(x) if name == "region_0" else run(x))
    assert module.step(1) == 20


def test_direct_operators_are_those_of_torch_and_dispatch_modes_still_see_them():
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operators: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operators.append(func)
            return func(*args, **(kwargs or {}))

    value = torch.tensor([1.0, 2.0])
    with Seen() as seen:
        found = compat.direct_aten.add.Tensor(value, value, alpha=2)
    assert found.tolist() == [3.0, 6.0]
    assert seen.operators == [torch.ops.aten.add.Tensor]
    with pytest.raises(AttributeError, match="no_such_operator"):
        compat.direct_aten.no_such_operator.default(value)
