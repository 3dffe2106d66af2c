"""Modes: candidate strategies for a bucket, and a plan's error limit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import CastCompressor, Compressor, ExactBF16, ExactFP16, ExactFP32, parse_compressor
from fxcomp.errors import BadOption, BadPlan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Plan
from fxcomp.plan.strategy import DENSE, FLAT, HOSTS, RACKS, ByLevel, Device, Strategy


class Mode(Enum):
    """Trade-off between precision and speed."""

    LOSSLESS = "lossless"  # dense, or 16-bit values in 16 bits
    BALANCED = "balanced"  # follows the dense loss
    AGGRESSIVE = "aggressive"  # within 1.5 % of the dense loss, measured on our tasks
    LOSSY = "lossy"  # as fast as possible

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Parse a mode's name. Raise BadOption."""
        if text in MODES:
            return cls(text)
        close = difflib.get_close_matches(text.lower(), MODES, n=1, cutoff=0.0)
        raise BadOption(f"there is no mode {text!r}; did you mean {close[0]!r}? The modes are {', '.join(MODES)}.")


MODES = tuple(mode.value for mode in Mode)


class Content(Enum):
    """Content of a bucket. Vectors (biases, norms) are small and most sensitive to errors."""

    MATRICES = "matrices"
    VECTORS = "vectors"
    MIXED = "both"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Entry:
    """Candidate: one compressor (one shot) or two (two shots), and the reason to offer it."""

    first: str
    second: str | None
    reason: str
    vectors: bool = False
    mixed: bool = False


# By increasing error, because the first entry wins a tie.
_BALANCED = (
    Entry("bf16", None, "half the bytes at no visible error; the network sums it", vectors=True, mixed=True),
    Entry("int8", None, "a quarter of the bytes, the fewest without error feedback", mixed=True),
    Entry("int8", "int8", "a quarter of the bytes on any number of ranks", mixed=True),
    Entry("int4", None, "an eighth of the bytes, the fewest that follow the dense loss"),
    Entry("int4", "int8", "bytes between int4 twice and int8 twice, at the error of one int4"),
    Entry("int4", "int4", "an eighth of the bytes on any number of ranks; follows the dense loss with two residuals"),
)
_LOSSY = (
    Entry("powersgd(4)", None, "summed by the network, so bytes do not grow with ranks; cheap where matrices are wide"),
    Entry("powersgd(2)", None, "the fewest bytes of all for large matrices"),
    Entry("sign", None, "a bit a value, by the fastest kernel with fewer bits than int4"),
    Entry("sign", "int4", "fewer bytes than int4 twice on any number of ranks; sign twice converges much worse"),
    Entry("topk(0.01)", None, "one value in a hundred: the fewest bytes on few ranks"),
    Entry("topk(0.01)", "int4", "bytes do not grow with ranks: fewer than top-k alone from 24 ranks on"),
    Entry("sidco(0.01)", None, "about the values of topk, found faster in matrices, in twice the bytes"),
)
ENTRIES: dict[Mode, tuple[Entry, ...]] = {
    Mode.LOSSLESS: (),
    Mode.BALANCED: _BALANCED,
    Mode.AGGRESSIVE: _BALANCED,
    Mode.LOSSY: (*_BALANCED, *_LOSSY),
}
"""Candidates of each mode, without dense strategies; see docs/strategies.md."""


def _compressors(entries: Iterable[Entry]) -> tuple[Compressor, ...]:
    names = dict.fromkeys(name for entry in entries for name in (entry.first, entry.second) if name is not None)
    return tuple(map(parse_compressor, names))


AT_MOMENTA = (
    Entry("cmax(8)", "cmax(8)", "a sixtieth of the bytes, after the second moment is frozen"),
    Entry("cmax(8)", None, "the same for two ranks"),
)
"""Candidates for matrices if momenta are exchanged (measured, docs/where_the_mean_stands.md)."""

MOMENTUM_COMPRESSORS = _compressors(AT_MOMENTA)

