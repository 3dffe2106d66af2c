"""A compiled step inside torch.compile, copied, pickled, and after its process group has gone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.followed import BATCH, compiled, small
from helpers.ranks import run_ranks

from fxcomp import errors


def test_a_step_inside_a_compiled_function_ends_its_graph_and_trains():
    model, other = small(), small()
    step, alone = compiled(model), compiled(other)

    @torch.compile(backend="eager")
    def doubled(batch: Any) -> Any:
        rows = batch[0] * 2
        return step((rows / 2, batch[1])) + 1

    for _ in range(3):
        assert doubled(BATCH) == alone(BATCH) + 1
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_graph_that_must_not_end_says_why_it_would():
    step = compiled(small())

    @torch.compile(backend="eager", fullgraph=True)
    def one(batch: Any) -> Any:
        return step(batch) + 1

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"(?s)an fxcomp step is compiled already.*leave out fullgraph"
    ):
        one(BATCH)
    step(BATCH)


@pytest.mark.parametrize("act", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_step_is_neither_copied_nor_pickled(act: Any):
    with pytest.raises(errors.Unsupported, match=r"(?s)cannot be copied or pickled.*state_dict\(\)"):
        act(compiled(small()))


def after_the_group(path: str) -> list[str]:
    step, rank = compiled(small()), dist.get_rank()
    step(BATCH)
    dist.destroy_process_group()
    said: list[str] = []
    for begins_again in (False, True):
        if begins_again:
            dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        with pytest.raises(errors.BadCall) as caught:
            step(BATCH)
        said.append(str(caught.value))
    step.close()
    compiled(small())(BATCH)
    return said


def test_a_step_after_its_process_group_says_so_at_once(tmp_path: Path):
    said = run_ranks(2, after_the_group, str(tmp_path / "store"))
    assert all("has been destroyed" in text and "init_process_group" in text for each in said for text in each)
