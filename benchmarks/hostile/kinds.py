"""Kinds of files that fxcomp reads: valid samples, the reader, and the uses that an accepted file must survive.

A use raises `Unfit` if a result is not finite, negative or different after a round trip.
"""

from __future__ import annotations

import json
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

from fxcomp.cluster.cluster import Cluster, Level, Processors
from fxcomp.cluster.cluster_file import load_cluster
from fxcomp.cluster.link import Link
from fxcomp.commands.diff import _read as read_report  # pyright: ignore[reportPrivateUsage]
from fxcomp.compressors import parse_compressor
from fxcomp.cost.contention import TransportCost
from fxcomp.cost.measured import CompressorCost, CompressorPoint, MeasuredCollective
from fxcomp.cost.piecewise import Fit, Piece
from fxcomp.cost.roofline import Measured, Roofline
from fxcomp.cost.table import CostTable, collective_formula, link_of
from fxcomp.cost.table_cache import load_table
from fxcomp.error_tables.table import COLUMNS, ErrorRow, ErrorTable
from fxcomp.errors import BadPlan
from fxcomp.plan.compress import Compress
from fxcomp.plan.kinds import CollectiveKind, ElementType
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import DENSE, Strategy
from fxcomp.report.html.run_plots import METRICS, to_html
from fxcomp.report.plan_diff import diff_plans, headline, sections_of
from fxcomp.report.runs import read_run
from fxcomp.report.terminal import print_sections
from fxcomp.search.choose import choose, predict_us
from fxcomp.search.question import Terms
from fxcomp.search.workload import Gradient, Workload
from hostile.mutate import mutated, resealed, torn

SHAPES = {"embed.weight": (40, 16), "fc.weight": (64, 32), "fc.bias": (64,), "out.weight": (10, 64), "out.bias": (10,)}
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}
WORKLOAD = Workload(
    tuple(Gradient(name, shape, 100.0 * (k + 1), 2.0) for k, (name, shape) in enumerate(SHAPES.items())), 600.0
)
CLUSTER = Cluster(2, 2, intra=Link(5.0, 5.0), inter=Link(50.0, 0.1))


class Unfit(Exception):
    """An accepted file led to a wrong result."""


def check(*values: float, of: str) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise Unfit(f"{of} is {value}")


class Kind(ABC):
    """A kind of file. `samples` are the objects in valid files."""

    name: str
    suffix = ".json"
    mutations: int = 20_000

    @property
    @abstractmethod
    def samples(self) -> Sequence[Any]: ...

    def write(self, data: Any) -> bytes:
        return resealed(data)

    @abstractmethod
    def read(self, path: Path) -> Any:
        """Read a file as fxcomp does."""

    @abstractmethod
    def use(self, read: Any, *, fully: bool) -> None:
        """Use an accepted file. Expensive uses only if `fully`. A named error means that the file does not fit."""

    def mutation(self, draw: Random) -> tuple[bytes, str]:
        """Return a mutated file, and the kind of the mutation."""
        sample = draw.choice(self.samples)
        if draw.random() < 0.5:
            return torn(self.write(sample), draw)
        data, what = mutated(sample, draw)
        return self.write(data), what


