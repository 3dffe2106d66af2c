"""Copy rank 0's optimizer state to all ranks, like parameters and buffers.

Often only rank 0 loads a checkpoint. Without the copy, parameters would differ between ranks from the first step on.
Checksums find ranks that differ, without sending the state.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.capture.optimizer import FreshState, Owned, fresh_states, is_number, state_tensors
from fxcomp.capture.optimizer_state import is_fresh
from fxcomp.capture.probe import copied
from fxcomp.capture.training import Training
from fxcomp.ranks import Ranks
from fxcomp.runtime.arrivals import digest_of


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum per tensor, the sum of its bits as integers, with one copy to the host per device."""
    sums: list[int] = [0] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(tensors):
        places.setdefault(each.device, []).append(place)
    for here in places.values():
        found = torch.stack([digest_of(tensors[place]) for place in here])
        for place, one in zip(here, map(int, found.cpu()), strict=True):
            sums[place] = one
    return sums


def share_optimizer_state(training: Training, ranks: Ranks) -> tuple[str, ...]:
    """Copy rank 0's optimizer state to every rank if any rank's state differs; return notes for the report.

    Raises ReplicasDiffer if ranks keep different state tensors for a parameter.
    """
    if ranks.world_size == 1:
        return ()
    ranks.check_same("comparing the optimizers' states", _facts(training.owned))
    mine = _checks(training)
    everyone = ranks.gather("comparing the optimizers' values", zlib.crc32(repr(sorted(mine.items())).encode()))
    if len(set(everyone)) == 1:
        return ()
    theirs = ranks.from_rank_0("rank 0's optimizer state", lambda: _plain(training))
    with torch.no_grad():
        for owner in training.owned:
            _share(owner, theirs[owner.name], ranks)
    others = ", ".join(str(rank) for rank, check in enumerate(everyone) if check != everyone[0])
    return (f"the optimizer's state of rank 0 was copied to all ranks: it differed on rank {others}",)


def _share(owner: Owned, theirs: Mapping[str, Any], ranks: Ranks) -> None:
    state, fresh = owner.state, fresh_states(owner.optimizer)
    for value in state_tensors(state).values():
        sent = value.to(owner.parameter.device)  # a step counter may be on the host
        ranks.share([sent])
        if sent is not value:
            value.copy_(sent)
    for key, number in theirs["numbers"].items():
        state[key] = number
    if theirs["fresh"]:
        fresh[owner.parameter] = FreshState(state, copied(state))
    else:
        fresh.pop(owner.parameter, None)


def _facts(owned: Sequence[Owned]) -> dict[str, Any]:
    kept = {owner.name: state_tensors(owner.state) for owner in owned}
    return {
        f"the optimizer's state of {name!r}": ", ".join(
            f"{key} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for key, value in sorted(state.items())
        )
        for name, state in kept.items()
        if state
    }


def _plain(training: Training) -> dict[str, Any]:
    return {
        owner.name: {
            "numbers": {key: value for key, value in owner.state.items() if is_number(value)},
            "fresh": is_fresh(owner),
        }
        for owner in training.owned
    }


def _checks(training: Training) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {
        f"{key} of {owner.name}": value for owner in training.owned for key, value in state_tensors(owner.state).items()
    }
    sums = dict(zip(tensors, checksums(list(tensors.values())), strict=True))
    return {**sums, **{name: repr(sorted(plain.items())) for name, plain in _plain(training).items()}}
