"""Attribute a plan's error to layers: what each spends, what that saves on the wire, and its alternatives.

    spent = squares * error                     of a gradient or a part of one; a share of the whole gradient's squares
    saved = wire time dense - wire time         of a bucket, shared out by elements

A *layer* here is all that is named alike (`blocks.*.up.weight`) and travels by the same strategy. Its alternatives are
told by the simulated step in which all buckets that hold it travel otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxcomp.cluster.cluster import Level
from fxcomp.compressors import Compressor, PowerSGD, Sidco, TopK
from fxcomp.plan.modes import Content, Mode
from fxcomp.plan.plan import Bucket
from fxcomp.plan.strategy import Device, Strategy
from fxcomp.report.explanation import Explanation
from fxcomp.report.wire_arithmetic import sent_by
from fxcomp.search.losses import Losses
from fxcomp.search.question import Terms
from fxcomp.search.shared_draws import ExactPlans

_SAME = 1e-9  # relative: errors that are closer are equal
_NEXT = 2  # strategies in each direction: the next one may take another way


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Elements of one gradient in one bucket."""

    name: str
    bucket: int
    elements: int
    squares: float
    """The share of the whole gradient's squares."""
    spent: float
    saved_us: float
    dense_bytes: int
    sent_bytes: float
    """Its share of the bytes that a rank sends of its bucket."""


@dataclass(frozen=True, slots=True)
class Instead:
    """The change if a layer's buckets travelled otherwise."""

    strategy: Strategy
    longer_us: float
    """By so much the step would be longer."""
    spent: float
    """By so much the plan's error would be larger."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Gradients with like names that travel alike."""

    name: str
    strategy: Strategy
    is_pinned: bool
    parts: Sequence[LayerPart]
    dense: Instead | None = None
    finer: Instead | None = None
    """The fastest that loses less."""
    coarser: Instead | None = None
    """The fastest that loses more."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.name for part in self.parts))

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(part.bucket for part in self.parts))

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def dense_bytes(self) -> int:
        return sum(part.dense_bytes for part in self.parts)

    @property
    def sent_bytes(self) -> float:
        return sum(part.sent_bytes for part in self.parts)

    @property
    def squares(self) -> float:
        return sum(part.squares for part in self.parts)

    @property
    def spent(self) -> float:
        return sum(part.spent for part in self.parts)

    @property
    def saved_us(self) -> float:
        return sum(part.saved_us for part in self.parts)

    @property
    def error(self) -> float | None:
        """The relative squared error of its own; None where it has no squares."""
        return self.spent / self.squares if self.squares > 0 else None


def layers_of(explanation: Explanation) -> list[Layer]:
    """List the layers with their alternatives, those that spend most first."""
    account = _Account(explanation)
    others = _Others(explanation, account)
    return _in_order(each if each.is_pinned else others.told(each) for each in account.layers())


def layers_alone(explanation: Explanation) -> list[Layer]:
    """List the layers without alternatives, which take a search to find."""
    return _in_order(_Account(explanation).layers())


def _in_order(layers: Iterable[Layer]) -> list[Layer]:
    return sorted(layers, key=lambda layer: (-layer.spent, -layer.saved_us, -layer.elements))


def alike(name: str) -> str:
    """Leave numbers out of a name: `blocks.*.up.weight`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


class _Account:
    """The error and the saving of each part of a plan."""

    def __init__(self, explanation: Explanation) -> None:
        self._explanation, workload, plan = explanation, explanation.workload, explanation.plan
        self.losses = Losses(workload.gradients, explanation.cluster, explanation.errors)
        self._places = {gradient.name: place for place, gradient in enumerate(workload.gradients)}
        sizes, whole = plan.sizes, max(1, self.losses.elements)
        self.parts: list[LayerPart] = []
        for k, bucket in enumerate(plan.buckets):
            saved_us, sent_bytes = self._saved_us(bucket), explanation.sent_bytes(bucket)
            for name, size in zip(bucket.names, bucket.sizes, strict=True):
                weight = float(self.losses.weights[self._places[name]]) * (size / sizes[name] if size else 0.0)
                saved, sent = (all_of_it * size / max(1, bucket.elements) for all_of_it in (saved_us, sent_bytes))
                dense = bucket.element_type.itemsize * size
                part = LayerPart(name, k, size, weight / whole, 0.0, saved, dense, sent)
                self.parts.append(replace(part, spent=self.spent([part], bucket.strategy)))

    def layers(self) -> list[Layer]:
        """Group the parts."""
        explanation, groups = self._explanation, dict[tuple[str, Strategy, bool], list[LayerPart]]()
        for part in self.parts:
            is_pinned = explanation.pins.rule_for(part.name) is not None
            strategy = explanation.plan.buckets[part.bucket].strategy
            groups.setdefault((alike(part.name), strategy, is_pinned), []).append(part)
        layers: list[Layer] = []
        for (pattern, strategy, is_pinned), parts in groups.items():
            names = {part.name for part in parts}
            layers.append(Layer(parts[0].name if len(names) == 1 else pattern, strategy, is_pinned, parts))
        return layers

    def spent(self, parts: Sequence[LayerPart], strategy: Strategy) -> float:
        """Return the error of a strategy on these parts."""
        errors = self.losses.errors(strategy)
        return sum(part.squares * float(errors[self._places[part.name]]) for part in parts)

    def _saved_us(self, bucket: Bucket) -> float:
        """By how much a bucket's collectives are shorter than those of the same way, dense."""
        return self._wire_us(replace(bucket, strategy=bucket.strategy.uncompressed)) - self._wire_us(bucket)

    def _wire_us(self, bucket: Bucket) -> float:
        costs, cluster = self._explanation.costs, self._explanation.cluster
        sent = sent_by(bucket, cluster, self._explanation.workload.shapes)
        return sum(costs.collective_us(part.send.kind, part.send.level, part.size, cluster) for part in sent)