class Plans(Kind):
    name = "plan"
    mutations = 100_000

    @cached_property
    def samples(self) -> Sequence[Any]:
        strategies = (
            "all_reduce@world",
            "compress(int8(block=128))@gpu > all_gather@world > decompress@gpu",
            "compress(int4)@cpu > all_to_all@world > decompress@cpu > compress(int8)@cpu > all_gather@world"
            " > decompress@cpu",
            "reduce_scatter@intra > compress(topk(0.01))@gpu > all_gather@inter > decompress@gpu > all_gather@intra",
            "propose(powersgd(4))@gpu > all_reduce@world > compress(powersgd(4))@gpu > all_reduce@world"
            " > decompress@gpu",
            "compress(sign)@gpu > all_gather@world > decompress@gpu",
        )
        sign, parts = Strategy.parse(strategies[5]), Strategy.parse(strategies[1])
        small = Plan(
            tuple(Bucket((n,), (SIZES[n],), Strategy.parse(s)) for n, s in zip(SIZES, strategies, strict=False))
        )
        whole = Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), Strategy.parse(strategies[3])),))
        cut = Plan(
            (
                Bucket(("out.bias", "out.weight", "fc.weight"), (10, 640, 1000), DENSE),
                Bucket(("fc.weight", "fc.bias"), (1048, 64), parts, (1000, 0)),
                Bucket(("embed.weight",), (640,), sign, element_type=ElementType.BF16),
            )
        )
        moved = Plan(tuple(replace(bucket, at=ExchangePoint.MOMENTUM) for bucket in small.buckets))
        return [plan.to_json() for plan in (small, whole, cut, moved)]

    def read(self, path: Path) -> Plan:
        return Plan.load(path)

    def use(self, read: Plan, *, fully: bool) -> None:
        shown, data = str(read), json.loads(json.dumps(read.to_json()))
        shown.encode()  # as a terminal prints it
        if Plan.from_json(data) != read or Plan.from_json(data).digest != read.digest:
            raise Unfit("the plan differs after a round trip")
        if sum(bucket.dense_bytes for bucket in read.buckets) < 0 or len(read.schedule()) < 0:
            raise Unfit("a negative size")
        is_ours = read.sizes == SIZES
        try:
            read.check_covers(SIZES)
        except BadPlan:
            if is_ours:
                raise Unfit("a plan of the model is refused") from None
            return
        if not is_ours:
            raise Unfit("a plan of another model is accepted")
        try:
            read.check_covers(SIZES, dict.fromkeys(SIZES, ElementType.F32))
        except BadPlan:
            return
        read.check_fits(CLUSTER)
        check(predict_us(WORKLOAD, read, CostTable(), CLUSTER), of="a predicted step")
        if fully:
            found = diff_plans(read_report_of(read), read_report_of(Plan.from_json(self.samples[0])))
            print_sections(headline(found), sections_of(found, all_names=True), StringIO())


def read_report_of(plan: Plan) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        return read_report(str(Path(folder) / "plan.json"))


class CostTables(Kind):
    name = "cost table"
    mutations = 100_000

    @cached_property
    def samples(self) -> Sequence[Any]:
        gather, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
        pieces = (Piece(0.0, 30.0, 1e-3, 1.0, 1e-5), Piece(65536.0, 60.0, 2e-3, is_switch=True))
        measured = {
            (reduce, "2x2"): MeasuredCollective(4, Fit(pieces, 8.0, 1e7, 20, 0.01, 0.1, 0.02)),
            (reduce, "2x1"): MeasuredCollective.line(reduce, 2, 20.0, 1.0),
            (gather, "2x2"): MeasuredCollective.line(gather, 4, 25.0, 2.0, 0.1),
        }
        points = tuple(CompressorPoint(n, 2 + n / 1e3, 1 + n / 1e3, 0.0, n / 2e3) for n in (4096, 1 << 20))
        compressors = {f"{parse_compressor(name)}@cpu*2": CompressorCost.of(*points) for name in ("int8", "int4")}
        compressors |= {f"{parse_compressor('topk(0.01)')}@gpu": CompressorCost.of(points[0])}
        table = CostTable(
            "a machine", "torch 2.13", "2026-11-29", "measured",
            compute={"aten.mm f32[512,384] f32[384,384]": Measured(120.0, 0.1, "measured")},
            roofline=Roofline(50.0, 10.0, others={"bf16": 100.0}),
            collectives=measured, compressors=compressors, threads=2,
            transport={reduce: TransportCost(10.0, 100.0)},
            processors=Processors(2.0, 1.0), contention=1.5, overlap_speed=0.8, feed_us=30.0,
        )  # fmt: skip
        on_gpu = replace(
            table, copy_gb_per_s=10.0, processors=Processors(), threads=None, host_us=100.0, compute_error=0.1
        )
        return [table.to_json(), on_gpu.to_json(), CostTable().to_json()]

    def read(self, path: Path) -> CostTable | None:
        return CostTable.read(path)

    def use(self, read: CostTable, *, fully: bool) -> None:
        if CostTable.from_json(json.loads(json.dumps(read.to_json(), allow_nan=False))) != read:
            raise Unfit("the table differs after a round trip")
        plans = [Plan.from_json(data) for data in Plans().samples[:2]]
        check(*(predict_us(WORKLOAD, plan, read, CLUSTER) for plan in plans), of="a predicted step")
        for (kind, _), found in read.collectives.items():
            found.describe(kind).encode()
            check(found.alpha_us(kind), found.gb_per_s(kind), found.spread, of=f"{kind.value}'s link")
        for kind in CollectiveKind:
            for level in (Level.WORLD, Level.INTRA, Level.INTER):
                for size in (0.0, 8.0, 1e6, 1e12):
                    price = read.collective(kind, level, size, CLUSTER)
                    check(price.us, price.load, price.overlap_speed, of=f"{kind.value}@{level.value} of {size:g} bytes")
        for compressor in map(parse_compressor, ("int8", "int4", "topk(0.01)", "powersgd(2)")):
            check(
                read.encode_us(compressor, 10**7), read.decode_us(compressor, 10**7, 64),
                read.propose_us(compressor, 10**7), of=f"{compressor}'s time",
            )  # fmt: skip
            read.compressor_source(compressor).encode()
        check(read.pack_us(1e9), read.copy_us(1e9), read.error_of(1.0, 2.0), of="a time")
        link_of(read, between_hosts=True), link_of(read, between_hosts=False)  # pyright: ignore[reportUnusedExpression]
        if fully:
            collective_formula(read, CollectiveKind.ALL_REDUCE, Level.WORLD, 1e6, CLUSTER).encode()
            choice = choose(WORKLOAD, read, CLUSTER, Terms(Mode.BALANCED))
            check(choice.step_us, choice.dense_us, choice.fastest_us, choice.free_us, choice.error, of="a choice")
            str(choice).encode()


