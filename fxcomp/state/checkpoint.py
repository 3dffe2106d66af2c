"""Turn a rank's state into plain tensors under names that no other rank uses, and back.

    {"rank": 1, "steps": 7, "residuals": {"a": [{"values": tensor, "start": 0}]}}
 -->
    {"rank1.residuals.a.0.values": tensor, "rank1.about": tensor of uint8}

Checkpoint libraries that deduplicate equal names over ranks keep all of them, and nothing has to be pickled. `about`
is JSON: the state without its tensors, which stand there by name.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp.errors import BadState
from fxcomp.plan.plan import Plan

PLAN, SCALE, GENERATORS = "followed plan", "scale of the loss", "generators"
"""Parts of a saved state: the plan in force, the factor of the loss that it is in the unit of, and the states of the
default random generators."""

NOTHING_YET = "nothing yet"
"""The only part of a state that was saved before anything could be owed. Where a library fills in the state that it
finds, it does not fit another one, so a library that would lose that one says so."""

_STORED = "stored under"
"""The key in `about` that stands for a tensor."""

_NAME = re.compile(r"rank(\d+)\.(.+)")


def to_tensors(state: Mapping[str, Any], rank: int | None = None) -> dict[str, Tensor]:
    """Name every tensor of a rank's state by its rank and its place in the state.

    `rank` is the job's number of a rank that counts itself among the ranks of a group.
    """
    tensors: dict[str, Tensor] = {}
    about = _without_tensors(state, "", tensors)
    rank = state["rank"] if rank is None else rank
    text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    return {f"rank{rank}.about": text, **{f"rank{rank}.{name}": value for name, value in tensors.items()}}


def _without_tensors(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors by their names, and collect them."""
    if isinstance(value, Tensor):
        assert place not in tensors, f"two tensors of a state are named {place!r}"
        tensors[place] = value.detach().contiguous()
        return {_STORED: place}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(held, _below(place, key), tensors) for key, held in _items(value)}
    if isinstance(value, list | tuple):
        return [_without_tensors(held, _below(place, number), tensors) for number, held in enumerate(_listed(value))]
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items())


def _listed(value: Any) -> Sequence[Any]:
    return value


def _below(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def states_of(given: Any) -> list[Any]:
    """List the states in what a rank was given: states, tensors of one or several of them, or a list of these.

    Raises BadState where tensors are not all there.
    """
    if given is None or (isinstance(given, Mapping) and not given):
        return []
    if not isinstance(given, Mapping):
        is_list = isinstance(given, list | tuple)
        return [state for each in _listed(given) for state in states_of(each)] if is_list else [given]
    ranks = saved_ranks(_names(given))
    states: list[Any] = [_state(given, rank) for rank in ranks] if ranks else [given]
    return [state for state in states if NOTHING_YET not in state]


def _names(given: Any) -> list[str]:
    return [name for name in given if isinstance(name, str)]


def saved_ranks(names: Sequence[str]) -> list[int]:
    """List the ranks whose states these tensors belong to; none, if they are of something else."""
    found = [_NAME.fullmatch(name) for name in names]
    return sorted({int(match[1]) for match in found if match is not None})


def _state(tensors: Any, rank: int) -> Any:
    try:
        text = bytes(tensors[f"rank{rank}.about"].cpu().tolist())
        return _with_tensors(json.loads(text), tensors, rank)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise BadState(
            f"the checkpoint of rank {rank} is not whole: {type(error).__name__}: {error}.\n"
            "  Load all tensors that step.checkpoint() returned there."
        ) from None


def _with_tensors(value: Any, tensors: Mapping[str, Tensor], rank: int) -> Any:
    if isinstance(value, dict):
        name = value.get(_STORED)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(name, str):
            return tensors[f"rank{rank}.{name}"]
        return {key: _with_tensors(held, tensors, rank) for key, held in _items(value)}
    if isinstance(value, list):
        return [_with_tensors(held, tensors, rank) for held in _listed(value)]
    return value


def saved_plan(saved: Any) -> Plan | None:
    """Read the plan that was followed, or warmed up for, when `saved` was; None if nothing says it.

    It is what `state_dict` or `checkpoint` returned. Raises BadState.
    """
    states = states_of(saved)
    if not all(isinstance(state, Mapping) for state in states):
        raise BadState(
            f"this is not a saved state; it is a {type(saved).__name__}.\n"
            "  Read the file first, with torch.load, load_file or fxcomp.read_checkpoint."
        )
    plans: list[Any] = [state[PLAN] for state in states if PLAN in state]
    return Plan.from_json(plans[0]) if plans else None


# A folder of torch.distributed.checkpoint


def read_checkpoint(
    folder: str | Path, under: str = "step", *, rank: int | None = None, ranks: int | None = None
) -> dict[str, Tensor]:
    """Read this rank's part of what `dcp.save({under: step.checkpoint(), ...})` wrote into a `folder`.

    `under` is the key there. Of r `ranks`, `rank` i, by default those of the process group, reads what the ranks i, i +
    r, i + 2r, ... saved, so that each state is read once. Give the result to `load_state_dict`; it is empty on a rank
    for which nothing was saved. No rank waits for another. Raises BadState.
    """
    # imported here: it takes a third of a second, which steps without checkpoints need not pay
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

    if not isinstance(folder, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadState(f"read_checkpoint takes the path of a folder; it is a {type(folder).__name__}")
    if not (Path(folder) / ".metadata").is_file():
        raise BadState(
            f"{str(folder)!r} holds no whole checkpoint: its .metadata, which is written last, is not there.\n"
            "  Load an earlier one."
        )
    in_group = dist.is_initialized()
    rank = (dist.get_rank() if in_group else 0) if rank is None else rank
    ranks = (dist.get_world_size() if in_group else 1) if ranks is None else ranks
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name.removeprefix(f"{under}.") for name in kept if name.startswith(f"{under}.")]
    savers = saved_ranks(names)
    if not savers:
        parts = ", ".join(sorted({repr(name.split(".")[0]) for name in kept}))
        raise BadState(
            f"the checkpoint in {str(folder)!r} holds no state of a step under {under!r}; it holds {parts}.\n"
            f"  Save it with {{{under!r}: step.checkpoint(), ...}}."
        )
    mine = {f"rank{saver}" for saver in savers if saver % ranks == rank}
    room: dict[str, Tensor] = {}
    for name in names:
        about = kept[f"{under}.{name}"]
        if name.split(".")[0] in mine and isinstance(about, TensorStorageMetadata):
            room[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():  # DCP warns of what `no_dist` asks for
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        if room:
            load({under: room}, checkpoint_id=folder, no_dist=True)
    return room


# Random generators


def generators(device: torch.device) -> dict[str, Tensor]:
    """Copy the states of the default generators: that of the CPU, and that of this rank's device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_generators(states: Sequence[Any], rank: int, ranks: int, device: torch.device) -> None:
    """Set the default generators to where this rank of as many left them, if one of these states says so."""
    for state in states:
        if GENERATORS in state and (state["rank"], state["ranks"]) == (rank, ranks):
            torch.set_rng_state(state[GENERATORS]["cpu"].cpu())
            if device.type != "cpu" and "device" in state[GENERATORS]:
                torch.get_device_module(device).set_rng_state(state[GENERATORS]["device"].cpu(), device)
