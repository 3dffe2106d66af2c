"""Say what happens to all gradients: buckets in the order in which they leave, with a strategy each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.plan.strategy import Collective, Strategy


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

    def __str__(self) -> str:
        return f"{len(self.names)} tensors, {self.elements:,} elements: {self.strategy}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of a plan's schedule: run stage `stage` of bucket `bucket` after compute region `region`."""

    region: int
    bucket: int
    stage: int


@lru_cache(maxsize=1024)
def launch_order(depth: tuple[int, ...]) -> tuple[Launch, ...]:
    """Return the schedule of buckets with so many stages each; see `Plan.schedule`."""
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
        """Return the order in which stages start, a function of the plan alone, so the same on every rank.

        Region k is the compute down to the last gradient of bucket k. After it stage 0 of bucket k starts, then
        stage 1 of bucket k-1 and so on: each later stage waits one region, for its wire to finish meanwhile.
        After the last region the rest follows in the same order. What follows a last collective is in here only where
        the pool does it; for all else the main thread would have to wait.
        """
        return launch_order(tuple(bucket.strategy.started_stages for bucket in self.buckets))

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
        """Raise BadPlan if a bucket's ranks share work by units that have unequal numbers of ranks."""
        for number, bucket in enumerate(self.buckets):
            for step in bucket.strategy.collectives:
                if not _is_even(step, cluster):
                    raise BadPlan(
                        f"bucket {number} of the plan goes by {step.kind.value}@{step.level.value}"
                        f" ({bucket.strategy}), which needs as many ranks on every host and in every rack; here the"
                        f" hosts have {cluster.shape}.\n"
                        "  Leave plan= out to let fxcomp choose, or write a strategy over @world, or one from"
                        " reduce@intra to broadcast@intra."
                    )

    def with_strategies(self, strategies: Sequence[Strategy]) -> Plan:
        """Replace the buckets' strategies."""
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


def _is_even(step: Collective, cluster: Cluster) -> bool:
    """Tell that every rank has a counterpart at a collective's level, or that one rank of each host does all."""
    match step.level:
        case Level.WORLD:
            return True
        case Level.INTRA:
            is_dense = step.kind in (CollectiveKind.REDUCE, CollectiveKind.BROADCAST)
            return cluster.is_even or is_dense
        case Level.INTER:
            return True
        case Level.RACK | Level.RACKS:
            return cluster.is_even and cluster.has_racks