class _Others:
    """The alternatives of a layer's buckets, with the step and the error that each would give."""

    def __init__(self, explanation: Explanation, account: _Account) -> None:
        self._explanation, self._plan, self._account = explanation, explanation.plan, account
        self._exact = ExactPlans(explanation.workload, explanation.costs, explanation.cluster)
        self._step_us = self._exact.step_us(self._plan)
        self._limit = explanation.allowed or 0.0
        self._told: dict[tuple[int, ...], tuple[Instead, ...]] = {}
        self._offered: dict[Content, tuple[Strategy, ...]] = {}

    def told(self, layer: Layer) -> Layer:
        """Add the alternatives."""
        found = self._told.get(layer.buckets)
        if found is None:
            found = self._told[layer.buckets] = tuple(self._instead(layer, each) for each in self._candidates(layer))
        least = _SAME * max(self._limit, _SAME)
        dense = layer.strategy.uncompressed
        return replace(
            layer,
            dense=next((each for each in found if each.strategy == dense), None),
            finer=min((each for each in found if each.spent < -least), key=_order, default=None),
            coarser=min((each for each in found if each.spent > least), key=_order, default=None),
        )

    def _candidates(self, layer: Layer) -> list[Strategy]:
        """List dense, what is next by error, and the best of the search for the largest bucket."""
        strategy, offered = layer.strategy, self._offered_to(layer)
        found = [strategy.uncompressed, *self._kin(layer, offered)]
        choice = self._explanation.choice
        if choice is not None and self._explanation.is_chosen:
            largest = max(layer.parts, key=lambda part: part.elements).bucket
            found += [each.strategy for each in choice.alternatives[largest] if each.strategy in offered]
        return [each for each in dict.fromkeys(found) if each != strategy]

    def _kin(self, layer: Layer, offered: Sequence[Strategy]) -> list[Strategy]:
        """List what is next by error, in the family and among all; for dense the finest of every family."""
        lost = {each: self._account.spent(layer.parts, each) for each in (*offered, layer.strategy)}
        ranked = sorted(offered, key=lambda each: (lost[each], str(each)))
        levels, here = _levels(layer.strategy), lost[layer.strategy]
        if layer.strategy.is_dense:
            finest: dict[frozenset[str], Strategy] = {}
            for each in ranked:
                if _levels(each) == levels and Device.CPU not in each.devices:
                    finest.setdefault(_families(each), each)
            return list(finest.values())
        near = [each for each in ranked if (each.devices, _levels(each)) == (layer.strategy.devices, levels)]
        kin = [each for each in near if _families(each) == _families(layer.strategy)]
        found: list[Strategy] = []
        for several in (kin, near):
            found += [each for each in several if lost[each] < here * (1 - _SAME)][-_NEXT:]
            found += [each for each in several if lost[each] > here * (1 + _SAME)][:_NEXT]
        return found

    def _offered_to(self, layer: Layer) -> list[Strategy]:
        """List what the budget offers to all buckets of a layer."""
        contents = {self._content(self._plan.buckets[k]) for k in layer.buckets}
        first, *rest = (self._offers(content) for content in Content if content in contents)
        return [each for each in first if all(each in others for others in rest)]

    def _offers(self, content: Content) -> tuple[Strategy, ...]:
        found = self._offered.get(content)
        if found is None:
            explanation = self._explanation
            terms = Terms(Mode.BALANCED, budget=explanation.budget)
            found = self._offered[content] = terms.strategies(
                self._limit, self._account.losses, explanation.cluster, content, offload=explanation.costs.offloads
            )
        return found

    def _content(self, bucket: Bucket) -> Content:
        shapes = self._explanation.workload.shapes
        kinds = {len(shapes[name]) <= 1 for name in bucket.names}
        return Content.MIXED if len(kinds) == 2 else Content.VECTORS if kinds == {True} else Content.MATRICES

    def _instead(self, layer: Layer, strategy: Strategy) -> Instead:
        strategies = [strategy if k in layer.buckets else each.strategy for k, each in enumerate(self._plan.buckets)]
        longer_us = self._exact.step_us(self._plan.with_strategies(strategies)) - self._step_us
        parts = [part for part in self._account.parts if part.bucket in layer.buckets]
        return Instead(strategy, longer_us, self._account.spent(parts, strategy) - sum(part.spent for part in parts))


def _order(instead: Instead) -> tuple[float, float]:
    """The fastest first; of those as fast, the one that loses least."""
    return round(instead.longer_us, 3), instead.spent


def _levels(strategy: Strategy) -> frozenset[Level]:
    return frozenset(step.level for step in strategy.collectives)


def _families(strategy: Strategy) -> frozenset[str]:
    """Name the families of its compressors; inside one, strategies differ in a parameter."""
    return frozenset(map(_family, strategy.compressors))


def _family(compressor: Compressor) -> str:
    if isinstance(compressor, PowerSGD):
        return "low rank"
    return "largest values" if isinstance(compressor, TopK | Sidco) else "codec"
