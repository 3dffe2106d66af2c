"""Make what compressors remember the same on ranks that must remember the same.

Ranks that compress the same values draw the same random bits, or they would send different payloads for one sum. A
state that has a label on several ranks is one that they share. Under another plan, or after loading, some of them may
have nothing to go on from: they take over from a rank that has.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch

from fxcomp.runtime.compressor_states import CompressorStates
from fxcomp.state.handover import Exchange


def share_memories(kept: CompressorStates, anew: Collection[str], exchange: Exchange) -> set[str]:
    """Give states that start anew here the values of a rank that goes on with them; every rank calls it.

    Returns the labels that no rank goes on with: those start anew everywhere.
    """
    shared = kept.shared()
    lacking = [label for label in shared if label in anew]
    wanted = set(itertools.chain(*exchange.gather("who lacks what", lacking)))
    if not wanted:
        return set()

    def giving() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for label in (label for label in shared if label in wanted and label not in anew):
            found[label] = shared[label].tolist()  # pyright: ignore[reportUnknownMemberType]
        return found

    givers = exchange.gather("joining", exchange.attempt("handing on what compressors remember", giving))

    def taking() -> set[str]:
        missing: set[str] = set()
        for label in lacking:
            given = next((giver[label] for giver in givers if label in giver), None)
            if given is None:
                missing.add(label)
            else:
                shared[label].copy_(torch.tensor(given, dtype=shared[label].dtype))
        return missing

    return exchange.attempt("taking over what compressors remember", taking)
