"""Strategy of one bucket: its steps, and a text form that parses back.

    all_reduce@world
    compress(int8)@gpu > all_gather@world > decompress@gpu
    compress(int4)@gpu > all_to_all@world > decompress@gpu > compress(int8)@gpu > all_gather@world > decompress@gpu
    reduce_scatter@intra > compress(topk(0.01))@gpu > all_gather@inter > decompress@gpu > all_gather@intra
    propose(powersgd(4))@gpu > all_reduce@world > compress(powersgd(4))@gpu > all_reduce@world > decompress@gpu
    compress(int4)@gpu > all_to_all@world > decompress@gpu > shards

The last strategy leaves each rank a shard, for fully_shard; all others end with whole gradients. docs/strategies.md has
pictures. `interpret.py` defines which steps fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxcomp.cluster.cluster import Level
from fxcomp.cluster.seating import Axis
from fxcomp.compressors import Compressor
from fxcomp.errors import BadStrategy
from fxcomp.plan.interpret import (
    EVERYWHERE,
    Collective,
    Compress,
    Decompress,
    Device,
    Propose,
    Standing,
    Step,
    interpret,
    parse_steps,
    text_of,
)
from fxcomp.plan.kinds import CollectiveKind


@dataclass(frozen=True, slots=True)
class ByLevel:
    """Levels of a strategy that sums densely over `inner`, innermost first, then exchanges sums over `outermost`.

    If `rooted`, the first rank of each inner group gets the whole sum, because shards of uneven hosts do not match.
    """

    inner: tuple[Level, ...]
    outermost: Level
    rooted: bool = False

    @property
    def splits(self) -> tuple[Collective, ...]:
        kind = CollectiveKind.REDUCE if self.rooted else CollectiveKind.REDUCE_SCATTER
        return tuple(Collective(kind, level) for level in self.inner)

    @property
    def joins(self) -> tuple[Collective, ...]:
        return tuple(Collective(split.kind.joined_by, split.level) for split in reversed(self.splits))


_SHARDS = " > shards"

FLAT = ByLevel((), Level.WORLD)
HOSTS = ByLevel((Level.INTRA,), Level.INTER)
RACKS = ByLevel((Level.INTRA, Level.RACK), Level.RACKS)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Compressions and collectives (`steps`) for one bucket, in order."""

    steps: tuple[Step, ...]
    ends_as_shards: bool = False
    """True if each rank keeps the mean of its shard."""

    def __post_init__(self) -> None:
        interpret(self.steps, self.ends_as_shards)

    @property
    def held(self) -> tuple[Standing, ...]:
        """State of the bucket before each step and at the end."""
        return interpret(self.steps, self.ends_as_shards)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """Compressors in the order of the steps."""
        return tuple(step.compressor for step in self.steps if isinstance(step, Compress))

    @property
    def compressor(self) -> Compressor | None:
        """First compressor; None if dense."""
        return next(iter(self.compressors), None)

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(step.device for step in self.steps if not isinstance(step, Collective))

    @property
    def is_dense(self) -> bool:
        return self.compressor is None

    @property
    def keeps_values(self) -> bool:
        """True if no compressor adds an error: the strategy is dense, or all its compressors are exact."""
        return all(compressor.facts.is_exact for compressor in self.compressors)

    @property
    def adds_in_rank_order(self) -> bool:
        """True if decompression adds values in rank order: all compressors are exact, and no collective sums."""
        return not self.is_dense and self.keeps_values and not any(each.kind.sums for each in self.collectives)

    @property
    def is_hierarchical(self) -> bool:
        return any(step.level is not Level.WORLD for step in self.collectives)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(step for step in self.steps if isinstance(step, Collective))

    @property
    def stages(self) -> tuple[tuple[Step, ...], ...]:
        """Steps, cut after each collective. The last stage may be empty."""
        stages: list[tuple[Step, ...]] = []
        current: list[Step] = []
        for step in self.steps:
            current.append(step)
            if isinstance(step, Collective):
                stages.append(tuple(current))
                current = []
        return (*stages, tuple(current))

    @property
    def pool_takes_arrivals(self) -> bool:
        """True if the pool launches the last collective and decompresses its result."""
        sent = [step.device for stage in self.stages[:-1] for step in stage if not isinstance(step, Collective)]
        arrived = [step.device for step in self.stages[-1] if not isinstance(step, Collective)]
        return sent[-1:] == [Device.CPU] and arrived[:1] == [Device.CPU]

    @property
    def started_stages(self) -> int:
        return len(self.collectives) + self.pool_takes_arrivals

    @property
    def leading_splits(self) -> int:
        """Number of leading steps that split dense values."""
        for number, step in enumerate(self.steps):
            if not isinstance(step, Collective) or not step.kind.splits:
                return number
        return len(self.steps)

    @property
    def uncompressed(self) -> Strategy:
        """Dense strategy over the same levels."""
        if self.ends_as_shards:
            return Strategy.scattered(None)
        begun = self.steps[: self.leading_splits]
        held = self.held[len(begun)]
        middle = [Collective(CollectiveKind.ALL_REDUCE, level) for level in _levels_along(EVERYWHERE - held.summed)]
        joins = [Collective(split.kind.joined_by, split.level) for split in reversed(held.splits)]
        return Strategy((*begun, *middle, *joins))

    def check_is_whole(self) -> None:
        if self.ends_as_shards:
            raise BadStrategy(
                f"the strategy {str(self)!r} leaves each rank a part of the mean, and all of it is needed here: only"
                " fxcomp.compress_reduce_scatter takes shards.\n"
                "  Name a mode to let fxcomp choose, or add the steps that gather the shards."
            )

    def differs_in_parameters_only(self, other: Strategy) -> bool:
        is_alike = len(self.steps) == len(other.steps) and self.ends_as_shards == other.ends_as_shards
        return is_alike and all(map(_is_retuned, self.steps, other.steps))

    def __str__(self) -> str:
        return text_of(self.steps) + (_SHARDS if self.ends_as_shards else "")

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Parse the `text` of a strategy. Raise BadStrategy."""
        steps = text.rstrip().removesuffix(_SHARDS)
        return cls(parse_steps(steps), ends_as_shards=steps != text.rstrip())

    @classmethod
    def flat(
        cls, compressor: Compressor | None, device: Device = Device.GPU, *, level: Level = Level.WORLD
    ) -> Strategy:
        """Return a strategy that reduces over all ranks of `level` at once."""
        return cls(_one_shot(compressor, device, level))

    @classmethod
    def hierarchical(
        cls, compressor: Compressor | None, device: Device = Device.GPU, *, by: ByLevel = HOSTS
    ) -> Strategy:
        """Return a strategy that reduces inside hosts, exchanges compressed values between hosts, and gathers inside
        hosts.
        """
        return cls((*by.splits, *_one_shot(compressor, device, by.outermost), *by.joins))

    @classmethod
    def two_shots(
        cls, first: Compressor | None, second: Compressor | None, device: Device = Device.GPU, *, by: ByLevel = FLAT
    ) -> Strategy:
        """Return a strategy that reduces shards, compressed by `first`, then gathers them, compressed by `second`.

        Inner levels of `by` are summed densely before the first shot. They gather the second shot's payloads undecoded.
        """
        deal = Collective(CollectiveKind.REDUCE_SCATTER if first is None else CollectiveKind.ALL_TO_ALL, by.outermost)
        share = [Collective(CollectiveKind.ALL_GATHER, by.outermost), *by.joins]
        steps = [deal] if first is None else [Compress(first, device), deal, Decompress(device)]
        steps += share if second is None else [Compress(second, device), *share, Decompress(device)]
        return cls((*by.splits, *steps))

    @classmethod
    def scattered(cls, compressor: Compressor | None, device: Device = Device.GPU) -> Strategy:
        """Return a strategy that leaves each rank the mean of its shard: the first of two shots."""
        if compressor is None:
            return cls((Collective(CollectiveKind.REDUCE_SCATTER, Level.WORLD),), ends_as_shards=True)
        deal = Collective(CollectiveKind.ALL_TO_ALL, Level.WORLD)
        return cls((Compress(compressor, device), deal, Decompress(device)), ends_as_shards=True)


def _levels_along(axes: frozenset[Axis]) -> list[Level]:
    """Return the level that spans all `axes`, or, if there is none, one level per axis."""
    whole = [level for level in Level if level.axes == axes]
    return whole or [level for level in Level if len(level.axes) == 1 and level.axes <= axes]


def _one_shot(compressor: Compressor | None, device: Device, level: Level) -> tuple[Step, ...]:
    if compressor is None:
        return (Collective(CollectiveKind.ALL_REDUCE, level),)
    kind = CollectiveKind.ALL_REDUCE if compressor.is_linear else CollectiveKind.ALL_GATHER
    steps = (Compress(compressor, device), Collective(kind, level), Decompress(device))
    if compressor.facts.agreement is None:
        return steps
    return (Propose(compressor, device), Collective(CollectiveKind.ALL_REDUCE, level), *steps)


DENSE = Strategy((Collective(CollectiveKind.ALL_REDUCE, Level.WORLD),))

__all__ = ["DENSE", "Collective", "Compress", "Decompress", "Device", "Propose", "Step", "Strategy"]


def _is_retuned(before: Step, after: Step) -> bool:
    match before, after:
        case (Propose(was, device), Propose(now, other)) | (Compress(was, device), Compress(now, other)):
            return device is other and type(was) is type(now) and _lines_of(was) == _lines_of(now)
        case _:
            return before == after


def _lines_of(compressor: Compressor) -> tuple[object, ...]:
    """Return the properties of a compressor that determine emitted code and per-rank state."""
    return (
        compressor.grain,
        compressor.feedback,
        compressor.bias,
        compressor.has_state,
        compressor.payload_dtype,
    )
