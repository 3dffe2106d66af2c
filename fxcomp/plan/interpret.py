"""Steps of strategies, their text form, and a bucket's state between two steps.

    compress(int8)@gpu      on the device or the host (@cpu); without a GPU, @main and @pool
    all_gather@world        collective@level
    decompress@gpu
    propose(powersgd(4))@gpu > all_reduce@world      agreement before compression

State of a rank:

    summed      axes of the cluster along which gradients have been added
    splits      collectives, in order, after which each rank holds a shard or only the root holds all values
    compressor  encoding of the values; None if dense

A strategy is legal if every step fits the state before it (`misfit`) and every rank ends with the dense mean, or with
its shard if the strategy ends as shards. `route.py` adds sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from fxcomp.cluster.cluster import Level
from fxcomp.cluster.seating import Axis
from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.errors import BadStrategy
from fxcomp.plan.kinds import CollectiveKind


class Device(Enum):
    """Device of a compressor. Without a GPU, `gpu` is the main thread and `cpu` the pool, printed `main` and `pool`."""

    GPU = "gpu"
    CPU = "cpu"

    @classmethod
    def _missing_(cls, value: object) -> Device | None:
        return {"main": cls.GPU, "pool": cls.CPU}.get(str(value))


def without_gpu(text: str) -> str:
    """Replace device names for printing without a GPU."""
    return text.replace("@gpu", "@main").replace("@cpu", "@pool").replace(" on cpu", " on pool")


@dataclass(frozen=True, slots=True)
class Collective:
    kind: CollectiveKind
    level: Level

    def __str__(self) -> str:
        return f"{self.kind.value}@{self.level.value}"


@dataclass(frozen=True, slots=True)
class Propose:
    """Step that computes a proposal. An all_reduce of proposals gives the agreement, with which all ranks compress."""

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
    """Parse a text of steps. Raise BadStrategy."""
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


EVERYWHERE = frozenset(Axis)


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a bucket between two steps."""

    summed: frozenset[Axis] = frozenset()
    """Axes over which values are summed. A gather of payloads counts, because decompression adds them."""
    splits: tuple[Collective, ...] = ()
    compressor: Compressor | None = None
    has_traveled: bool = False
    is_piled: bool = False
    """True if the rank holds several ranks' payloads for the same values."""
    proposed: Compressor | None = None
    """Compressor whose proposal is reduced next."""
    agreed: tuple[Compressor, Level] | None = None
    """Compressor and level of the agreement, until decompression."""

    @property
    def is_complete(self) -> bool:
        return self.summed == EVERYWHERE

    @property
    def is_mean(self) -> bool:
        """True if each rank holds the dense mean."""
        return self.is_complete and not self.splits and self.compressor is None

    @property
    def is_shards(self) -> bool:
        """True if each rank holds a dense shard of the mean."""
        is_dealt = bool(self.splits) and not any(split.kind.is_rooted for split in self.splits)
        return self.is_complete and is_dealt and self.compressor is None

    def __str__(self) -> str:
        what = "proposals" if self.proposed else f"{self.compressor} payloads" if self.compressor else "dense values"
        extent = f"shards of {' and of '.join(str(split) for split in self.splits)}" if self.splits else "whole buckets"
        axes = ", ".join(axis.value for axis in Axis if axis in self.summed)
        sums = "summed everywhere" if self.is_complete else f"summed over {axes}" if axes else "not summed"
        return f"{what}, {extent}, {sums}"


@lru_cache(maxsize=4096)
def interpret(steps: tuple[Step, ...], ends_as_shards: bool = False) -> tuple[Standing, ...]:
    """Return the state before each step and at the end. Raise BadStrategy if a step does not fit."""
    held = [Standing()]
    for number, step in enumerate(steps):
        problem = misfit(held[-1], step)
        if problem is not None:
            raise BadStrategy(_refusal(steps, number, problem, held[-1]))
        held.append(after(held[-1], step))
    if not (held[-1].is_shards if ends_as_shards else held[-1].is_mean):
        what = "shards of the mean" if ends_as_shards else "the mean"
        problem = f"ranks would not end with {what} of all gradients"
        raise BadStrategy(_refusal(steps, len(steps), problem, held[-1]))
    return tuple(held)


def misfit(held: Standing, step: Step) -> str | None:
    """Return why a step does not fit; None if it fits."""
    if held.proposed is not None and not (isinstance(step, Collective) and step.kind is CollectiveKind.ALL_REDUCE):
        return f"the proposal of {held.proposed} is reduced next, by an all_reduce"
    if held.agreed is not None and held.compressor is None and not _compresses(step, held.agreed[0]):
        return f"the ranks have agreed on something for {held.agreed[0]}, which compresses next"
    match step:
        case Collective():
            return _collective_misfit(held, step)
        case Decompress():
            if held.compressor is None:
                return "there is no payload to decompress"
            return None if held.has_traveled else "the payload has not been sent to anybody"
        case Propose():
            return _encoder_misfit(held, step.compressor) or (
                None if step.compressor.facts.agreement is not None else f"{step.compressor} needs no agreement"
            )
        case Compress():
            return _encoder_misfit(held, step.compressor) or _agreement_misfit(held, step.compressor)


