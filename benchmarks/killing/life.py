"""One life of a rank: build or load a job, train it with checkpoints, and report how it ends."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxcomp
from fxcomp.state.checkpoint import states_of, to_tensors
from fxcomp.state.fields import CALENDAR, PLAN, SCALE
from fxcomp.step.calendar import IS_SETTLED
from killing.faults import Aim, Counts, Watch, give_memory_back, strike
from killing.kinds import SHAPES, START, Training, let_plans_race, saves_every, steps_of

UNNOTICED = 3
"""Last steps of a job, in which no fault strikes: other ranks might end without noticing it."""


@dataclass(frozen=True)
class Life:
    kind: str
    is_linear: bool
    folder: Path
    by: str
    resumes: bool = False
    aim: Aim | None = None
    counts: bool = False


def lived(life: Life, pipe: Connection | None = None) -> dict[str, Any]:
    """Train to the end; return what the verdict needs of this rank."""
    let_plans_race()
    rank, aim = dist.get_rank(), life.aim if life.aim and life.aim.victim == dist.get_rank() else None

    def struck() -> None:
        assert aim is not None, "there is an aim"
        assert pipe is not None, "a parent watches"
        strike(aim, pipe, life.folder)

    watch = Watch(aim, struck, counts=life.counts)
    with watch.phase("compiling"):
        job = START[life.kind](life.is_linear)
    torch.manual_seed(rank)
    first, is_followed = (0, None) if not life.resumes else _resumed(life, job, watch)
    steps = steps_of(life.kind)
    for number in range(first, steps):
        watch.is_off = number >= steps - UNNOTICED
        with watch.phase(job.phase(number)):
            job.train(number)
        if is_followed is not None and job.plan is not None and number == first:
            is_followed = job.plan.digest == is_followed if isinstance(is_followed, str) else is_followed
        with watch.phase("replanning"):
            job.replan(number)
        if (number + 1) % saves_every(life.kind) == 0:
            with watch.phase("saving"):
                _save(life, job, number + 1)
    give_memory_back()
    return _ended(job, first, is_followed, {phase: dict(found) for phase, found in watch.counts.items()})


# Checkpoints


def newest(folder: Path, by: str) -> tuple[int, Path] | None:
    """Return the last whole checkpoint and the number of its steps."""
    whole = [path for path in folder.glob("step-*") if is_whole(path, by)]
    return max(((int(path.name.removeprefix("step-")), path) for path in whole), default=None)


def is_whole(path: Path, by: str) -> bool:
    if by == "dcp":
        return (path / ".metadata").exists()
    files = sorted(path.glob("rank-*-of-*"))
    return bool(files) and len(files) == int(files[0].name.rpartition("-")[2])


def _save(life: Life, job: Training, steps: int) -> None:
    path, rank = life.folder / f"step-{steps}", dist.get_rank()
    if life.by == "dcp":
        parts: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True))
        parts["fxcomp"] = to_tensors(job.state(), rank)
        if job.scaler is not None:
            parts["scaler"] = job.scaler.state_dict()
        dcp.save(parts, checkpoint_id=path)
        return
    path.mkdir(exist_ok=True)
    whole = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "fxcomp": job.state()}
    if job.scaler is not None:
        whole["scaler"] = job.scaler.state_dict()
    part, name = path / f"part-{rank}", path / f"rank-{rank}-of-{dist.get_world_size()}"
    with part.open("wb") as file:
        torch.save(whole, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(name)
    if rank == 0:
        oldest = life.folder / f"step-{steps - 2 * saves_every(life.kind)}"
        for file in oldest.glob("*") if life.counts is False else ():
            file.unlink()


def _resumed(life: Life, job: Training, watch: Watch) -> tuple[int, str | bool | None]:
    """Load the newest checkpoint, if any. Return its number of steps, and whether the saved plan is in force.

    The second value is the digest of the saved plan if the job has no plan before its first step, and None if the
    saved plan need not be followed.
    """
    found = newest(life.folder, life.by)
    if found is None:
        return 0, None
    steps, path = found
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if life.by == "dcp":
        parts: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True))
        if job.scaler is not None:
            parts["scaler"] = job.scaler.state_dict()
        dcp.load(parts, checkpoint_id=path)
        set_state_dict(job.model, job.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        states: Any = fxcomp.read_checkpoint(path, "fxcomp")
        whole = {"scaler": parts.get("scaler")}
    else:
        files = sorted(path.glob("rank-*-of-*"))
        read = [torch.load(file, weights_only=True) for file in files]
        whole = read[0]
        job.model.load_state_dict(whole["model"])
        job.optimizer.load_state_dict(whole["optimizer"])
        states = [each["fxcomp"] for each in read[rank::ranks]] or None
    if job.scaler is not None:
        job.scaler.load_state_dict(whole["scaler"])
    with watch.phase("loading"):
        job.load(states)
    return steps, _followed(job, states, ranks)


def _followed(job: Training, given: Any, ranks: int) -> str | bool | None:
    states = states_of(given)
    if not states:
        return None
    (saved, *_) = states
    if PLAN not in saved or saved["ranks"] != ranks or not saved.get(CALENDAR, {}).get(IS_SETTLED, True):
        return None
    digest = fxcomp.Plan.from_json(saved[PLAN]).digest
    return digest if job.plan is None else job.plan.digest == digest


# The end


def _ended(job: Training, first: int, is_followed: Any, counts: Counts) -> dict[str, Any]:
    parts = [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in job.model.parameters()]
    flat = torch.cat([part.flatten() for part in parts])
    return {
        "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16],
        "parameters": {name: part.double().numpy() for name, part in zip(SHAPES, parts, strict=True)},
        "owed": {name: value.numpy() for name, value in _owed(job.state()).items()},
        "began": first,
        "is_followed": None if isinstance(is_followed, str) else is_followed,
        "counts": counts,
        "plan": None if job.plan is None else job.plan.digest,
        "at": time.monotonic(),
    }


def _owed(state: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of the mean gradient that is still owed, in fp64."""
    ranks, scale = dist.get_world_size(), state.get(SCALE, 1.0)
    found = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in SHAPES.items()}
    for name, pieces in state.get("residuals", {}).items():
        for piece in pieces:
            above, below = piece["weight"]
            part = found[name][piece["start"] : piece["start"] + piece["values"].numel()]
            part.add_(piece["values"].double(), alpha=above / below)
    for name, value in state.get("owed", {}).items():
        found[name][: value.numel()] += value.double() / ranks
    return {name: value / scale for name, value in found.items()}
