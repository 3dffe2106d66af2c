"""Compare parameters and optimizer state between ranks in verified steps.

A 32-bit checksum of all values is sent with the flags of every verified step. If it differs, ranks search for the first
differing tensor and element.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fxcomp.capture.optimizer import state_tensors
from fxcomp.capture.training import Training
from fxcomp.errors import ReplicasDiffer
from fxcomp.ranks import Ranks
from fxcomp.state.rank_0s_state import checksums

BITS = 32


class Replicas:
    def __init__(self, training: Training, ranks: Ranks) -> None:
        self._ranks, self._tensors = ranks, dict[str, Tensor]()
        if ranks.world_size > 1:
            self._tensors = {owner.name: owner.parameter.detach() for owner in training.owned}
            for owner in training.owned:
                kept = sorted(state_tensors(owner.state).items())
                self._tensors |= {f"{key} of {owner.name}": value for key, value in kept}
        self._sums = checksums(list(self._tensors.values())) if self._tensors else []

    @property
    def flags(self) -> list[bool]:
        """Bits of the checksum, then their complements. Checksums differ if ranks set both a bit and its complement."""
        names = "".join(self._tensors).encode()
        digest = zlib.crc32(np.asarray(self._sums, dtype=np.int64).tobytes(), zlib.crc32(names))
        bits = [bool(digest >> place & 1) for place in range(BITS)]
        return [*bits, *(not bit for bit in bits)]

    def check(self, anywhere: Sequence[bool], step: int) -> None:
        """Raise ReplicasDiffer on all ranks if the checksums differ."""
        if any(one and zero for one, zero in zip(anywhere[:BITS], anywhere[BITS:], strict=True)):
            raise ReplicasDiffer(
                f"{self._difference()}: replicas have drifted apart before step {step}.\n"
                "  Change parameters and the optimizer's state on all ranks in the same way, or load a saved state on"
                " all of them. Compiling again starts from rank 0's.\n"
                "  No parameter has been updated in this step."
            )

    def _difference(self) -> str:
        mine = dict(zip(self._tensors, self._sums, strict=True))
        everyone = self._ranks.gather("comparing parameters", mine)
        first = everyone[0]
        for name in first:
            for place, theirs in enumerate(everyone):
                if theirs.get(name) != first[name]:
                    return self._element(name, place)
        missing = next(name for theirs in everyone for name in theirs if name not in first)
        return f"rank 0's optimizer keeps no {missing}, and another rank's does"

    def _element(self, name: str, place: int) -> str:
        there, here = self._ranks.numbers[place], self._ranks.numbers[0]
        found = self._tensors.get(name)
        sizes = self._ranks.gather("comparing sizes", None if found is None else list(found.shape))
        if sizes[place] != sizes[0] or found is None:
            return f"{name} has the shape {sizes[place]} on rank {there}, and {sizes[0]} on rank {here}"
        flat, start, stop = found.reshape(-1), 0, found.numel()
        while stop - start > 1:
            middle = (start + stop) // 2
            sums = self._ranks.gather("comparing values", checksums([flat[start:middle]])[0])
            start, stop = (start, middle) if sums[place] != sums[0] else (middle, stop)
        values = self._ranks.gather("comparing values", repr(flat[start].item()))
        index = [int(each) for each in torch.unravel_index(torch.tensor(start), found.shape)] if found.ndim else []
        return f"rank {there} has {values[place]} in {name}{index or ''}, rank {here} has {values[0]}"
