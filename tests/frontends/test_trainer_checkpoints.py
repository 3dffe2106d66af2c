"""A Trainer with `FxcompCallback` goes on with what is owed, wherever its checkpoint lies and however it is named."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from fxcomp.errors import FxcompError
from fxcomp.frontends.trainer import FxcompCallback
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

STEPS, SAVED = 6, 3
"""The steps of a training, and the step that is saved in its middle."""
TOPK = Strategy.parse("compress(topk(0.05)) > all_gather@world > decompress")
PLAN = Plan((Bucket(("body.2.bias", "body.2.weight", "body.0.bias", "body.0.weight"), (4, 128, 32, 256), TOPK),))


class Regression(nn.Module):
    """A model whose loss is its own, as the trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(inputs) - labels).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that differ."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.sin(torch.arange(8.0) * (index + 1))
        return {"inputs": inputs, "labels": inputs[:4] * index / 96}


class PassesOn(Trainer):
    """A trainer with a `train` of its own that takes anything."""

    def train(self, *arguments: Any, **named: Any) -> Any:
        self.was_called = True
        return super().train(*arguments, **named)


class Chooses(Trainer):
    """A trainer whose `train` finds its own checkpoint."""

    folder: str

    def train(self) -> Any:
        return super().train(resume_from_checkpoint=self.folder)


class Seen(TrainerCallback):
    """Notes the hook's state when training begins."""

    def __init__(self, ours: FxcompCallback) -> None:
        self._ours = ours
        self.states: list[dict[str, Any]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self._ours.hook is not None
        self.states.append(self._ours.hook.state_dict())


def under_torchrun() -> None:
    """Set the variables by which the library finds its place; the process group is there."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")


def trainer_in(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> tuple[Any, FxcompCallback]:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVED, per_device_train_batch_size=4, learning_rate=0.05,
        lr_scheduler_type="constant", optim="sgd", use_cpu=True, report_to=[], disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = kind(Regression(), arguments, train_dataset=Rows())
    callback = FxcompCallback(trainer, compress=PLAN)
    trainer.add_callback(callback)
    return trainer, callback


def owed(state: dict[str, Any]) -> list[Tensor]:
    kept = state.get("residuals", {})
    return [piece["values"] for name in sorted(kept) for piece in kept[name]]


def end_of(trainer: Any, callback: FxcompCallback) -> list[Tensor]:
    """Return parameters and residuals after training."""
    assert callback.hook is not None
    return [p.detach().clone() for p in trainer.model.parameters()] + owed(callback.hook.state_dict())


def is_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def copy_of(checkpoint: Path, place: Path) -> Path:
    """Copy a checkpoint, once for all ranks."""
    if dist.get_rank() == 0:
        shutil.copytree(checkpoint, place)
    dist.barrier()
    return place


def said_while(work: Callable[[], object]) -> list[str]:
    """Return the package's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in caught if str(each.message).startswith("fxcomp")]


def resumed_in_many_ways(place: Path) -> dict[str, Any]:
    """Return if training that goes on ends as without a stop, by the way in which the checkpoint is named."""
    trainer, callback = trainer_in(place / "straight")
    trainer.train()
    straight, checkpoint = end_of(trainer, callback), place / "straight" / f"checkpoint-{SAVED}"
    found: dict[str, Any] = {"something is owed": any(bool(each.any()) for each in straight[4:])}

    def goes_on(name: str, kind: type[Trainer], *arguments: Any, folder: Path | None = None, **named: Any) -> None:
        trainer, callback = trainer_in(place / name if folder is None else folder, kind)
        trainer.folder = str(checkpoint)
        said = said_while(lambda: trainer.train(*arguments, **named))
        found[name] = is_same(end_of(trainer, callback), straight), said

    moved = copy_of(checkpoint, place / "elsewhere" / "the third step")
    last = place / "last"
    copy_of(checkpoint, last / checkpoint.name)
    os.chdir(place)
    goes_on("another output_dir", Trainer, resume_from_checkpoint=str(checkpoint))
    goes_on("a position", Trainer, str(checkpoint))
    goes_on("a moved folder", Trainer, resume_from_checkpoint=str(moved))
    goes_on("a path", Trainer, resume_from_checkpoint=moved)
    goes_on("a relative path", Trainer, resume_from_checkpoint="elsewhere/the third step")
    goes_on("True", Trainer, folder=last, resume_from_checkpoint=True)
    goes_on("a train that passes on", PassesOn, str(moved))
    goes_on("a train that chooses", Chooses)
    return found


WAYS = (
    "another output_dir", "a position", "a moved folder", "a path", "a relative path", "True",
    "a train that passes on", "a train that chooses",
)  # fmt: skip


@dataclass
class OnTwoRanks:
    """Results of two ranks, and the checkpoint that they have left."""

    checkpoint: Path
    ways: list[dict[str, Any]]
    again: list[dict[str, Any]]


def on_two_ranks(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    under_torchrun()
    return resumed_in_many_ways(place / "ways"), trained_twice(place / "twice")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> OnTwoRanks:
    place = tmp_path_factory.mktemp("two")
    ways, again = zip(*run_ranks(2, on_two_ranks, place), strict=True)
    return OnTwoRanks(place / "twice" / "kept", list(ways), list(again))


def test_training_goes_on_bit_for_bit_from_a_checkpoint_however_it_is_named(two: OnTwoRanks):
    for found in two.ways:
        assert found.pop("something is owed")
        assert found == dict.fromkeys(WAYS, (True, []))


def trained_twice(place: Path) -> dict[str, Any]:
    """Train three times with one trainer; return claims on the second and third time, and on one that compiles."""
    trainer, callback = trainer_in(place / "straight")
    seen = Seen(callback)
    trainer.add_callback(seen)
    trainer.train()
    straight, hook = end_of(trainer, callback), callback.hook
    checkpoint = copy_of(place / "straight" / f"checkpoint-{SAVED}", place / "kept")  # the next training writes there
    bare = copy_of(checkpoint, place / "bare")
    (bare / f"fxcomp-rank{dist.get_rank()}.safetensors").unlink()
    torn = copy_of(checkpoint, place / "torn")
    mine = torn / f"fxcomp-rank{dist.get_rank()}.safetensors"
    if dist.get_rank() == 1:
        os.truncate(mine, mine.stat().st_size - 1)
        (bare / "fxcomp-rank0 (copy).safetensors").write_text("of another program")
    dist.barrier()
    found: dict[str, Any] = {"said": said_while(trainer.train)}
    found["goes on with what it owes"] = is_same(owed(seen.states[1]), straight[4:])
    found["has trained on"] = not is_same(end_of(trainer, callback), straight)
    found["said"] += said_while(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))
    found["goes back to a checkpoint"] = is_same(end_of(trainer, callback), straight)
    with pytest.raises(FxcompError) as refused:
        trainer.train(str(torn))
    found["error of a torn file"] = f"{type(refused.value).__name__}: {refused.value}"
    dist.barrier()
    if dist.get_rank() == 1:
        mine.unlink()
    dist.barrier()
    found["said of a missing file"] = said_while(lambda: trainer.train(str(torn)))
    found["said of a checkpoint without a state"] = said_while(lambda: trainer.train(str(bare)))
    found["owes nothing then"] = not owed(seen.states[-1])
    found["is one hook"] = callback.hook is hook
    compiling, callback = trainer_in(place / "compiled", torch_compile=True, torch_compile_backend="aot_eager")
    compiling.train()
    found["is the same compiled"] = is_same(end_of(compiling, callback), straight)
    return found


def test_a_trainer_trains_again_with_its_hook(two: OnTwoRanks):
    for rank, found in enumerate(two.again):
        said = found.pop("said of a checkpoint without a state")
        bare = str(two.checkpoint.parent / "bare")
        lost = f"fxcomp: {bare!r} has no state of a hook: earlier residuals are lost, once."
        assert said == ([] if rank else [lost])
        file = str(two.checkpoint.parent / "torn" / "fxcomp-rank1.safetensors")
        torn, error = f"BadState: {file!r}, the file of rank 1, cannot be used:", found.pop("error of a torn file")
        assert error.startswith(torn if rank else f"PeerFailed: rank 1 failed in reading the ranks' files: {torn}")
        said = found.pop("said of a missing file")
        assert [text.partition(" the residuals")[0] for text in said] == [
            "fxcomp: no rank loads the state of rank 1 of 2:"
        ] * (rank == 0)
        assert found.pop("said") == []
        assert all(found.values()), found


def goes_on_from(
    place: Path, checkpoint: Path, steps: int = STEPS, is_wrapped: bool = True
) -> tuple[list[str], list[str]]:
    """Return the warnings, and the files of the checkpoint at the end."""
    if is_wrapped:
        under_torchrun()
    trainer, _ = trainer_in(place)
    trainer.args.max_steps = steps
    said = said_while(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))
    dist.barrier()
    return said, sorted(each.name for each in (place / f"checkpoint-{STEPS}").glob("fxcomp*"))


