"""Describe a strategy's tasks for buckets of any size, as prices of sizes that add up over gradients.

    compress(int8)@gpu > all_gather@world > decompress@gpu
 -->
    pack         compute   pack_us of 4 x the elements
    compress     compute   encode_us(int8) of the elements
    start        compute   launch_us
    all_gather   inter     collective(all_gather, world) of the int8 payload
    decompress   compute   decode_us(int8, 2 payloads) of the elements

A `BucketWriter` writes the tasks of one large probe bucket, with a `_Recorder` in place of the cost table. Each size is
stored as the ratio to a `Feature` of the probe: elements, or a compressor's bytes. The largest shard is larger, because
borders are rounded to a compressor's blocks; the average excess of odd-sized probes is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple, Self

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.cost.timeline import Task
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind, ElementType, Stream
from fxcomp.plan.prices import CollectivePrice, Measure, PriceQuestion, Size
from fxcomp.plan.strategy import Device, Strategy
from fxcomp.search.plan_tasks import END_OF_BACKWARD, BucketTasks, BucketWriter, StepPrices
from fxcomp.search.workload import Gradient, Workload

REGION, BACKWARD = -1, -2
"""Special predecessors: compute up to the bucket's last gradient, and the end of backward."""

_PROBE = ((4096, 4096),)  # shapes of a large bucket, divisible by any block and number of shards
_ODD = (
    ((301, 383), (77, 1001), (511, 129)),
    ((613, 257), (384,), (1003, 301), (129, 129), (701, 511), (65, 999)),
)


class Feature(NamedTuple):
    """A size that adds up over gradients: elements, or bytes made by a compressor."""

    measure: Measure
    compressor: Compressor | None = None
    is_whole: bool = True

    def of(self, shape: Sequence[int], ranks: int) -> int:
        """Return the size for a shape. Raise BadOption if the shape is too large for the compressor."""
        elements = math.prod(shape)
        if self.compressor is None:
            return elements
        bound = self.compressor.bound_to([shape if self.is_whole else (elements,)], ranks)
        match self.measure:
            case Measure.PAYLOAD:
                return bound.payload_bytes((elements,))
            case Measure.PROPOSAL:
                return bound.proposal_bytes((elements,))
            case _:
                return bound.state_bytes((elements,))


ELEMENTS = Feature(Measure.VALUES)


@lru_cache(maxsize=256)
def feature_sizes(feature: Feature, shapes: tuple[tuple[int, ...], ...], ranks: int) -> tuple[float, ...]:
    """Return the size for each shape; 0 for shapes too large for the compressor."""
    known = {shape: size_of(feature, shape, ranks) or 0.0 for shape in dict.fromkeys(shapes)}
    return tuple(known[shape] for shape in shapes)


def size_of(feature: Feature, shape: Sequence[int], ranks: int) -> float | None:
    """Return the size for a shape; None if the shape is too large for the compressor."""
    try:
        return float(feature.of(shape, ranks))
    except BadOption:
        return None


class Term(NamedTuple):
    """A summand of a task's time: the price of size `factor * feature + more`."""

    question: PriceQuestion
    factor: float
    feature: Feature
    more: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    """Task of a bucket of any size."""

    stream: Stream
    after: tuple[int, ...]
    """Predecessors: indices of the bucket's tasks, REGION, or BACKWARD."""
    terms: tuple[Term, ...]
    load: float
    is_collective: bool


@dataclass(frozen=True, slots=True)
class Template:
    stages: tuple[tuple[TaskTemplate, ...], ...]
    final: tuple[TaskTemplate, ...]
    arrival: tuple[int, ...]
    """Indices of tasks that the update waits for."""

    @property
    def tasks(self) -> tuple[TaskTemplate, ...]:
        return (*(task for stage in self.stages for task in stage), *self.final)

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(dict.fromkeys(term.feature for task in self.tasks for term in task.terms))


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts that a strategy's tasks depend on, besides sizes."""

    cluster: Cluster
    commits: bool
    saves_residuals: bool
    copies: bool
    """True if values are copied between host and device."""
    element_type: ElementType = ElementType.F32

    @classmethod
    def of(cls, prices: StepPrices) -> Self:
        workload, copies = prices.workload, prices.costs.copy_gb_per_s is not None
        return cls(prices.cluster, workload.commits, workload.saves_residuals, copies)


@lru_cache(maxsize=4096)
def template_of(strategy: Strategy, setting: Setting) -> Template:
    smooth = _TemplateReader(_recorded(strategy, setting, _PROBE), setting.cluster.world_size)
    if not any(step.kind.splits for step in strategy.collectives):
        return smooth.template({})
    odd = [_TemplateReader(_recorded(strategy, setting, shapes), setting.cluster.world_size) for shapes in _ODD]
    beyond = [each.beyond(smooth, shapes) for each, shapes in zip(odd, _ODD, strict=True)]
    return smooth.template({number: max(0.0, fmean(each[number] for each in beyond)) for number in beyond[0]})


