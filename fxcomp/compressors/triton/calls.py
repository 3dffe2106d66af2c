"""One call of a compressor's kernels as one value; sizes, types and devices were checked before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from fxcomp.compressors.base import Compressor

C = TypeVar("C", bound="Compressor")


@dataclass(frozen=True, slots=True)
class Encoding(Generic[C]):
    """Fill `payload`; replace `residual` and `state`."""

    compressor: C
    bucket: Tensor
    residual: Tensor | None
    payload: Tensor
    segments: tuple[int, ...]
    state: Tensor | None
    agreed: Tensor | None


@dataclass(frozen=True, slots=True)
class Decoding(Generic[C]):
    """Fill `out` with the mean over ranks."""

    compressor: C
    payloads: Tensor
    ranks: int
    segments: tuple[int, ...]
    out: Tensor
    agreed: Tensor | None
    state: Tensor | None

    @property
    def payload_elements(self) -> int:
        return len(self.payloads) // self.ranks


@dataclass(frozen=True, slots=True)
class Proposal(Generic[C]):
    """Fill `out` with what the ranks reduce before they compress."""

    compressor: C
    bucket: Tensor
    residual: Tensor | None
    segments: tuple[int, ...]
    state: Tensor | None
    out: Tensor
