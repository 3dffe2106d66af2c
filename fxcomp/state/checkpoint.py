"""Convert a rank's state to plain tensors under names unique to the rank, and back.

    {"rank": 1, "steps": 7, "residuals": {"a": [{"values": tensor, "start": 0}]}}
 -->
    {"rank1.residuals.a.0.values": tensor, "rank1.about": tensor of uint8}

Because names are unique, libraries that deduplicate them over ranks keep all tensors. `about` is the state as JSON
instead of pickle, with tensors replaced by names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp.errors import BadState, FxcompError
from fxcomp.plan.plan import Plan
from fxcomp.state import checkpoint_folder
from fxcomp.state.fields import GENERATORS, PLAN, check_state, flat_tensor

NOTHING_YET = "nothing yet"
"""Key of a state saved before any gradient: a list of the loaded states that wait for the first, mostly empty.

An empty state would make in-place loading ignore the checkpoint.
"""

_STORED = "stored under"
"""Key in `about` that marks a tensor."""

_NAME = re.compile(r"rank(\d{1,9})\.(.+)")


def to_tensors(state: Mapping[str, Any], rank: int | None = None) -> dict[str, Tensor]:
    """Name every tensor of a rank's state by rank and path in the state.

    Pass the job's `rank` if the state's own rank counts within a smaller group.
    """
    tensors: dict[str, Tensor] = {}
    about = _without_tensors(state, "", tensors)
    rank = state["rank"] if rank is None else rank
    text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    return {f"rank{rank}.about": text, **{f"rank{rank}.{name}": value for name, value in tensors.items()}}


def _without_tensors(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
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


def states_of(given: Any, depth: int = 0) -> list[Any]:
    """Return the states in `given`: a state, tensors of `to_tensors`, or a list of either.

    Raises BadState if tensors are missing, a checksum is wrong, or a field of a state is missing or impossible.
    """
    if given is None or (isinstance(given, Mapping) and not given):
        return []
    if not isinstance(given, Mapping):
        if not isinstance(given, list | tuple) or depth == 3:  # lists of lists may be endless
            return [check_state(given)]
        return [state for each in _listed(given) for state in states_of(each, depth + 1)]
    ranks = saved_ranks([name for name in _listed(given) if isinstance(name, str)])
    states: list[Any] = [_state(given, rank) for rank in ranks] if ranks else [given]
    return [check_state(state) for each in states for state in _with_waiting(each)]


def _with_waiting(state: Any) -> Sequence[Any]:
    if not isinstance(state, Mapping) or NOTHING_YET not in state:
        return [state]
    return _listed(state[NOTHING_YET]) if isinstance(state[NOTHING_YET], list) else []


def saved_ranks(names: Sequence[str]) -> list[int]:
    """Return the ranks in the names of saved tensors. Other names are ignored."""
    found = [_NAME.fullmatch(name) for name in names]
    return sorted({int(match[1]) for match in found if match is not None})


def _state(tensors: Any, rank: int) -> Any:
    try:
        text = bytes(flat_tensor(tensors[f"rank{rank}.about"], "about").cpu().numpy())
        return _with_tensors(json.loads(text), tensors, rank)
    except (KeyError, ValueError, AttributeError, TypeError, RecursionError) as error:
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
    """Return the plan of a `saved` state or checkpoint, even if the job was still in the plan's warm-up.

    Returns None if the state has no plan. Raises BadState if `saved` is not a state.
    """
    plans: list[Any] = [state[PLAN] for state in states_of(saved) if PLAN in state]
    return Plan.from_json(plans[0]) if plans else None


# torch.distributed.checkpoint


def read_checkpoint(
    folder: str | Path, under: str = "step", *, rank: int | None = None, ranks: int | None = None
) -> dict[str, Tensor]:
    """Read this rank's part of a `folder` written by `dcp.save({under: step.checkpoint(), ...})`.

    `rank` i of r `ranks` (default: the process group's) reads the states that ranks i, i + r, ... saved, so that each
    state is read once. Pass the result, empty if there is no such state, to `load_state_dict`. Ranks do not
    communicate. Raises BadState if the folder has no checkpoint with the key `under`, or is damaged. No code in the
    folder is run: no class or function that its pickles name is used.
    """
    if not isinstance(folder, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadState(f"read_checkpoint takes the path of a folder; it is a {type(folder).__name__}")
    folder = Path(folder)
    if not (folder / ".metadata").is_file():
        raise BadState(
            f"{str(folder)!r} holds no whole checkpoint: its .metadata, which is written last, is not there.\n"
            f"  Load an earlier one{_beside(folder)}."
        )
    here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rank, ranks = here[0] if rank is None else rank, here[1] if ranks is None else ranks

    def is_mine(name: str) -> bool:
        match = _NAME.fullmatch(name)
        return match is not None and int(match[1]) % ranks == rank

    try:
        mine, names = checkpoint_folder.read(folder, under, is_mine)
        states_of(mine)
    except FxcompError as error:
        raise BadState(
            f"the checkpoint in {str(folder)!r} cannot be used: {str(error).splitlines()[0]}\n"
            f"  Load an earlier one on every rank{_beside(folder)}."
        ) from None
    if not saved_ranks([name.removeprefix(f"{under}.") for name in names if name.startswith(f"{under}.")]):
        parts = ", ".join(sorted({repr(name.split(".")[0]) for name in names}))
        raise BadState(
            f"the checkpoint in {str(folder)!r} holds no state of a step under {under!r}; it holds {parts}.\n"
            f"  Save it with {{{under!r}: step.checkpoint(), ...}}."
        )
    return mine


def _beside(folder: Path) -> str:
    """Name the newest of the earlier whole checkpoints in the same folder, if there is one."""
    with suppress(OSError, ValueError, RuntimeError):  # a checkpoint that others delete, no path, a loop of links
        here = folder.resolve()
        written = {each.parent.resolve(): each.stat().st_mtime for each in here.parent.glob("*/.metadata")}
        now = written.pop(here, math.inf)
        earlier = [each for each, at in written.items() if at <= now]
        return f", such as {str(max(earlier, key=lambda each: written[each]))!r}" if earlier else ""
    return ""


# Random generators


def generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_generators(states: Sequence[Any], rank: int, ranks: int, device: torch.device) -> None:
    """Restore the default generators from the state that the same rank saved, if the number of ranks is the same."""
    for state in states:
        if GENERATORS in state and (state["rank"], state["ranks"]) == (rank, ranks):
            if "cpu" in state[GENERATORS]:
                torch.set_rng_state(state[GENERATORS]["cpu"].cpu())
            if device.type != "cpu" and "device" in state[GENERATORS]:
                torch.get_device_module(device).set_rng_state(state[GENERATORS]["device"].cpu(), device)