def _recorded(strategy: Strategy, setting: Setting, shapes: Sequence[tuple[int, ...]]) -> BucketTasks:
    probe = [Gradient(f"probe {k}", shape, 0.0, 0.0, setting.element_type) for k, shape in enumerate(shapes)]
    step = Workload(
        tuple(probe),
        0.0,
        commits=setting.commits,
        saves_residuals=setting.saves_residuals,
    )
    return BucketWriter(step, _Recorder(copies=setting.copies), setting.cluster).bucket(0, probe, strategy)


class _Price(float):
    """Dummy price of 1. `asked` has the calls of the cost table whose times add up to it: questions with sizes."""

    asked: tuple[tuple[PriceQuestion, Size], ...]

    def __new__(cls, *asked: tuple[PriceQuestion, Size]) -> Self:
        made = super().__new__(cls, 1.0)
        made.asked = asked
        return made

    def __add__(self, other: float) -> float:
        assert isinstance(other, _Price), "prices are added to prices"
        return _Price(*self.asked, *other.asked)


class _Recorder:
    """Stands for a cost table: returns prices that record the call, without times."""

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies

    @property
    def launch_us(self) -> float:
        return _Price((PriceQuestion("launch_us"), Size(0)))

    @property
    def pool_load(self) -> float:
        return 0.0 if self.copies else 1.0

    def pack_us(self, size: float) -> float:
        return _price("pack_us", size)

    def copy_us(self, size: float) -> float:
        return _price("copy_us", size) if self.copies else 0.0

    def encode_us(self, compressor: Compressor, elements: int, device: Device = Device.GPU) -> float:
        return _price("encode_us", elements, (compressor,), (device,))

    def propose_us(self, compressor: Compressor, elements: int, device: Device = Device.GPU) -> float:
        return _price("propose_us", elements, (compressor,), (device,))

    def decode_us(self, compressor: Compressor, elements: int, ranks: int, device: Device = Device.GPU) -> float:
        return _price("decode_us", elements, (compressor,), (ranks, device))

    def collective(self, kind: CollectiveKind, level: Level, size: float, cluster: Cluster) -> CollectivePrice:
        del cluster
        return CollectivePrice(_price("collective", size, (kind, level)))


def _price(method: str, size: float, before: tuple[Any, ...] = (), after: tuple[Any, ...] = ()) -> _Price:
    return _Price((PriceQuestion(method, before, after), size if isinstance(size, Size) else Size(int(size))))


class _TemplateReader:
    def __init__(self, bucket: BucketTasks, ranks: int) -> None:
        self.bucket, self.ranks = bucket, ranks
        self.tasks = [*(task for stage in bucket.stages for task in stage), *bucket.final]
        self.numbers = {task.name: number for number, task in enumerate(self.tasks)}
        self.after = self.numbers | {"region 0": REGION, END_OF_BACKWARD: BACKWARD}

    def template(self, more: Mapping[int, float]) -> Template:
        """Build the template; `more` adds to the sizes of collectives, by task number."""
        made = [self._task(task, more.get(number, 0.0)) for number, task in enumerate(self.tasks)]
        stages = [tuple(made[self.numbers[task.name]] for task in stage) for stage in self.bucket.stages]
        return Template(tuple(stages), tuple(made[sum(map(len, stages)) :]), self._follows(self.bucket.update))

    def beyond(self, smooth: _TemplateReader, shapes: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Return the difference between each collective's size and the size that `smooth` predicts for `shapes`.

        Keys are task numbers.
        """
        found: dict[int, float] = {}
        for number, (task, like) in enumerate(zip(self.tasks, smooth.tasks, strict=True)):
            price = like.duration_us
            if isinstance(price, _Price) and price.asked[0][0].is_collective:
                assert isinstance(task.duration_us, _Price), "buckets of one strategy have the same tasks"
                term, size = smooth.term(*price.asked[0]), task.duration_us.asked[0][1]
                found[number] = size - term.factor * sum(term.feature.of(shape, self.ranks) for shape in shapes)
        return found

    def term(self, question: PriceQuestion, size: Size, more: float = 0.0) -> Term:
        feature = ELEMENTS if size.compressor is None else Feature(size.measure, size.compressor, size.is_whole)
        whole = feature.of(_PROBE[0], self.ranks)
        return Term(question, size / whole if whole else 0.0, feature, more)

    def _follows(self, task: Task) -> tuple[int, ...]:
        return tuple(self.after[name] for name in task.after)

    def _task(self, task: Task, more: float) -> TaskTemplate:
        price = task.duration_us
        terms = tuple(self.term(*asked, more) for asked in price.asked) if isinstance(price, _Price) else ()
        is_collective = bool(terms) and terms[0].question.is_collective
        return TaskTemplate(task.stream, self._follows(task), terms, task.load, is_collective)