class CachedTables(CostTables):
    name = "cached cost table"
    mutations = 20_000

    def read(self, path: Path) -> CostTable | None:
        return load_table(path)

    def use(self, read: CostTable | None, *, fully: bool) -> None:
        if read is not None:
            super().use(read, fully=fully)


class Clusters(Kind):
    name, suffix = "cluster", ".toml"

    @cached_property
    def samples(self) -> Sequence[Any]:
        return [
            {"cluster": "8x4", "intra": "nvlink4", "inter": "2x25gbit@8us"},
            {"cluster": "4+4+2", "intra": "100gbit", "inter": "10gbit:1gbit@8us+2us half-duplex"},
            {
                "placement": [0, 0, 1, 1, 2, 2], "intra": "12GB/s@3us", "inter": "wan",
                "rack": {"hosts": 2, "oversubscription": "4:1"},
            },
            {"cluster": "4x2", "intra": "pcie4", "inter": "1gbit", "rack": {"hosts": 2, "link": "100gbit@10us"}},
            {
                "cluster": "4x2", "intra": "pcie4", "inter": "1gbit shared",
                "tier": [
                    {"name": "rack", "link": "10gbit", "units": [0, 0, 1, 1]},
                    {"name": "row", "link": "1gbit@50us", "units": [0, 0]},
                ],
            },
        ]  # fmt: skip

    def write(self, data: Any) -> bytes:
        return (_toml(data) if isinstance(data, dict) else str(data)).encode("utf-8", "surrogatepass")

    def read(self, path: Path) -> Cluster:
        return load_cluster(path)

    def use(self, read: Cluster, *, fully: bool) -> None:
        if Cluster.from_json(json.loads(json.dumps(read.to_json(), allow_nan=False))) != read:
            raise Unfit("the cluster differs after a round trip")
        f"{read} {read!r}".encode()
        if read.world_size > (1 << 12 if fully else 64):
            return
        costs = CostTable()
        for level in Level if read.has_racks and read.is_even else (Level.WORLD, Level.INTRA, Level.INTER):
            if read.ranks_at(level) > 1:
                check(costs.collective(CollectiveKind.ALL_REDUCE, level, 1e6, read).us, of=f"all_reduce@{level.value}")
        if not fully:
            return
        dense = Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), DENSE),))
        check(predict_us(WORKLOAD, dense, costs, read), of="a predicted step")
        if read.world_size <= 64:
            choice = choose(WORKLOAD, costs, read, Terms(Mode.BALANCED))
            check(choice.step_us, choice.dense_us, choice.fastest_us, of="a choice")


def _toml(table: Mapping[Any, Any]) -> str:
    """Write TOML: tables after values, as TOML needs it."""
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items())


def _key(name: Any) -> str:
    return json.dumps(str(name), ensure_ascii=False)


def _value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{_key(name)} = {_value(held)}" for name, held in value.items()) + "}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case "@@deep@@":
            return "[" * 5000 + "]" * 5000
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case float():
            return repr(value)
        case None:
            return "1979-05-27T07:32:00Z"  # a date, which JSON lacks; TOML has no null
        case _:
            return json.dumps(value, ensure_ascii=False)