def files_of(ranks: int) -> list[str]:
    return [f"fxcomp-rank{rank}.safetensors" for rank in range(ranks)]


def test_other_numbers_of_ranks_go_on_and_leave_no_files_of_more_ranks(two: OnTwoRanks, tmp_path: Path):
    for said, files in run_ranks(3, goes_on_from, tmp_path / "three", two.checkpoint):
        assert said == []
        assert files == files_of(3)
    by_three = tmp_path / "by three"
    shutil.copytree(tmp_path / "three" / f"checkpoint-{STEPS}", by_three)
    for said, files in run_ranks(2, goes_on_from, tmp_path / "three", by_three, STEPS + 1):
        assert said == []
        assert files == files_of(3)  # nothing has been saved there
    stale = tmp_path / "two" / f"checkpoint-{STEPS}"
    shutil.copytree(by_three, stale)
    for said, files in run_ranks(2, goes_on_from, tmp_path / "two", two.checkpoint):
        assert said == []
        assert files == files_of(2)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_one_rank_says_that_it_cannot_go_on_with_what_is_owed(is_wrapped: bool, two: OnTwoRanks, tmp_path: Path):
    [(said, files)] = run_ranks(1, goes_on_from, tmp_path, two.checkpoint, STEPS, is_wrapped)
    assert len(said) == 1
    assert said[0].endswith("earlier residuals are lost, once.")
    assert is_wrapped or said[0].startswith(f"fxcomp: {str(two.checkpoint)!r} has states of several ranks, and this")
    assert files == files_of(is_wrapped)
