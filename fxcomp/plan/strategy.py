"""Say what happens to gradients: the strategy of one bucket, and the plan for all of them.

A strategy has a text form that parses back:

    all_reduce@world
    compress(int8)@gpu > all_gather@world > decompress@gpu
    reduce_scatter@intra > compress(topk(0.01))@gpu > all_gather@inter > decompress@gpu > all_gather@intra
    propose(powersgd(4))@gpu > all_reduce@world > compress(powersgd(4))@gpu > all_reduce@world > decompress@gpu

The last is for a compressor whose ranks agree on something before they compress.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadPlan, BadStrategy, FxcompError


class CollectiveKind(Enum):
    """A collective, in torch's spelling. Strategies use the first three, buffers the fourth; others have a price."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    GATHER = "gather"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__  # Enum's own runs in Python, for every price that the search asks for


class Device(Enum):
    """Where a compressor runs. Without a GPU, `gpu` is the main thread and `cpu` the pool."""

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
    """What happens to one bucket between its gradients' production and their use."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _check_steps(self)

    @property
    def compressor(self) -> Compressor | None:
        return next((step.compressor for step in self.steps if isinstance(step, Compress)), None)

    @property
    def device(self) -> Device | None:
        """Where the compressor runs; None if there is none."""
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
        """Where gradients become their mean: the ranks whose payloads meet."""
        return Level.INTER if self.is_hierarchical else self.collectives[0].level

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(step for step in self.steps if isinstance(step, Collective))

    @property
    def stages(self) -> tuple[tuple[Step, ...], ...]:
        """The steps cut behind each collective, where the next step waits for the wire.

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
        """The compressor for parameters of these shapes; for an even part of each where a host's ranks share them."""
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel as one: parameter names, their sizes in elements, and their strategy.

    Scales and counts of a compressor never mix parameters: each is a segment of its own.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strategy: Strategy

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.sizes):
            raise BadPlan(f"a bucket needs names and as many sizes, not {self.names} and {self.sizes}")

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def dense_bytes(self) -> int:
        return 4 * self.elements

    def segments(self, shards: int = 1, shard: int = 0) -> tuple[tuple[str, int], ...]:
        """What a shard of the padded bucket holds: names of parameters, with as many of their elements as lie in it.

        Padding is a segment of its own, named after the parameter that it follows.
        """
        if shards == 1:
            return tuple(zip(self.names, self.sizes, strict=True))
        padding = -self.elements % shards
        part = (self.elements + padding) // shards
        start, stop = shard * part, (shard + 1) * part
        found: list[tuple[str, int]] = []
        offset = 0
        for name, size in zip((*self.names, f"padding after {self.names[-1]}"), (*self.sizes, padding), strict=True):
            inside = min(stop, offset + size) - max(start, offset)
            if inside > 0:
                found.append((name, inside))
            offset += size
        return tuple(found)

    def __str__(self) -> str:
        return f"{len(self.names)} tensors, {self.elements:,} elements: {self.strategy}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of a plan's schedule: run stage `stage` of bucket `bucket` behind compute region `region`."""

    region: int
    bucket: int
    stage: int


@lru_cache(maxsize=1024)
def launch_order(depth: tuple[int, ...]) -> tuple[Launch, ...]:
    """The schedule of buckets with so many collectives each; see `Plan.schedule`."""
    last, deepest = len(depth) - 1, max(depth, default=0)
    return tuple(
        Launch(region=min(turn, last), bucket=turn - stage, stage=stage)
        for turn in range(len(depth) + deepest)
        for stage in range(deepest)
        if 0 <= turn - stage <= last and stage < depth[turn - stage]
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets in the order in which they leave, with a strategy each. Every rank must share it."""

    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise BadPlan(f"the plan names {', '.join(twice)} more than once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for bucket in self.buckets for name in bucket.names)

    @property
    def is_dense(self) -> bool:
        return all(bucket.strategy.is_dense for bucket in self.buckets)

    @property
    def digest(self) -> str:
        """A short fingerprint; equal plans have equal digests on every machine."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def bucket_of(self, name: str) -> int:
        return next(k for k, bucket in enumerate(self.buckets) if name in bucket.names)

    def schedule(self) -> tuple[Launch, ...]:
        """The order in which stages start, a function of the plan alone, so the same on every rank.

        Region k is the compute down to the last gradient of bucket k. Behind it stage 0 of bucket k starts, then
        stage 1 of bucket k-1 and so on: each later stage waits one region, for its wire to finish meanwhile.
        Behind the last region the rest follows in the same order. Final stages (the updates) are not in here.
        """
        return launch_order(tuple(len(bucket.strategy.collectives) for bucket in self.buckets))

    def check_covers(self, sizes: Mapping[str, int]) -> None:
        """Raise BadPlan unless the plan names exactly these gradients, with their sizes."""
        planned = {name: size for bucket in self.buckets for name, size in zip(bucket.names, bucket.sizes, strict=True)}
        unknown = [name for name in planned if name not in sizes]
        missing = [name for name in sizes if name not in planned]
        resized = [name for name in planned if name in sizes and planned[name] != sizes[name]]
        if unknown or missing or resized:
            parts = [
                f"it plans {unknown[0]!r}, which has no gradient here ({len(unknown)} such)" if unknown else "",
                f"it does not plan {missing[0]!r} ({len(missing)} such)" if missing else "",
                f"it plans {planned[resized[0]]:,} elements for {resized[0]!r}, which has {sizes[resized[0]]:,}"
                if resized
                else "",
            ]
            raise BadPlan(
                "the plan is for another model: " + "; ".join(part for part in parts if part) + ".\n"
                "  Leave plan= out to let fxcomp choose, or save a new plan with step.plan.save(path)."
            )

    def check_fits(self, cluster: Cluster) -> None:
        """Raise BadPlan if a bucket's ranks share work by host, and hosts have unequal numbers of ranks."""
        if cluster.is_even:
            return
        for number, bucket in enumerate(self.buckets):
            if bucket.strategy.is_hierarchical:
                raise BadPlan(
                    f"bucket {number} of the plan reduces inside each host first ({bucket.strategy}), which needs as"
                    f" many ranks on every host; here the hosts have {cluster.shape}.\n"
                    "  Leave plan= out to let fxcomp choose, or write a strategy over @world."
                )

    def with_strategies(self, strategies: Sequence[Strategy]) -> Plan:
        """The same buckets with other strategies."""
        pairs = zip(self.buckets, strategies, strict=True)
        return Plan(tuple(Bucket(bucket.names, bucket.sizes, strategy) for bucket, strategy in pairs))

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "buckets": [
                {"names": list(b.names), "sizes": list(b.sizes), "strategy": str(b.strategy)} for b in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Build a plan from `to_json`'s data. Raises BadPlan."""
        try:
            if data["version"] != 1:
                raise BadPlan(f"this plan has version {data['version']!r}; this fxcomp reads version 1")
            return cls(
                tuple(
                    Bucket(tuple(b["names"]), tuple(map(int, b["sizes"])), Strategy.parse(b["strategy"]))
                    for b in data["buckets"]
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadPlan(f"this is not a plan: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file. Raises BadPlan naming the file."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise BadPlan(f"cannot read the plan {path}: {error.strerror}") from None
        except (ValueError, RecursionError, FxcompError) as error:  # no text, no JSON, or no plan
            raise BadPlan(f"cannot read the plan {path}: {error}") from None

    def __str__(self) -> str:
        return "\n".join(f"bucket {k}: {bucket}" for k, bucket in enumerate(self.buckets))
