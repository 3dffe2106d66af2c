"""Checkpoints as people write them: a `Stateful` object, written while training goes on; mistakes are loud."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.jobs import JOBS, cross_entropy
from helpers.ranks import run_ranks
from helpers.recipes import loaded
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

import fxcomp

JOB = JOBS["mlp"]
STEPS = 12


def end(folder: Path, steps: int, every: int = 4) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train the recipe to its end; its parameters, and what its last checkpoint has of this rank's step."""
    recipe: Any = loaded("stateful.py")
    recipe.SAVE_EVERY = every
    model = recipe.main(folder, steps, compress="int4")
    return [p.detach().clone() for p in model.parameters()], fxcomp.read_checkpoint(recipe.newest(folder))


def straight_and_resumed(folder: Path) -> list[str]:
    parameters, saved = end(folder / "straight", STEPS)
    end(folder / "resumed", STEPS - 5)
    after, saved_after = end(folder / "resumed", STEPS)
    assert any("residuals" in name and bool(value.any()) for name, value in saved.items())
    assert {name.split(".")[0] for name in saved} == {f"rank{dist.get_rank()}"}
    wrong = [name for name, value in saved.items() if not torch.equal(value, saved_after[name])]
    return wrong + ["parameters"] * (not all(map(torch.equal, parameters, after)))


def test_the_recipe_goes_on_bit_for_bit_each_rank_with_its_own_residuals(tmp_path: Path):
    assert run_ranks(2, straight_and_resumed, tmp_path) == [[], []]


def trained_to(folder: Path, steps: int) -> tuple[list[float], str]:
    """Train from the newest checkpoint on; the sums of parameters, and where the last checkpoint is."""
    parameters, _ = end(folder, steps)
    recipe: Any = loaded("stateful.py")
    return [float(p.double().sum()) for p in parameters], recipe.newest(folder).name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_goes_on_with_more_ranks_and_with_fewer(tmp_path: Path):
    for ranks, steps in ((2, 5), (3, 9), (1, 11)):
        found = run_ranks(ranks, trained_to, tmp_path, steps)
        assert [name for _, name in found] == [f"step-{steps}"] * ranks
        assert all(sums == found[0][0] for sums, _ in found)


class Late(FileSystemWriter):
    """Writes when training has gone on for a while."""

    def prepare_global_plan(self, plans: Any) -> Any:
        time.sleep(0.5)
        return super().prepare_global_plan(plans)

    def write_data(self, *arguments: Any) -> Any:
        time.sleep(0.5)
        return super().write_data(*arguments)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    room = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in kept.items()
        if isinstance(about, TensorStorageMetadata)
    }
    dcp.load(room, checkpoint_id=folder)
    return room


def written_late(folder: Path, plan: str) -> tuple[list[str], bool]:
    """List what differs between a checkpoint written at once and one that was written while steps went on."""
    recipe: Any = loaded("stateful.py")
    model = JOB.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, JOB.batch(0), compress=plan)
    for index in range(4):
        step(JOB.batch(index, dist.get_rank()))
    parts = {"app": recipe.AppState(model, optimizer), "step": step.checkpoint()}
    dcp.save(parts, checkpoint_id=folder / "at once")
    writers = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(parts, storage_writer=Late(folder / "late"), process_group=writers)
    went_on = not saving.done()
    for index in range(4, 10):
        step(JOB.batch(index, dist.get_rank()))
        dist.all_reduce(torch.zeros(1))  # the loop's own collective, which the writers' must not meet
    went_on = went_on and not saving.done()
    saving.result()
    at_once, late = tensors_in(folder / "at once"), tensors_in(folder / "late")
    now = step.checkpoint()
    assert not all(torch.equal(value, late[f"step.{name}"]) for name, value in now.items() if "residuals" in name)
    assert at_once.keys() == late.keys()
    return [name for name, value in at_once.items() if not torch.equal(value, late[name])], went_on


@pytest.mark.parametrize("plan", ["int4", pytest.param("powersgd(2)", marks=pytest.mark.slow)])
def test_what_is_written_while_steps_go_on_is_the_state_of_the_step_that_was_saved(tmp_path: Path, plan: str):
    assert run_ranks(2, written_late, tmp_path, plan) == [([], True)] * 2


# Mistakes


class AllInOne:
    """An application's state with what fxcomp keeps inside, which DCP fills in where the sizes are known."""

    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.keeper.checkpoint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.keeper.load_state_dict(state["step"])


def itself(keeper: Any) -> Any:
    return keeper


def hooked() -> tuple[fxcomp.DdpHook, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8)))
    hook = fxcomp.ddp_hook(compress="int4")
    model.register_comm_hook(None, hook)  # pyright: ignore[reportUnknownMemberType]
    return hook, model


def passes(model: nn.Module, number: int) -> None:
    for index in range(number):
        model(torch.full((4, 8), index + dist.get_rank() + 0.3)).square().mean().backward()


def filled_in(folder: Path, part: Any) -> list[str]:
    """Save after a plan was made, and load by DCP into a new hook, whose state has no such tensors."""
    hook, model = hooked()
    passes(model, 8)
    dcp.save({"app": part(hook)}, checkpoint_id=folder)
    new, _ = hooked()
    said = ""
    try:
        dcp.load({"app": part(new)}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        said = str(error)
    dist.barrier()
    names = sorted(fxcomp.read_checkpoint(folder, "app.step")) if part is AllInOne else []
    return [said, *names]


def test_a_hooks_state_that_a_library_would_lose_is_refused(tmp_path: Path):
    """An empty state would be filled with nothing, and residuals dropped without a word."""
    for rank, (said, *names) in enumerate(run_ranks(2, filled_in, tmp_path / "all in one", AllInOne)):
        assert f"app.step.rank{rank}.about" in said
        assert "Size mismatch" in said
        assert f"rank{rank}.residuals.1.weight.0.values" in names, "read_checkpoint finds it there all the same"
    for said, *_ in run_ranks(2, filled_in, tmp_path / "by state_dict", itself):
        assert "Missing key" in said


def before_a_plan(folder: Path) -> tuple[list[str], bool]:
    hook, model = hooked()
    passes(model, 3)
    dcp.save({"step": hook.checkpoint()}, checkpoint_id=folder)
    new, model = hooked()
    saved = fxcomp.read_checkpoint(folder)
    new.load_state_dict(saved)
    passes(model, 3)
    return sorted(saved), fxcomp.saved_plan(saved) is None and new.plan is None


def test_a_hooks_checkpoint_from_before_its_plan_is_read_and_says_nothing(tmp_path: Path):
    found = run_ranks(2, before_a_plan, tmp_path)
    assert found == [([f"rank{rank}.about"], True) for rank in range(2)]
