"""Cost tables: measured prices with their sources, and estimates where measurements are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fxcomp import compat
from fxcomp.cluster.cluster import UNSHARED, Cluster, Level, Processors
from fxcomp.cluster.link import Link
from fxcomp.cluster.topology import TOPOLOGY_TEXT
from fxcomp.compressors import Compressor
from fxcomp.cost import collectives as formulas
from fxcomp.cost.checks import check_numbers
from fxcomp.cost.collectives import Library
from fxcomp.cost.contention import NO_TIME_US, TransportCost
from fxcomp.cost.measured import (
    CompressorCost,
    MeasuredCollective,
    compressor_key,
    exact_key,
    nearest_key,
    parse_compressor_key,
)
from fxcomp.cost.reading import TEXT, keyed, null_or, number, positive, record, whole, wrong
from fxcomp.cost.roofline import ASSUMED, Measured, Roofline
from fxcomp.errors import BadOption
from fxcomp.plan.interpret import Device, without_gpu
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.prices import CollectivePrice

VERSION = 6

ONE_CORE = Roofline(gflops=50.0, gb_per_s=10.0)  # assumed: one CPU core


@dataclass(frozen=True, slots=True)
class CostTable:
    """Numbers for predictions. Estimates never fail: missing measurements are assumed.

    - `hardware`, `versions`, `date`, `source`: description of the measurement.
    - `compute`: times by operator and shapes: `aten.mm f32[512,384] f32[384,384]`.
    - `roofline`: price of other operators.
    - `collectives`: times by topology: `all_reduce@4x1`; used instead of the cluster's links.
    - `compressors`: times by compressor, device and threads: `int8@cpu*2`.
    - `threads`: CPU threads that compressors may use.
    - `pack_gb_per_s`: rate of filling buckets.
    - `launch_us`: time to start a collective.
    - `transport`: processor time of collectives.
    - `copy_gb_per_s`: rate between host and device.
    - `processors`: processors of a rank.
    - `contention`: factor of `transport`, fitted to the job's steps.
    - `overlap_speed`: relative speed of a collective during compute, also fitted.
    - `feed_us`: host time of a step outside its nodes, which delays compute; 0 on an asynchronous device.
    - `host_us`: host time of a whole step on an asynchronous device, which computes meanwhile; otherwise 0.
    - `error`: relative error of a prediction.
    - `compute_error`: relative error added for estimated compute.
    - `estimate`: source of estimates.
    """

    hardware: str = "unknown"
    versions: str = ""
    date: str = ""
    source: str = ASSUMED
    compute: Mapping[str, Measured] = field(default_factory=dict[str, Measured])
    roofline: Roofline = ONE_CORE
    collectives: Mapping[tuple[CollectiveKind, str], MeasuredCollective] = field(
        default_factory=dict[tuple[CollectiveKind, str], MeasuredCollective]
    )
    compressors: Mapping[str, CompressorCost] = field(default_factory=dict[str, CompressorCost])
    threads: int | None = None  # None: as measured
    pack_gb_per_s: float = 5.0  # assumed
    launch_us: float = 20.0  # assumed
    transport: Mapping[CollectiveKind, TransportCost] = field(default_factory=dict[CollectiveKind, TransportCost])
    copy_gb_per_s: float | None = None  # None if the device is the host
    processors: Processors = UNSHARED  # assumed: no contention
    contention: float = 1.0
    overlap_speed: float = 1.0
    feed_us: float = 0.0
    host_us: float = 0.0
    error: float = 0.1  # assumed; a measured error is mostly due to links
    compute_error: float = 0.0
    estimate: str = ""

    __post_init__ = check_numbers

    def shown(self, text: str) -> str:
        """Format a strategy or a compressor's key. Without a GPU, device names become `main` and `pool`."""
        return text if self.copy_gb_per_s is not None else without_gpu(text)

    # Estimates

    def pack_us(self, size: float) -> float:
        return size / (self.pack_gb_per_s * 1e3)

    def copy_us(self, size: float) -> float:
        return 0.0 if self.copy_gb_per_s is None else size / (self.copy_gb_per_s * 1e3)

    def compute_us(self, key: str, flops: float, size: float, math_type: str = "f32") -> Measured:
        return self.compute.get(key) or Measured(self.roofline.us(flops, size, math_type), source=self.roofline.source)

    def collective(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> CollectivePrice:
        """Price a collective over `size` bytes: one rank's contribution (all_gather) or the full tensor."""
        group, measured, library = cluster.topology_at(level), self.measured(kind, level, cluster), self.library
        if measured is not None and measured[0] is kind:
            us = measured[1].us(size)
        else:
            if measured is None:
                us = formulas.collective_us(kind, size, group, library=library)
            else:
                known, found = measured
                us = found.us_of_another(size, formulas.likeness(known, kind, group, library))
            us += self.pack_us(formulas.added_bytes(kind, size, group.ranks, library))
        taken = self.transport.get(kind)
        if taken is None and kind is not CollectiveKind.ALL_REDUCE:  # direct sends cost as much as a gather
            taken = self.transport.get(CollectiveKind.ALL_GATHER)
        taken = taken or self.transport.get(CollectiveKind.ALL_REDUCE)
        if taken is None:
            return CollectivePrice(us)
        load = 0.0
        if us >= NO_TIME_US:
            sent = formulas.wire_bytes(kind, group.ranks, size, formulas.large_algorithm(kind, group, library))
            load = self.contention * (taken.us + taken.us_per_mb * sent / 1e6) / us
        return CollectivePrice(us, load, self.overlap_speed)

    @property
    def library(self) -> Library:
        """Library of collectives: gloo if the device is the host."""
        return Library.GLOO if self.copy_gb_per_s is None else Library.NCCL

    def collective_breaks(self, kind: CollectiveKind, level: Level, cluster: Cluster) -> list[float]:
        """Return the sizes between which the time is linear, or a minimum of linear functions."""
        measured = self.measured(kind, level, cluster)
        if measured is None:
            return []
        known, found = measured
        like = formulas.likeness(known, kind, cluster.topology_at(level), self.library)
        share = 1.0 if known is kind else like.bytes_per_byte
        return [size / share for size in found.fit.breaks] if share else []

    @property
    def offloads(self) -> bool:
        """True if the CPU pool may compress: a processor is free, and CPU times are known."""
        is_known = self.copy_gb_per_s is None or any(key.endswith(f"@{Device.CPU.value}") for key in self.compressors)
        return is_known and self.processors.has_spare

    @property
    def pool_load(self) -> float:
        """Number of processors that the CPU pool takes from compute: 0 if compute has a separate device."""
        return 1.0 if self.copy_gb_per_s is None else 0.0

    def encode_us(self, compressor: Compressor, elements: int, device: Device = Device.GPU) -> float:
        _, known = self._compressor(compressor, device)
        if known:
            return known.encode_us(elements)
        # Read gradient and residual, write residual: error feedback's minimum.
        return self.roofline.us(0.0, 12.0 * elements)

    def propose_us(self, compressor: Compressor, elements: int, device: Device = Device.GPU) -> float:
        if compressor.facts.agreement is None:
            return 0.0
        _, known = self._compressor(compressor, device)
        if known:
            return known.propose_us(elements)
        # Read gradient and residual.
        return self.roofline.us(0.0, 8.0 * elements)

    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = Device.GPU) -> float:
        _, known = self._compressor(compressor, device)
        if known:
            return known.decode_us(elements, ranks)
        # Read payloads of a byte per value (assumed), write the mean.
        return self.roofline.us(0.0, (ranks + 4.0) * elements)

    def compressor_breaks(self, compressor: Compressor, device: Device, payloads: int) -> list[float]:
        _, known = self._compressor(compressor, device)
        if known:
            return known.breaks
        at_launch = self.roofline.launch_us * self.roofline.gb_per_s * 1e3
        return [at_launch / touched for touched in (8.0, 12.0, payloads + 4.0)]

    def has_measured(self, compressor: Compressor, device: Device = Device.GPU) -> bool:
        return exact_key(self.compressors, compressor, device.value, self.threads) is not None

    def compressor_source(self, compressor: Compressor, device: Device = Device.GPU) -> str:
        """Format the source of a compressor's cost, such as `measured`."""
        if self.has_measured(compressor, device):
            return f"estimated: {self.estimate}" if self.estimate else "measured"
        key, _ = self._compressor(compressor, device)
        return f"{ASSUMED}, as {self.shown(key)}" if key else f"{ASSUMED}, by memory bandwidth"

    def error_of(self, free_us: float, step_us: float) -> float:
        """Return the relative error of a predicted step; `free_us` is its time without communication."""
        return self.error + self.compute_error * min(1.0, free_us / step_us if step_us > 0 else 1.0)

    # Text and files

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "version": VERSION,
            **own,
            "compute": {key: asdict(value) for key, value in self.compute.items()},
            "roofline": asdict(self.roofline),
            "collectives": {
                f"{kind.value}@{topology}": v.to_json() for (kind, topology), v in self.collectives.items()
            },
            "compressors": {key: known.to_json() for key, known in self.compressors.items()},
            "transport": {kind.value: asdict(taken) for kind, taken in self.transport.items()},
            "processors": None if math.isinf(self.processors.count) else asdict(self.processors),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """Build a table from the `data` of `to_json`. Raise BadOption with the path of an error."""
        try:
            if not isinstance(data, dict):
                raise wrong("", "an object, as fxcomp calibrate writes it", data)
            entries = {key: value for key, value in data.items() if key != "version"}
            if data.get("version") != VERSION:
                raise BadOption(
                    f"its version is {data.get('version')!r}; this fxcomp reads version {VERSION}, which fxcomp"
                    " calibrate writes"
                )
            return _TABLE(entries, "")
        except BadOption as error:
            raise BadOption(f"this is not a cost table: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the table to `path` atomically, because several ranks may use it."""
        compat.save_json(path, self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> CostTable:
        """Read the table at `path`. Raise BadOption if the file is missing or wrong."""
        try:
            return cls.from_json(compat.read_json(path))
        except BadOption as error:
            raise BadOption(f"cannot read the cost table {path}: {error}") from None
        except (OSError, ValueError) as error:
            raise BadOption(
                f"cannot read the cost table {path}: {error}.\n  fxcomp calibrate -o FILE writes one."
            ) from None

    def measured(
        self, kind: CollectiveKind, level: Level, cluster: Cluster
    ) -> tuple[CollectiveKind, MeasuredCollective] | None:
        """Return `kind` and its measurement, or else the first measured stand-in and the stand-in's measurement."""
        if not self.collectives:
            return None
        group = cluster.topology_at(level)
        found = self.collectives.get((kind, group.text))
        if found is not None:
            return kind, found
        for known in formulas.stand_ins(kind, group, self.library):
            found = self.collectives.get((known, group.text))
            if found is not None:
                return known, found
        return None

    def _compressor(self, compressor: Compressor, device: Device) -> tuple[str, CompressorCost] | tuple[str, None]:
        """Return the key that `nearest_key` finds, and its cost. Without a GPU, keys of any device match."""
        places = [device.value] if self.copy_gb_per_s is not None else [device.value, "gpu", "cpu"]
        key = nearest_key(self.compressors, compressor, places, self.threads)
        return (key, self.compressors[key]) if key else ("", None)


# Formatting


def collective_source(costs: CostTable, kind: CollectiveKind, level: Level, cluster: Cluster) -> str:
    measured = costs.measured(kind, level, cluster)
    if measured is None:
        return f"the cluster's link, {cluster.link_at(level)}"
    known, found = measured
    return found.source if known is kind else f"{ASSUMED}, as {known.value}: {found.source}"


def collective_formula(costs: CostTable, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> str:
    """Format the price of `collective`: the formula with numbers, or the measurement."""
    group, measured = cluster.topology_at(level), costs.measured(kind, level, cluster)
    if measured is not None:
        known, found = measured
        us = costs.collective(kind, level, size, cluster).us
        name = kind.value if kind is known else f"{kind.value}, priced as {known.value},"
        took = f"{size / 1e6:.3g} MB take {us / 1e3:.4g} ms ({found.source})"
        return f"{name} as measured among {found.ranks} ranks: {took}"
    added_us = costs.pack_us(formulas.added_bytes(kind, size, group.ranks, costs.library))
    return formulas.format_collective_us(kind, size, group, costs.library, added_us)


def link_of(costs: CostTable, *, between_hosts: bool) -> Link | None:
    """Return the link of a measured all_reduce, among one rank per host or inside a host; None if not measured."""
    shape = r"\d+x1(?:\*(\d+))?" if between_hosts else r"1x\d+()"
    for (kind, topology), measured in costs.collectives.items():
        match = re.fullmatch(shape, topology)
        if kind is CollectiveKind.ALL_REDUCE and match:
            beside = int(match[1] or 1)  # groups sharing the link
            return Link(measured.alpha_us(kind), beside * measured.gb_per_s(kind))
    return None


# Reading


def _kind(value: Any, place: str) -> CollectiveKind:
    if value not in [kind.value for kind in CollectiveKind]:
        raise wrong(place, f"a collective: {', '.join(kind.value for kind in CollectiveKind)}", value)
    return CollectiveKind(value)


def _collective_key(value: Any, place: str) -> tuple[CollectiveKind, str]:
    name, _, topology = TEXT(value, place).partition("@")
    if re.fullmatch(TOPOLOGY_TEXT, topology) is None:
        raise wrong(place, "a collective and how its ranks sit, like all_reduce@4x1", value)
    return _kind(name, place), topology


def _compressor_key(value: Any, place: str) -> str:
    text = TEXT(value, place)
    try:
        compressor, device, threads = parse_compressor_key(text)
        if threads != 0:
            return compressor_key(compressor, Device(device).value, threads)
    except ValueError:
        pass
    raise wrong(place, "a compressor on a device, like int8@gpu or int8@cpu*2", value)


_TABLE = record(
    CostTable,
    hardware=TEXT,
    versions=TEXT,
    date=TEXT,
    source=TEXT,
    pack_gb_per_s=positive(),
    launch_us=number(),
    transport=keyed(
        record(TransportCost, us=number(), us_per_mb=number()),
        key=_kind,
    ),
    copy_gb_per_s=null_or(positive()),
    contention=positive(),
    overlap_speed=positive(1.0),
    processors=null_or(record(Processors, count=positive(), compute=positive()), null=UNSHARED),
    feed_us=number(),
    host_us=number(),
    error=number(),
    compute_error=number(),
    estimate=TEXT,
    roofline=record(
        Roofline, gflops=positive(), gb_per_s=positive(), launch_us=number(), source=TEXT, others=keyed(positive())
    ),
    compute=keyed(record(Measured, us=number(), spread=number(), source=TEXT)),
    collectives=keyed(MeasuredCollective.from_json, key=_collective_key),
    compressors=keyed(CompressorCost.from_json, key=_compressor_key),
    threads=null_or(whole(1)),
)
