"""Say what happens to one bucket of gradients: a strategy, whose text form parses back.

    all_reduce@world
    compress(int8)@gpu > all_gather@world > decompress@gpu
    reduce_scatter@intra > compress(topk(0.01))@gpu > all_gather@inter > decompress@gpu > all_gather@intra
    propose(powersgd(4))@gpu > all_reduce@world > compress(powersgd(4))@gpu > all_reduce@world > decompress@gpu

The last is for a compressor whose ranks agree on something before they compress.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fxcomp.cluster.cluster import Cluster, Level
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


@dataclass(frozen=True, slots=True)
class Strategy:
    """The steps of one bucket between its gradients' production and their use."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _check_steps(self)

    @property
    def compressor(self) -> Compressor | None:
        return next((step.compressor for step in self.steps if isinstance(step, Compress)), None)

    @property
    def device(self) -> Device | None:
        """The compressor's device; None if there is none."""
        return next((step.device for step in self.steps if isinstance(step, Compress)), None)

    @property
    def is_dense(self) -> bool:
        return self.compressor is None

    @property
    def is_hierarchical(self) -> bool:
        """A host's ranks share the work: each carries its shard of the bucket between hosts."""
        return any(step.kind is CollectiveKind.REDUCE_SCATTER for step in self.collectives)

    @property
    def level(self) -> Level:
        """The level at which gradients become their mean: the ranks whose payloads meet."""
        return Level.INTER if self.is_hierarchical else self.collectives[0].level

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(step for step in self.steps if isinstance(step, Collective))

    @property
    def stages(self) -> tuple[tuple[Step, ...], ...]:
        """The steps cut after each collective, where the next step waits for the wire.

        The last stage holds what follows the last collective and may be empty.
        """
        stages: list[tuple[Step, ...]] = []
        current: list[Step] = []
        for step in self.steps:
            current.append(step)
            if isinstance(step, Collective):
                stages.append(tuple(current))
                current = []
        return (*stages, tuple(current))

    def bound(self, shapes: Sequence[Sequence[int]], cluster: Cluster) -> Compressor | None:
        """Bind the compressor to parameters of these shapes, or to an even part of each if a host shares them out."""
        if self.compressor is None:
            return None
        if self.is_hierarchical:
            shapes = [(-(-math.prod(shape) // cluster.ranks_per_host),) for shape in shapes]
        return self.compressor.bound_to(shapes, cluster.ranks_at(self.level))

    def __str__(self) -> str:
        return " > ".join(map(str, self.steps))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read the text form back. Raises BadStrategy."""
        return cls(tuple(_parse_step(part.strip(), text) for part in _split_steps(text)))

    @classmethod
    def flat(
        cls, compressor: Compressor | None, device: Device = Device.GPU, *, level: Level = Level.WORLD
    ) -> Strategy:
        """Reduce over all ranks at once."""
        return cls(_reduce(compressor, device, level))

    @classmethod
    def hierarchical(cls, compressor: Compressor | None, device: Device = Device.GPU) -> Strategy:
        """Reduce inside the host, then between hosts (compressed), then share inside the host."""
        scatter = Collective(CollectiveKind.REDUCE_SCATTER, Level.INTRA)
        share = Collective(CollectiveKind.ALL_GATHER, Level.INTRA)
        return cls((scatter, *_reduce(compressor, device, Level.INTER), share))


def _reduce(compressor: Compressor | None, device: Device, level: Level) -> tuple[Step, ...]:
    if compressor is None:
        return (Collective(CollectiveKind.ALL_REDUCE, level),)
    kind = CollectiveKind.ALL_REDUCE if compressor.is_linear else CollectiveKind.ALL_GATHER
    steps = (Compress(compressor, device), Collective(kind, level), Decompress(device))
    if compressor.facts.agreement is None:
        return steps
    return (Propose(compressor, device), Collective(CollectiveKind.ALL_REDUCE, level), *steps)


def _check_steps(strategy: Strategy) -> None:
    """Accept the two shapes that sum over every rank exactly once: flat and hierarchical."""
    steps, compressor, device = strategy.steps, strategy.compressor, strategy.device or Device.GPU
    if compressor is not None and compressor.facts.needs_whole_parameters and strategy.is_hierarchical:
        flat = " > ".join(map(str, _reduce(compressor, device, Level.WORLD)))
        raise BadStrategy(
            f"{compressor} compresses whole parameters, but in {str(strategy)!r} each rank has a shard of the bucket.\n"
            f"  Write {flat}"
        )
    legal = [_reduce(compressor, device, level) for level in Level]
    scatter = Collective(CollectiveKind.REDUCE_SCATTER, Level.INTRA)
    share = Collective(CollectiveKind.ALL_GATHER, Level.INTRA)
    legal.append((scatter, *_reduce(compressor, device, Level.INTER), share))
    if steps not in legal:
        shapes = "\n".join("  " + " > ".join(map(str, shape)) for shape in (legal[2], legal[3]))
        text = " > ".join(map(str, steps)) or "(no steps)"
        raise BadStrategy(
            f"the strategy {text!r} does not sum each gradient over all ranks once; write one of\n{shapes}"
        )


DENSE = Strategy((Collective(CollectiveKind.ALL_REDUCE, Level.WORLD),))


def _split_steps(text: str) -> list[str]:
    return text.split(">")


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
