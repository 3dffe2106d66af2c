"""A loop in torchtitan's shape trains replicas of shards, and goes on from its checkpoint bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.recipes import loaded

import fxcomp


def straight_and_resumed(folder: Path, plan: str) -> tuple[list[str], list[str]]:
    """List what differs, and the residuals that were saved."""
    recipe: Any = loaded("hsdp.py")
    recipe.SAVE_EVERY = 8
    straight = recipe.main(folder / "straight", 12, plan)
    recipe.main(folder / "resumed", 8, plan)
    resumed = recipe.main(folder / "resumed", 12, plan)
    one, other = (fxcomp.read_checkpoint(folder / each / "step-12", "replicas") for each in ("straight", "resumed"))
    wrong = [name for name, value in straight.items() if not torch.equal(value, resumed[name])]
    wrong += [n for n, value in one.items() if not n.endswith(".about") and not torch.equal(value, other[n])]
    return wrong, [name for name, value in one.items() if ".residuals." in name and bool(value.any())]


@pytest.mark.slow
def test_replicas_of_shards_go_on_bit_for_bit(tmp_path: Path):
    for rank, (wrong, residuals) in enumerate(run_ranks(4, straight_and_resumed, tmp_path, "int4")):
        assert wrong == []
        assert residuals
        assert all(name.startswith(f"rank{rank}.") for name in residuals), "each rank has its own"