def after(held: Standing, step: Step) -> Standing:
    match step:
        case Propose():
            return replace(held, proposed=step.compressor)
        case Compress():
            return replace(held, compressor=step.compressor, has_traveled=False, is_piled=False)
        case Decompress():
            return replace(held, compressor=None, has_traveled=False, is_piled=False, agreed=None)
        case Collective():
            if held.proposed is not None:
                return replace(held, proposed=None, agreed=(held.proposed, step.level))
            if _joins(held, step):
                return replace(held, splits=held.splits[:-1], has_traveled=held.compressor is not None)
            splits = (*held.splits, step) if step.kind.splits else held.splits
            return replace(
                held,
                summed=held.summed | step.level.axes,
                splits=splits,
                has_traveled=held.compressor is not None,
                is_piled=held.is_piled or (held.compressor is not None and not step.kind.sums),
            )


def fitting(held: Standing, steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if misfit(held, step) is None]


COLLECTIVES = tuple(
    Collective(kind, level) for kind in CollectiveKind if kind is not CollectiveKind.POINT_TO_POINT for level in Level
)


def travels_whole(compressor: Compressor) -> bool:
    """Return whether only an all_reduce can send the compressor's payloads."""
    facts = compressor.facts
    return (
        facts.needs_whole_parameters
        or facts.agreement is not None
        or facts.state_from_payload
        or facts.decode_needs_state
    )


def _joins(held: Standing, step: Collective) -> bool:
    return bool(held.splits) and held.splits[-1].level is step.level and held.splits[-1].kind.joined_by is step.kind


def _collective_misfit(held: Standing, step: Collective) -> str | None:
    kind, compressor = step.kind, held.compressor
    if kind is CollectiveKind.POINT_TO_POINT:
        return "point_to_point is no collective of gradients"
    if held.proposed is None and _joins(held, step):
        if not held.is_complete:
            return "shards are put together once their sum is complete"
        if compressor is not None and travels_whole(compressor):
            return f"{compressor} payloads can only be added up: all_reduce"
        return None
    if kind is CollectiveKind.BROADCAST or (kind is CollectiveKind.ALL_GATHER and compressor is None):
        splitters = "reduce or gather" if kind is CollectiveKind.BROADCAST else "reduce_scatter or all_to_all"
        return f"no {splitters}@{step.level.value} has split the bucket before it"
    if step.level.axes & held.summed:
        return f"gradients are summed over {step.level.value} already, and would count twice"
    if held.proposed is not None:
        return None
    if compressor is None:
        return None if kind.sums else f"dense values are not sent by {kind.value}; compress them before"
    if kind.sums:
        if not compressor.is_linear:
            return f"the network cannot add {compressor} payloads up; gather them"
        if held.is_piled:
            return "several ranks' payloads lie side by side, which the network cannot add up; decompress them before"
    if held.agreed is not None and held.agreed[1] is not step.level:
        return f"the ranks have agreed over {held.agreed[1].value}"
    if travels_whole(compressor) and kind is not CollectiveKind.ALL_REDUCE:
        return f"{compressor} payloads can only be added up: all_reduce"
    return None


def _encoder_misfit(held: Standing, compressor: Compressor) -> str | None:
    if held.compressor is not None:
        return f"the values are {held.compressor} payloads already; decompress them before"
    if compressor.facts.is_exact and held.summed:
        return f"{compressor} sends casts of 16-bit values, and these are sums"
    if held.splits and compressor.facts.needs_whole_parameters:
        return f"{compressor} compresses whole parameters, but each rank has a shard of the bucket"
    return None


def _agreement_misfit(held: Standing, compressor: Compressor) -> str | None:
    if compressor.facts.agreement is None or held.agreed is not None:
        return None
    return f"{compressor} needs an agreement of the ranks: propose({compressor}) > all_reduce before it"


def _compresses(step: Step, compressor: Compressor) -> bool:
    return isinstance(step, Compress) and step.compressor == compressor


def _refusal(steps: tuple[Step, ...], number: int, problem: str, held: Standing) -> str:
    whole = text_of(steps) or "(no steps)"
    where = f"step {number + 1}, {steps[number]}, does not fit" if number < len(steps) else "its end does not fit"
    compressors = dict.fromkeys(step.compressor for step in steps if isinstance(step, Compress | Propose))
    encoders = [make(compressor) for compressor in compressors for make in (Propose, Compress)]
    named = {step.level for step in steps if isinstance(step, Collective)}
    sending = fitting(held, COLLECTIVES)
    sending = [step for step in sending if isinstance(step, Collective) and step.level in named] or sending
    would = list(map(str, [*sending, *fitting(held, [*encoders, Decompress()])]))
    instead = f"  Would fit here: {', '.join(would)}" if would else "  Nothing fits here: change a step before it"
    return (
        f"the strategy {whole!r} does not sum each gradient over all ranks once: {where}: {problem}.\n"
        f"  Held before it: {held}.\n{instead}."
    )
