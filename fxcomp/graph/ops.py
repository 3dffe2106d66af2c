"""Custom operators around collectives, functional and visible as graph nodes.

Emitted code calls methods of the runtime in their place. `arrive` and collectives of parts (`OF_PARTS`) have no other
implementation: called as operators, they raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.errors import BadTensor
from fxcomp.plan.kinds import CollectiveKind
from fxcomp.runtime.exchange import exchange, filled
from fxcomp.runtime.packing import packed_dtype, packed_sizes, rng_state, seed_rng, set_rng_state, slots
from fxcomp.runtime.transfers import pattern_of

_LIBRARY: Any = torch.library.Library("fxcomp", "FRAGMENT")


def _define(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> None:
    _LIBRARY.define(schema, tags=tuple(tags))
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{name}", fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]  # untyped


def _like_first(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value)


def _pack(
    gradients: Sequence[Tensor],
    scale: float,
    *,
    dtype: torch.dtype | None = None,
    factor: Tensor | None = None,
    applies: bool = True,
) -> Tensor:
    flat = _pack_fake(gradients, scale, dtype=dtype)
    for slot, gradient in zip(slots(flat, gradients, dtype), gradients, strict=True):
        slot.copy_(gradient)
    if factor is not None and applies:
        return flat * (factor * scale)
    return flat if scale == 1.0 else flat * scale


def _pack_fake(gradients: Sequence[Tensor], scale: float, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # noqa: ARG001
    return gradients[0].new_empty(sum(packed_sizes(gradients, dtype)), dtype=packed_dtype(gradients, dtype))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype, copy=True)


def _cast_fake(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(value, dtype=dtype)


def _in_place(flat: Tensor, start: int, stop: int, scale: float) -> Tensor:
    return flat[start:stop] * scale


def _turn(payloads: Tensor, outer: int, sizes: Sequence[int]) -> Tensor:
    return torch.cat([part.flatten() for part in torch.split(payloads.view(outer, -1), list(sizes), dim=1)])


def _turn_fake(payloads: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(payloads)


def _copy(value: Tensor) -> Tensor:
    return value.clone()


def _all_finite(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.isfinite().all() for value in values]).all()


def _all_finite_fake(values: Sequence[Tensor]) -> Tensor:
    return values[0].new_empty((), dtype=torch.bool)


def _roll_back(residual: Tensor, own: Tensor, bucket: Tensor) -> Tensor:
    before = residual + own - bucket
    return torch.where(before.isfinite(), before, residual)


def _keep(state: Tensor, value: Tensor) -> Tensor:
    return torch.where(value.isfinite(), value.to(state.dtype), state)


def _counters_on(counters: Sequence[Tensor], there: Sequence[Tensor]) -> list[Tensor]:
    """Fill one device scalar per distinct value, because a copy from the host would block."""
    known: dict[float, Tensor] = {}
    values = [float(counter) for counter in counters]
    for value, counter in zip(values, counters, strict=True):
        if value not in known:
            known[value] = torch.full((), value, dtype=counter.dtype, device=there[0].device)
    return [known[value] for value in values]


def _counters_on_fake(counters: Sequence[Tensor], there: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(counter, device=there[0].device) for counter in counters]


def _exchange_fake(kind: str, sent: Sequence[Tensor], received: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in filled(kind, sent, received)]


def _arrive(bucket: int, compute_us: float) -> list[Tensor]:
    raise NotImplementedError(
        f"fxcomp::arrive runs only as a line of an emitted step, which stops there until bucket {bucket} is ready"
        f" ({compute_us:g} us after the one before)."
    )


def _rng_state_fake(device: torch.device) -> Tensor:
    return torch.empty(5056 if device.type == "cpu" else 16, dtype=torch.uint8)


def _set_rng_state_fake(state: Tensor, device: torch.device) -> None:
    del state, device


def _seed_rng_fake(seed: int, device: torch.device) -> None:
    del seed, device


def _move(kind: str) -> None:
    """Define a collective of parts. The operator's argument `place` is the rank's index in the group."""
    pattern = pattern_of(kind)

    def run(value: Tensor, cut: Sequence[int], place: int, level: str) -> Tensor:
        raise NotImplementedError(
            f"fxcomp::{kind} runs only as a line of an emitted step, which has a network: the graph names ranks by"
            f" their place ({place}) in a group of the level ({level})."
        )

    def fake(value: Tensor, cut: Sequence[int], place: int, level: str) -> Tensor:  # noqa: ARG001
        brings, gets = pattern.elements(tuple(cut), place)
        if value.numel() != brings:
            raise BadTensor(
                f"{kind} cut into {tuple(cut)} takes {brings} elements at place {place}, not {value.numel()}."
            )
        return value.new_empty(gets)

    _define(f"{kind}(Tensor value, int[] cut, int place, str level) -> Tensor", run, fake)


# Makes one flat bucket, multiplied by `scale` and `factor`; gradients of mixed types become bytes.
_define(
    "pack(Tensor[] gradients, float scale, *, ScalarType? dtype=None, Tensor? factor=None, bool applies=True)"
    " -> Tensor",
    _pack,
    _pack_fake,
)
_define("cast(Tensor value, ScalarType dtype) -> Tensor", _cast, _cast_fake)
# Scales a bucket inside a caller's buffer.
_define("in_place(Tensor flat, int start, int stop, float scale) -> Tensor", _in_place, _in_place)
# Reorders rows of parts, so that equal parts of all rows are adjacent.
_define("turn(Tensor payloads, int outer, int[] sizes) -> Tensor", _turn, _turn_fake)
# Copies to the host, for a compressor that runs there, and back.
_define("d2h(Tensor value) -> Tensor", _copy, _like_first)
_define("h2d(Tensor value) -> Tensor", _copy, _like_first)
_define("save(Tensor value) -> Tensor", _copy, _like_first)
_define("all_finite(Tensor[] values) -> Tensor", _all_finite, _all_finite_fake)
# Recomputes the residual before the step.
_define("roll_back(Tensor residual, Tensor own, Tensor bucket) -> Tensor", _roll_back, _like_first)
# Returns the next state: the value where it is finite, else the old state.
_define("keep(Tensor state, Tensor value) -> Tensor", _keep, _like_first)
# Moves step counters from the host to the device of `there`.
_define("counters_on(Tensor[] counters, Tensor[] there) -> Tensor[]", _counters_on, _counters_on_fake)
_define(
    "exchange(str kind, Tensor[] sent, Tensor[] received, str group, str how, SymInt[] numbers) -> Tensor[]",
    exchange,
    _exchange_fake,
)
# Returns a bucket's gradients from a backward pass outside of the graph, `compute_us` after the previous bucket's.
_define("arrive(int bucket, float compute_us) -> Tensor[]", _arrive, _arrive)
# State of a device's random generator. The tag keeps these nodes in order, because draws depend on it.
_define("rng_state(Device device) -> Tensor", rng_state, _rng_state_fake, [torch.Tag.nondeterministic_seeded])
_define(
    "set_rng_state(Tensor state, Device device) -> ()",
    set_rng_state,
    _set_rng_state_fake,
    [torch.Tag.nondeterministic_seeded],
)
_define("seed_rng(int seed, Device device) -> ()", seed_rng, _seed_rng_fake, [torch.Tag.nondeterministic_seeded])

# Collectives with a part per rank; the first rank is the root of reduce, gather and broadcast.
for _kind in CollectiveKind:
    if _kind.has_parts:
        _move(_kind.value)

PACK = torch.ops.fxcomp.pack.default
CAST = torch.ops.fxcomp.cast.default
IN_PLACE = torch.ops.fxcomp.in_place.default
TURN = torch.ops.fxcomp.turn.default
D2H = torch.ops.fxcomp.d2h.default
H2D = torch.ops.fxcomp.h2d.default
SAVE = torch.ops.fxcomp.save.default
ALL_FINITE = torch.ops.fxcomp.all_finite.default
ROLL_BACK = torch.ops.fxcomp.roll_back.default
KEEP = torch.ops.fxcomp.keep.default
COUNTERS_ON = torch.ops.fxcomp.counters_on.default
EXCHANGE = torch.ops.fxcomp.exchange.default
ARRIVE = torch.ops.fxcomp.arrive.default
RNG_STATE = torch.ops.fxcomp.rng_state.default
SET_RNG_STATE = torch.ops.fxcomp.set_rng_state.default
SEED_RNG = torch.ops.fxcomp.seed_rng.default

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
BROADCAST = torch.ops._c10d_functional.broadcast.default

WAIT = torch.ops._c10d_functional.wait_tensor.default

OF_PARTS: dict[CollectiveKind, Any] = {
    kind: getattr(torch.ops.fxcomp, kind.value).default for kind in CollectiveKind if kind.has_parts
}
"""Operator of each collective in which ranks may own parts of different sizes."""

MOVES = {operator: kind for kind, operator in OF_PARTS.items()}
"""Kind of each operator in `OF_PARTS`. Arguments are (value, cut, place, level); see `runtime/transfers.py`."""

COLLECTIVE_KINDS: dict[Any, CollectiveKind] = {
    **MOVES,
    ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    ALL_GATHER: CollectiveKind.ALL_GATHER,
    REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    BROADCAST: CollectiveKind.BROADCAST,
}
"""Kind of each operator that sends gradients or buffers."""