_DENSITIES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
_RANKS = (1, 2, 4, 8, 16)
_LADDER = (
    *_BALANCED,
    Entry("int2", None, "a sixteenth, at ten times the error of int4"),
    Entry("int2", "int4", "between int4 twice and the sign"),
    *(Entry(f"powersgd({rank})", None, "as many singular values as a layer needs") for rank in _RANKS),
    Entry("sign", None, "a bit a value"),
    Entry("sign", "int4", "a bit a value on any number of ranks"),
    *(Entry(f"topk({density})", None, "as many values as a layer needs") for density in _DENSITIES),
    *(Entry(f"topk({density})", "int4", "the same on many ranks") for density in _DENSITIES),
    *(Entry(f"sidco({density})", None, "the same, sooner") for density in (0.001, 0.01)),
)
"""Candidates under an error budget: every family of compressors, with parameters that grow by factors of 2 to 3."""

_LIMIT_AT_DENSE_LOSS = 0.028  # int4 in blocks of 128, both shots, all gradients
_ERROR_LIMITS = {
    Mode.LOSSLESS: 0.0,
    Mode.BALANCED: _LIMIT_AT_DENSE_LOSS,
    Mode.AGGRESSIVE: _LIMIT_AT_DENSE_LOSS,
    Mode.LOSSY: 0.93,  # top 1 % with error feedback, then int4, all gradients
}

FEWEST_FOR_TWO_SHOTS = 3
"""Minimum number of ranks for two shots; between two ranks one shot sends the same bytes in fewer messages."""


def error_limit(mode: Mode) -> float:
    """Return the limit of a plan's relative squared error."""
    return _ERROR_LIMITS[mode]


@cache
def compressors_of(mode: Mode) -> tuple[Compressor, ...]:
    return _compressors(ENTRIES[mode])


LADDER_COMPRESSORS = _compressors(_LADDER)


def strategies(
    mode: Mode, cluster: Cluster, content: Content = Content.MATRICES, *, offload: bool = True
) -> tuple[Strategy, ...]:
    """Return a bucket's strategies in a mode, dense first, then by error.

    `offload` allows the thread pool, which does not help if device work uses all processors.
    """
    entries = [entry for entry in ENTRIES[mode] if mode is Mode.LOSSY or _is_for(entry, content)]
    return _ways_of(tuple(entries), cluster, offload=offload)


def strategies_within(
    limit: float, cluster: Cluster, content: Content = Content.MATRICES, *, offload: bool = True
) -> tuple[Strategy, ...]:
    """Return a bucket's strategies under an error limit.

    Up to balanced mode's limit, vectors get only balanced mode's candidates.
    """
    is_gentle = limit <= error_limit(Mode.BALANCED)
    entries = [entry for entry in _LADDER if not is_gentle or _is_for(entry, content)] if limit > 0 else []
    return _ways_of(tuple(entries), cluster, offload=offload)


def strategies_at_momenta(cluster: Cluster, content: Content, *, offload: bool = True) -> tuple[Strategy, ...]:
    """Return a bucket's strategies if momenta are exchanged, dense first; vectors keep exchanging gradients."""
    beside = tuple(entry for entry in _BALANCED if entry.vectors)
    entries = {Content.MATRICES: AT_MOMENTA, Content.VECTORS: beside}
    return _ways_of(entries.get(content, ()), cluster, offload=offload)


@lru_cache(maxsize=256)
def _ways_of(entries: tuple[Entry, ...], cluster: Cluster, *, offload: bool) -> tuple[Strategy, ...]:
    if cluster.world_size == 1:
        return (DENSE,)
    devices = tuple(Device) if offload else (Device.GPU,)
    compressed = (each for entry in entries for device in devices for each in _compressed(entry, device, cluster))
    return tuple(dict.fromkeys((*one_shot_ways(None, cluster), *compressed)))


@lru_cache(maxsize=1024)
def worth_offering(
    offered: tuple[Strategy, ...], element_type: ElementType, cluster: Cluster, *, offload: bool = True
) -> tuple[Strategy, ...]:
    """Replace strategies whose cast does not shorten the gradients' type by dense strategies, and add exact ones."""
    worth = (each.uncompressed if _is_no_shorter(each, element_type) else each for each in offered)
    return tuple(dict.fromkeys((*worth, *exact_ways(element_type, cluster, offload=offload))))


