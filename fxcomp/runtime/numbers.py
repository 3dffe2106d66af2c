"""The numbers of a step's lines that change without another program: compressors' parameters, and what follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxcomp.compressors import Compressor
from fxcomp.runtime.moves import Cut


@dataclass(frozen=True, slots=True)
class Numbers:
    """What lines take in the place of what is written in them, by the lines' names; empty for a program as emitted."""

    compressors: Mapping[str, Compressor] = field(default_factory=dict[str, Compressor])
    """Of lines that propose, compress or decompress."""
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut])
    """Of collectives: the elements that each rank owns."""
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Of payloads that are put in another order."""


AS_WRITTEN = Numbers()
"""Lines run as they are written."""
