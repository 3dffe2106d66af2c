"""The steps that strategies are made of, and their text.

compress(int8)@gpu      on the device, or on the host: compress(int8)@cpu
all_gather@world        a collective, and the ranks that meet in it
decompress@gpu
propose(powersgd(4))@gpu > all_reduce@world      what ranks agree on before they compress
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from fxcomp.cluster.cluster import Level
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadStrategy
from fxcomp.plan.collective_kind import CollectiveKind


class Device(Enum):
    """The place where a compressor runs. Without a GPU, `gpu` is the main thread and `cpu` the pool."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Collective:
    kind: CollectiveKind
    level: Level

    def __str__(self) -> str:
        return f"{self.kind.value}@{self.level.value}"


@dataclass(frozen=True, slots=True)
class Propose:
    """Make what the ranks reduce to an agreement before they compress."""

    compressor: Compressor
    device: Device = Device.GPU

    def __str__(self) -> str:
        return f"propose({self.compressor})@{self.device.value}"


@dataclass(frozen=True, slots=True)
class Compress:
    compressor: Compressor
    device: Device = Device.GPU

    def __str__(self) -> str:
        return f"compress({self.compressor})@{self.device.value}"


@dataclass(frozen=True, slots=True)
class Decompress:
    device: Device = Device.GPU

    def __str__(self) -> str:
        return f"decompress@{self.device.value}"


Step = Collective | Propose | Compress | Decompress


def text_of(steps: tuple[Step, ...]) -> str:
    return " > ".join(map(str, steps))


def parse_steps(text: str) -> tuple[Step, ...]:
    """Read the text form back. Raises BadStrategy."""
    return tuple(_parse_step(part.strip(), text) for part in text.split(">"))


def _parse_step(part: str, whole: str) -> Step:
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?(?:@(\w+))?", part)
    if match is None:
        raise BadStrategy(f"cannot read {part!r} in the strategy {whole!r}")
    name, argument, place = match.groups()
    try:
        if name in ("propose", "compress") and argument:
            make = Propose if name == "propose" else Compress
            return make(parse_compressor(argument), Device(place or "gpu"))
        if name == "decompress" and argument is None:
            return Decompress(Device(place or "gpu"))
        if argument is None and place is not None:
            return Collective(CollectiveKind(name), Level(place))
    except ValueError as error:
        raise BadStrategy(f"cannot read {part!r} in the strategy {whole!r}: {error}") from None
    raise BadStrategy(
        f"cannot read {part!r} in the strategy {whole!r}: expected compress(...)@gpu, decompress@gpu, "
        "or a collective with a level such as all_reduce@world"
    )
