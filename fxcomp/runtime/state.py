"""Keep what compression left out: one flat arena, a slice for each bucket, saved by parameter name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxcomp.errors import BadState


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where a bucket's residual lies: parameter names and sizes, and this rank's shard of the padded bucket.

    `on_host` for a compressor that runs there: its residual never crosses the bus.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shards: int = 1
    shard: int = 0
    on_host: bool = False

    @property
    def padded(self) -> int:
        return sum(self.sizes) + -sum(self.sizes) % self.shards


class Residuals:
    """The error-feedback state of one rank, fp32, zero at first.

    Parameters lie in plan order. A sharded bucket uses only this rank's part of its slice; the rest stays zero.
    """

    def __init__(self, layout: Sequence[BucketLayout], device: torch.device):
        self.layout = tuple(layout)
        self.arena = torch.zeros(sum(bucket.padded for bucket in layout), device=device)
        self._slices: list[Tensor] = []
        self._by_name: dict[str, Tensor] = {}
        offset = 0
        for bucket in layout:
            whole = self.arena[offset : offset + bucket.padded]
            if bucket.on_host and device.type != "cpu":
                whole = torch.zeros(bucket.padded, pin_memory=True)
            part = bucket.padded // bucket.shards
            self._slices.append(whole[bucket.shard * part : (bucket.shard + 1) * part])
            pieces = torch.split(whole[: sum(bucket.sizes)], list(bucket.sizes))
            for name, piece in zip(bucket.names, pieces, strict=True):
                self._by_name[name] = piece
            offset += bucket.padded

    def of_bucket(self, number: int) -> Tensor:
        """The slice that a bucket's compressor reads and replaces."""
        return self._slices[number]

    def of_parameter(self, name: str) -> Tensor:
        """A parameter's part, flat."""
        return self._by_name[name]

    @property
    def layout_hash(self) -> str:
        """A fingerprint of names and sizes, in no particular order of buckets."""
        sizes = sorted((name, piece.numel()) for name, piece in self._by_name.items())
        return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """A copy keyed by parameter name, so that another bucketing can load it."""
        return {
            "layout": self.layout_hash,
            "residuals": {name: piece.detach().clone() for name, piece in self._by_name.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in. Raises BadState if it belongs to other parameters."""
        saved: Any = state.get("residuals")
        if not isinstance(state.get("residuals"), Mapping):
            raise BadState("this is not a state of a compiled step: it has no residuals")
        for name, piece in self._by_name.items():
            if name not in saved or saved[name].numel() != piece.numel():
                found = f"{saved[name].numel():,} elements" if name in saved else "nothing"
                raise BadState(
                    f"the saved residuals have {found} for {name!r}, which has {piece.numel():,} elements.\n"
                    "  Load the state of the same model, saved by the same rank."
                )
        extra = [name for name in saved if name not in self._by_name]
        if extra or state.get("layout") != self.layout_hash:
            raise BadState(f"the saved residuals are of another model: they also hold {extra[:1]}")
        for name, piece in self._by_name.items():
            piece.copy_(saved[name])
