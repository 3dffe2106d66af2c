"""Enumerate strategies: every legal sequence of steps inside a space.

    Space(((Phase(Level.WORLD),),), compressors=(Int8(),), most_compressions=1)
 -->
    all_reduce@world
    reduce_scatter@world > all_gather@world
    reduce_scatter@world > compress(int8)@gpu > all_gather@world > decompress@gpu
    reduce@world > broadcast@world
    reduce@world > compress(int8)@gpu > broadcast@world > decompress@gpu
    compress(int8)@gpu > all_gather@world > decompress@gpu
    ...

`fxcomp/plan/interpret.py` says which steps fit; a space says which of them are wanted. The order is the same on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxcomp.cluster.cluster import Cluster, Level
from fxcomp.compressors import Compressor
from fxcomp.plan.interpret import Collective, Compress, Decompress, Device, Propose, Standing, Step, after, misfit
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.plan.strategy import Strategy

INDIVISIBLE = tuple(kind for kind in CollectiveKind if (kind.sums or kind.gathers) and not kind.splits)
"""One collective gives everybody the sum."""

SHARDED = tuple(kind for kind in CollectiveKind if kind.splits and not kind.is_rooted)
"""Each rank gets the sum of one shard; shards are put together later."""

ROOTED = tuple(kind for kind in CollectiveKind if kind.splits and kind.is_rooted)
"""The first rank gets the sum, and sends it to the others later."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Add gradients up over one level, by one of these collectives."""

    level: Level
    kinds: tuple[CollectiveKind, ...] = (*INDIVISIBLE, *SHARDED, *ROOTED)


Way = tuple[Phase, ...]
"""The levels over which gradients are added, in order. What they split is put together in the reverse order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Restrict the steps that a strategy may have."""

    ways: tuple[Way, ...]
    compressors: tuple[Compressor, ...] = ()
    """The compressors that a strategy may use."""
    devices: tuple[Device, ...] = (Device.GPU,)
    """The devices of compressions and decompressions."""
    most_compressions: int | None = None
    """The most compressions of a strategy; None for any number."""
    adds_payloads: bool = True
    """The network may add up the payloads of linear compressors. Otherwise they are gathered like others."""
    mixes_compressors: bool = False
    """A strategy may compress with one compressor first, and with another one later."""


def ways_through(cluster: Cluster) -> tuple[Way, ...]:
    """List the ways over all ranks: at once, host by host, and rack by rack. The innermost level comes first."""
    levels: list[tuple[Level, ...]] = [(Level.WORLD,)]
    if cluster.has_levels:
        levels.append((Level.INTRA, Level.INTER))
    if cluster.has_levels and cluster.has_racks:
        levels.append((Level.INTRA, Level.RACK, Level.RACKS))
    return tuple(tuple(map(Phase, each)) for each in levels)


def published_space(*compressors: Compressor, devices: tuple[Device, ...] = (Device.GPU,)) -> Space:
    """Return the space of Espresso's decision tree (EuroSys 2023, figure 8).

    At once, or host by host. A host's ranks always share the work between hosts: inside a host no collective gives
    every rank the sum. The network never adds payloads up.
    """
    inside = Phase(Level.INTRA, (*SHARDED, *ROOTED))
    ways = ((Phase(Level.WORLD),), (inside, Phase(Level.INTER)))
    return Space(ways=ways, compressors=compressors, devices=devices, adds_payloads=False)


def strategies_in(space: Space) -> Iterator[Strategy]:
    """Yield each strategy of a space once, dense steps before compressed ones."""
    return (Strategy(steps) for way in space.ways for steps in _completions(space, way, (), Standing()))


def _completions(space: Space, way: Way, begun: tuple[Step, ...], held: Standing) -> Iterator[tuple[Step, ...]]:
    """Yield every way in which begun steps, after which this is held, can end."""
    if held.is_mean:
        yield begun
        return
    for step in _candidates(space, way, begun, held):
        if misfit(held, step) is None:
            yield from _completions(space, way, (*begun, step), after(held, step))


def _candidates(space: Space, way: Way, begun: tuple[Step, ...], held: Standing) -> Iterator[Step]:
    """List the wanted steps, whether they fit or not."""
    yield from _collectives(space, way, held)
    if held.compressor is not None:
        yield from map(Decompress, space.devices)
        return
    used = [step.compressor for step in begun if isinstance(step, Compress)]
    if space.most_compressions is not None and len(used) >= space.most_compressions:
        return
    for compressor in space.compressors if space.mixes_compressors else used[:1] or space.compressors:
        yield from (make(compressor, device) for make in (Propose, Compress) for device in space.devices)


def _collectives(space: Space, way: Way, held: Standing) -> Iterator[Collective]:
    if held.is_complete:
        yield from (Collective(split.kind.joined_by, split.level) for split in held.splits[-1:])
        return
    phase = next(phase for phase in way if not phase.level.axes <= held.summed)
    for kind in phase.kinds:
        if space.adds_payloads or held.compressor is None or not kind.sums:
            yield Collective(kind, phase.level)