class ErrorTables(Kind):
    name = "error table"

    @cached_property
    def samples(self) -> Sequence[Any]:
        errors = tuple(0.9 / (k + 1) for k in range(len(COLUMNS)))
        rows = {name: ErrorRow(shape, 3.0 + k, errors, 4) for k, (name, shape) in enumerate(SHAPES.items())}
        rows["out.bias"] = ErrorRow((10,), 0.5, (), 0)
        with tempfile.TemporaryDirectory() as folder:
            ErrorTable(rows).save(Path(folder) / "errors.json")
            return [json.loads((Path(folder) / "errors.json").read_text())]

    def read(self, path: Path) -> ErrorTable:
        return ErrorTable.load(path)

    def use(self, read: ErrorTable, *, fully: bool) -> None:
        for compressor in map(
            parse_compressor, ("int4", "topk(0.02)", "sidco(0.01)", "powersgd(2)", "powersgd(3)", "cmax(8)")
        ):
            check(*read.errors_of(list(SIZES), compressor, 4), of=f"the error of {compressor}")
        check(*(read.squares_of(name, size) for name, size in SIZES.items()), read.mean_square, of="a square")
        check(read.looks, of="a count")
        if fully:
            for within in ("like(topk(0.01))", 0.05):
                terms = Terms.of(
                    Compress(within=within, measured=True) if isinstance(within, float) else _like(), 1.0, read
                )
                choice = choose(WORKLOAD, CostTable(), CLUSTER, terms)
                check(choice.step_us, choice.dense_us, choice.error, of="a choice")
            with tempfile.TemporaryDirectory() as folder:
                read.save(Path(folder) / "errors.json")
                if ErrorTable.load(Path(folder) / "errors.json") != read:
                    raise Unfit("the table differs after a round trip")


def _like() -> Compress:
    from fxcomp.plan.budget import like

    return Compress(within=like("topk(0.01)"), measured=True)


class Logs(Kind):
    name, suffix = "log", ".jsonl"

    @cached_property
    def samples(self) -> Sequence[Any]:
        def line(k: int) -> dict[str, Any]:
            more = {
                "sent_mb": 0.6,
                "residual_norm": 0.1 * k,
                "step_ms": 12.0,
                "exposed_ms": 1.5,
                "plan": f"5f0c{k // 20}",
            }
            return {"step": k, "loss": 2.3 / (k + 1), "seconds": 0.1 * k} | more

        return [[line(k) for k in range(count)] for count in (3, 40)]

    def write(self, data: Any) -> bytes:
        lines = data if isinstance(data, list) else [data]
        return b"".join(resealed(line).replace(b"\n", b" ") + b"\n" for line in lines)

    def read(self, path: Path) -> Any:
        return read_run(path, "run", list(METRICS))

    def use(self, read: Any, *, fully: bool) -> None:
        for smooth in (1, 5) if fully else (1,):
            page = to_html([read, read], smooth)
            page.encode()
            if "NaN" in page.split("</style>")[-1].replace("NaN or", "") and '="NaN' in page:
                raise Unfit("a coordinate is NaN")


class Reports(Kind):
    """Output of `fxcomp explain --json`, which `fxcomp diff` reads."""

    name = "report"

    @cached_property
    def samples(self) -> Sequence[Any]:
        def bucket(names: list[str], strategy: str) -> dict[str, Any]:
            return {"names": names, "sizes": [8, 16], "strategy": strategy, "wire_bytes": 96, "type": "f32"}

        one = "compress(int8)@gpu > all_gather@world > decompress@gpu"
        plan = {"buckets": [bucket(["a", "b[0:16]"], one), bucket(["c", "b[16:32]"], "all_reduce@world")], "loss": 0.01}
        spent = [{"name": name, "spent": 0.001} for name in "abc"]
        return [{"step_ms": {"chosen": 12.0}, "plan": plan, "budget": {"gradients": spent}}]

    def read(self, path: Path) -> Any:
        return read_report(str(path))

    def use(self, read: Any, *, fully: bool) -> None:
        other = self._other
        for pair in ((read, other), (other, read), (read, read)):
            found = diff_plans(*pair)
            text = StringIO()
            print_sections(headline(found), sections_of(found, all_names=fully), text)
            text.getvalue().encode()
            json.dumps(found.to_json())

    @cached_property
    def _other(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.json"
            path.write_bytes(self.write(self.samples[0]))
            return self.read(path)
