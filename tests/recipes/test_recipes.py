"""Recipes run, survive what they say, and differ from the scripts they come from by a few lines."""

from __future__ import annotations

import difflib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.recipes import RECIPES, ROOT, loaded

import fxcomp

PAIRS = [
    ("plain_ddp.py", "plain.py", "recipes.md"),
    ("trainer_ddp.py", "trainer.py", "recipes.md"),
    ("with_lightning_ddp.py", "with_lightning.py", "recipes/lightning.md"),
]
STEPS = 6


def changed(before: str, after: str) -> list[str]:
    """The lines of a recipe that are not in the script before, without its docstring."""
    one, other = ((RECIPES / name).read_text().split('"""', 2)[2].strip("\n").splitlines() for name in (before, after))
    lines = list(difflib.unified_diff(one, other, n=0, lineterm=""))[2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


@pytest.mark.parametrize(("before", "after", "page"), PAIRS)
def test_a_recipe_adds_five_lines_at_most_and_the_page_shows_them(before: str, after: str, page: str):
    lines = changed(before, after)
    assert 0 < sum(line[0] == "+" for line in lines) <= 5
    told = (ROOT / "docs" / page).read_text()
    for line in lines:
        assert line in told


def trained(recipe: str, folder: Path, *, is_terminated: bool) -> list[torch.Tensor]:
    """Train, with a compressed plan where there is one; SIGTERM comes to rank 1 in the fourth step."""
    module: Any = loaded(recipe)
    compile_step, batch_at = fxcomp.compile_step, module.batch_at
    fxcomp.compile_step = partial(compile_step, compress="int4")

    def batch(step: int, rank: int) -> Any:
        if is_terminated and (step, rank) == (3, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_at(step, rank)

    module.batch_at = batch
    try:
        model = module.main(folder, STEPS)
    except SystemExit as stopped:
        if is_terminated and stopped.code:  # after 0, torchrun takes the job for finished
            return []
        raise
    finally:
        fxcomp.compile_step = compile_step
    return [p.detach().clone() for p in model.parameters()]


def preempted(recipe: str, folder: Path) -> tuple[list[str], bool]:
    """The checkpoints that a preempted job leaves, and whether it ends as it would have without."""
    straight = trained(recipe, folder / "straight", is_terminated=False)
    trained(recipe, folder / "preempted", is_terminated=True)
    dist.barrier()
    left = sorted(path.parent.name for path in (folder / "preempted").glob("*/.metadata"))
    resumed = trained(recipe, folder / "preempted", is_terminated=False)
    return left, all(map(torch.equal, straight, resumed))


def test_a_preempted_job_goes_on_bit_for_bit(tmp_path: Path):
    assert run_ranks(2, preempted, "plain.py", tmp_path) == [(["step-4"], True)] * 2