EXACT = {each.payload_dtype: each for each in (ExactBF16(), ExactFP16(), ExactFP32())}
"""Compressor that sends the values of a type without error."""


def exact_ways(element_type: ElementType, cluster: Cluster, *, offload: bool = True) -> Iterator[Strategy]:
    """Yield the strategies that send these gradients in 16 bits without error.

    Sums by level would come before compression, and are no 16-bit values.
    """
    if element_type.narrow is None or cluster.world_size == 1:
        return
    exact = EXACT[element_type.narrow]
    for device in Device if offload else (Device.GPU,):
        yield Strategy.flat(exact, device)
        if cluster.world_size >= FEWEST_FOR_TWO_SHOTS:
            yield Strategy.two_shots(exact, None, device)


def _is_no_shorter(strategy: Strategy, element_type: ElementType) -> bool:
    return any(
        isinstance(each, CastCompressor)
        and not each.facts.is_exact
        and each.payload_dtype.itemsize >= element_type.itemsize
        for each in strategy.compressors
    )


def in_rank_order(plan: Plan, cluster: Cluster) -> Plan:
    """Replace the plan's strategies by exact strategies, which add values in the order of the ranks.

    Raises BadPlan for fp64 gradients.
    """
    if cluster.world_size == 1:
        return plan
    strategies: list[Strategy] = []
    for bucket in plan.buckets:
        exact = EXACT.get(bucket.element_type.narrow or bucket.element_type.dtype)
        if exact is None:
            raise BadPlan(
                f"sums in the order of the ranks are fp32, and the gradient of {bucket.names[0]!r} is"
                f" {bucket.element_type}.\n  Leave sums= out, or keep the parameter in float32."
            )
        is_one_shot = cluster.world_size < FEWEST_FOR_TWO_SHOTS
        strategies.append(Strategy.flat(exact) if is_one_shot else Strategy.two_shots(exact, None))
    return plan.with_strategies(strategies)


def one_shot_ways(compressor: Compressor | None, cluster: Cluster, *, offload: bool = True) -> tuple[Strategy, ...]:
    """Return a compressor's one-shot strategies: over all ranks first, then by level."""
    if cluster.world_size == 1:
        return (DENSE,)
    if compressor is None:
        return (DENSE, *(Strategy.hierarchical(None, by=by) for by in ways(cluster)))
    entry = Entry(str(compressor), None, "")
    devices = tuple(Device) if offload else (Device.GPU,)
    return tuple(dict.fromkeys(each for device in devices for each in _compressed(entry, device, cluster)))


def _is_for(entry: Entry, content: Content) -> bool:
    if content is Content.MATRICES:
        return True
    return entry.vectors if content is Content.VECTORS else entry.mixed


def ways(cluster: Cluster) -> tuple[ByLevel, ...]:
    if cluster.hosts == 1 or (cluster.ranks_per_host == 1 and not cluster.has_racks):
        return ()
    if not cluster.is_even:
        return (replace(HOSTS, rooted=True),)
    by_host = (HOSTS,) if cluster.ranks_per_host > 1 else ()
    if not cluster.has_racks:
        return by_host
    return (*by_host, RACKS)


def _compressed(entry: Entry, device: Device, cluster: Cluster) -> Iterator[Strategy]:
    first = parse_compressor(entry.first)
    if entry.second is not None:
        second = parse_compressor(entry.second)
        flat = (FLAT,) if cluster.world_size >= FEWEST_FOR_TWO_SHOTS else ()
        for by in (*flat, *(by for by in ways(cluster) if cluster.ranks_at(by.outermost) >= FEWEST_FOR_TWO_SHOTS)):
            yield Strategy.two_shots(first, second, device, by=by)
        return
    yield Strategy.flat(first, device)
    if first.facts.needs_whole_parameters:
        return
    for by in ways(cluster):
        yield Strategy.hierarchical(first, device, by=by)
    if cluster.has_levels and first.is_linear and first.facts.agreement is None and not first.has_state:
        yield Strategy.parse(
            f"compress({first})@{device.value} > reduce_scatter@intra > all_reduce@inter > all_gather@intra"
            f" > decompress@{device.value}"
        )
