"""Plan of a job: buckets of gradients in launch order, with a strategy each."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.plan.interpret import Standing
from fxcomp.plan.kinds import CollectiveKind, ElementType
from fxcomp.plan.strategy import Collective, Strategy


class ExchangePoint(Enum):
    """Tensor that the ranks average in a step."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"  # divided by the root of a frozen second moment


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one element type that share collectives: parameter names, sizes in elements, and a strategy.

    Compressors treat each parameter separately, e.g. with its own scales. A gradient may be cut into parts in several
    buckets: `starts` holds each part's offset in the flattened parameter (default 0).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strategy: Strategy
    starts: tuple[int, ...] = ()
    element_type: ElementType = ElementType.F32
    at: ExchangePoint = ExchangePoint.GRADIENT

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.sizes) or not 0 <= min(self.sizes) <= max(self.sizes) < 2**63:
            raise BadPlan(f"a bucket needs names and as many sizes, 0 or more each, not {self.names} and {self.sizes}")
        object.__setattr__(self, "starts", tuple(self.starts) or (0,) * len(self.names))
        if len(self.starts) != len(self.names) or min(self.starts) < 0:
            raise BadPlan(f"a bucket needs as many starts as names, 0 or more each, not {self.names} and {self.starts}")
        for each in self.strategy.compressors:
            if each.facts.is_exact and each.payload_dtype not in (self.element_type.narrow, self.element_type.dtype):
                raise BadPlan(
                    f"{each} sends {each.payload_dtype} values, and {self.names[0]!r} has {self.element_type}"
                    " gradients.\n  Name the mode 'lossless', which offers it for gradients proved to be such casts."
                )

    def holds(self, kind: ElementType) -> bool:
        """Return whether gradients of a type fit. A dense bucket of casts also takes uncast fp32 gradients."""
        is_dense_f32 = self.element_type.dtype is kind.dtype and self.strategy.is_dense
        return kind is self.element_type or (is_dense_f32 and kind is ElementType.F32)

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def dense_bytes(self) -> int:
        return self.element_type.itemsize * self.elements

    @property
    def extents(self) -> tuple[range, ...]:
        """Range of each parameter's flattened elements in this bucket."""
        return tuple(range(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def shapes(self, whole: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        """Return the shapes of the bucket's parts, from the shapes of whole parameters."""
        return [part_shape(whole[name], extent) for name, extent in zip(self.names, self.extents, strict=True)]

    def __str__(self) -> str:
        kind = "" if self.element_type is ElementType.F32 else f" of {self.element_type}"
        at = "" if self.at is ExchangePoint.GRADIENT else f", at the {self.at.value}"
        return f"{len(self.names)} tensors, {self.elements:,} elements{kind}{at}: {self.strategy}"


def part_shape(shape: Sequence[int], extent: range) -> tuple[int, ...]:
    """Return a part's shape: whole rows stay rows, other parts are flat."""
    if len(extent) == math.prod(shape):
        return tuple(shape)
    row = math.prod(shape[1:])
    if len(shape) > 1 and row and extent.start % row == 0 and extent.stop % row == 0:
        return (len(extent) // row, *shape[1:])
    return (len(extent),)


@dataclass(frozen=True, slots=True)
class Launch:
    """Schedule entry: run stage `stage` of bucket `bucket` after compute region `region`."""

    region: int
    bucket: int
    stage: int


@lru_cache(maxsize=1024)
def launch_order(depth: tuple[int, ...]) -> tuple[Launch, ...]:
    """Return the schedule for buckets with `depth[k]` stages; see `Plan.schedule`."""
    last, deepest = len(depth) - 1, max(depth, default=0)
    return tuple(
        Launch(region=min(turn, last), bucket=turn - stage, stage=stage)
        for turn in range(len(depth) + deepest)
        for stage in range(deepest)
        if 0 <= turn - stage <= last and stage < depth[turn - stage]
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """`buckets` in launch order, equal on all ranks."""

    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        for name, parts in self.parts.items():
            _check_parts(name, parts)
        for name in set(self.moved).intersection(
            n for b in self.buckets if b.at is ExchangePoint.GRADIENT for n in b.names
        ):
            raise BadPlan(f"the plan exchanges a part of {name} at the gradient, and another one at the momentum")

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters, ordered by their first parts."""
        return tuple(dict.fromkeys(name for bucket in self.buckets for name in bucket.names))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each parameter."""
        found = Counter[str]()
        for bucket in self.buckets:
            for name, size in zip(bucket.names, bucket.sizes, strict=True):
                found[name] += size
        return dict(found)

    @property
    def types(self) -> dict[str, ElementType]:
        return {name: bucket.element_type for bucket in self.buckets for name in bucket.names}

    @property
    def parts(self) -> dict[str, tuple[range, ...]]:
        found: dict[str, list[range]] = {}
        for bucket in self.buckets:
            for name, extent in zip(bucket.names, bucket.extents, strict=True):
                found.setdefault(name, []).append(extent)
        return {name: tuple(sorted(parts, key=lambda part: (part.start, part.stop))) for name, parts in found.items()}

    def labels(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the labels of a bucket's gradients, like `fc.weight[0:65536]` for a part."""
        sizes = self.sizes
        return tuple(
            name if len(extent) == sizes[name] else f"{name}[{extent.start}:{extent.stop}]"
            for name, extent in zip(bucket.names, bucket.extents, strict=True)
        )

    @property
    def is_dense(self) -> bool:
        """True if no bucket is compressed."""
        return all(bucket.strategy.is_dense for bucket in self.buckets)

    @property
    def moved(self) -> tuple[str, ...]:
        """Parameters whose momentum is exchanged."""
        moved = (bucket.names for bucket in self.buckets if bucket.at is ExchangePoint.MOMENTUM)
        return tuple(dict.fromkeys(name for names in moved for name in names))

    @property
    def moves_exchange(self) -> bool:
        return bool(self.moved)

    def at_momenta(self, staying: Collection[str] = ()) -> Plan:
        """Return the plan that exchanges momenta in compressed buckets.

        Buckets that share a parameter with a compressed bucket do too. Parameters in `staying` keep exchanging
        gradients, unless they share a bucket with a moved parameter.
        """
        compressed = {n for b in self.buckets if not b.strategy.is_dense for n in b.names}
        moved = {*self.moved, *(compressed - set(staying))}
        while more := {n for b in self.buckets if not moved.isdisjoint(b.names) for n in b.names} - moved:
            moved |= more
        points = [ExchangePoint.GRADIENT if moved.isdisjoint(b.names) else ExchangePoint.MOMENTUM for b in self.buckets]
        return self._at(points)

    def at_gradients(self) -> Plan:
        """Return the plan that exchanges gradients in all buckets."""
        return self._at([ExchangePoint.GRADIENT] * len(self.buckets))

    def _at(self, points: Sequence[ExchangePoint]) -> Plan:
        return Plan(tuple(replace(bucket, at=point) for bucket, point in zip(self.buckets, points, strict=True)))

    @property
    def digest(self) -> str:
        """Short hash, equal on all machines for equal plans."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def bucket_of(self, name: str) -> int:
        """Return the index of the last bucket that holds a part of this gradient."""
        return max(k for k, bucket in enumerate(self.buckets) if name in bucket.names)

    def schedule(self) -> tuple[Launch, ...]:
        """Return the order in which stages start, a function of the plan alone.

        Region k is the compute up to the last gradient of bucket k. After region k, stage 0 of bucket k starts, then
        stage 1 of bucket k-1, and so on, so that each collective overlaps one region. The remaining stages follow the
        last region. The stage after the last collective is included only if the pool runs it: on the main thread it
        would delay compute.
        """
        return launch_order(tuple(bucket.strategy.started_stages for bucket in self.buckets))

    def check_covers(self, sizes: Mapping[str, int], types: Mapping[str, ElementType] | None = None) -> None:
        """Raise BadPlan unless the plan covers exactly these gradients, sizes and, if given, types."""
        planned = self.sizes
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
                "  Name a mode to let fxcomp choose, or save a new plan with step.plan.save(path)."
            )
        for number, bucket in enumerate(self.buckets):
            for name in bucket.names:
                if types is None or bucket.holds(types[name]):
                    continue
                if bucket.element_type.narrow is not None and types[name] is ElementType.F32:
                    raise BadPlan(
                        f"bucket {number} of the plan sends the gradient of {name!r} in 16 bits, and here it is no cast"
                        " of a 16-bit value: autocast or the layer's use is another, or micro-batches are summed.\n"
                        f"  Pin it: Compress(within='lossless', pins={{{name!r}: 'dense'}}), or name 'balanced'."
                    )
                raise BadPlan(
                    f"bucket {number} of the plan holds {bucket.element_type} gradients; the gradient of {name!r}"
                    f" is {types[name]} here.\n"
                    "  Name a mode to let fxcomp choose, or save a new plan with step.plan.save(path)."
                )

    def check_fits(self, cluster: Cluster) -> None:
        """Raise BadPlan if a collective needs hosts or racks of equal size and the cluster's differ."""
        for number, bucket in enumerate(self.buckets):
            for held, step in zip(bucket.strategy.held, bucket.strategy.steps, strict=False):
                if isinstance(step, Collective) and not _is_even(held, step, cluster):
                    raise BadPlan(
                        f"bucket {number} of the plan goes by {step.kind.value}@{step.level.value}"
                        f" ({bucket.strategy}), which needs as many ranks on every host and in every rack; here the"
                        f" hosts have {cluster.shape}.\n"
                        "  Name a mode to let fxcomp choose, or write a strategy over @world, or one from"
                        " reduce@intra to broadcast@intra."
                    )

    def with_strategies(self, strategies: Sequence[Strategy]) -> Plan:
        pairs = zip(self.buckets, strategies, strict=True)
        return Plan(tuple(replace(bucket, strategy=strategy) for bucket, strategy in pairs))

    def differs_in_parameters_only(self, other: Plan) -> bool:
        """Return whether the plans differ in compressor parameters alone, so that one program can run both."""
        if len(self.buckets) != len(other.buckets):
            return False
        return all(
            (mine.names, mine.sizes, mine.starts, mine.element_type, mine.at)
            == (its.names, its.sizes, its.starts, its.element_type, its.at)
            and mine.strategy.differs_in_parameters_only(its.strategy)
            for mine, its in zip(self.buckets, other.buckets, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "version": 1,
            "buckets": [
                {"names": list(b.names), "sizes": list(b.sizes), "strategy": str(b.strategy)}
                | ({"starts": list(b.starts)} if any(b.starts) else {})
                | ({"type": str(b.element_type)} if b.element_type is not ElementType.F32 else {})
                | ({"at": b.at.value} if b.at is not ExchangePoint.GRADIENT else {})
                for b in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Build a plan from the `data` of `to_json`. Raise BadPlan."""
        try:
            if data["version"] != 1:
                raise BadPlan(f"this plan has version {data['version']!r}; this fxcomp reads version 1")
            return cls(
                tuple(
                    Bucket(
                        tuple(map(str, b["names"])),
                        tuple(map(int, b["sizes"])),
                        Strategy.parse(b["strategy"]),
                        tuple(map(int, b.get("starts", ()))),
                        ElementType(b.get("type", "f32")),
                        ExchangePoint(b.get("at", "gradient")),
                    )
                    for b in data["buckets"]
                )
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise BadPlan(f"this is not a plan: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`."""
        compat.save_json(path, self.to_json(), makes_folder=False)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the plan file `path`. Raise BadPlan."""
        try:
            return cls.from_json(compat.read_json(path))
        except OSError as error:
            raise BadPlan(f"cannot read the plan {path}: {error.strerror}") from None
        except (ValueError, FxcompError) as error:
            raise BadPlan(f"cannot read the plan {path}: {error}") from None

    def __str__(self) -> str:
        return "\n".join(f"bucket {k}: {bucket}" for k, bucket in enumerate(self.buckets))


def _check_parts(name: str, parts: Sequence[range]) -> None:
    """Raise BadPlan unless sorted parts cover a parameter without gaps or overlap."""
    end = 0
    for number, part in enumerate(parts):
        if part.start < end or (number and not part):
            raise BadPlan(f"the plan names {name} more than once: its elements from {part.start:,} on")
        if part.start > end:
            raise BadPlan(
                f"the plan leaves out elements {end:,} to {part.start - 1:,} of {name}.\n"
                "  The parts of a parameter in all buckets must cover it."
            )
        end = part.stop


def _is_even(held: Standing, step: Collective, cluster: Cluster) -> bool:
    """Return whether a collective can run with the sizes of the cluster's hosts and racks."""
    match step.level:
        case Level.WORLD:
            return True
        case Level.INTRA:
            is_dense = step.kind in (CollectiveKind.REDUCE, CollectiveKind.BROADCAST)
            return cluster.is_even or is_dense
        case Level.INTER:  # on uneven hosts only each host's first rank takes part
            return cluster.is_even or any(split.level is Level.INTRA for split in held.splits)
        case Level.RACK | Level.RACKS:
            return cluster.is_even and cluster.has_racks
