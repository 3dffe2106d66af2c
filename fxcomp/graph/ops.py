"""The graph's own operators: what the collectives need around them, functional and visible as nodes.

They run as they stand, so that a rewritten graph is executable; emitted code calls the runtime instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxcomp.plan.collective_kind import CollectiveKind
from fxcomp.runtime.exchange import exchange, filled
from fxcomp.runtime.packing import packed_dtype, packed_sizes, slots

_LIBRARY: Any = torch.library.Library("fxcomp", "FRAGMENT")


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxcomp::{name}", fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]  # untyped


def _like_first(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value)


def _pack(gradients: Sequence[Tensor], scale: float) -> Tensor:
    flat = _pack_fake(gradients)
    for slot, gradient in zip(slots(flat, gradients), gradients, strict=True):
        slot.copy_(gradient)
    return flat if scale == 1.0 else flat * scale


def _pack_fake(gradients: Sequence[Tensor], *_: Any) -> Tensor:
    return gradients[0].new_empty(sum(packed_sizes(gradients)), dtype=packed_dtype(gradients))


def _turn(payloads: Tensor, outer: int, sizes: Sequence[int]) -> Tensor:
    return torch.cat([part.flatten() for part in torch.split(payloads.view(outer, -1), list(sizes), dim=1)])


def _turn_fake(payloads: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(payloads)


def _not_run(*_: Any) -> Tensor:
    raise NotImplementedError("a graph's collectives are run by the runtime: emit the step")


def _own_part_of_all(value: Tensor, cut: Sequence[int], place: int, level: str) -> Tensor:  # noqa: ARG001
    return value.new_empty(len(cut) * cut[place])


def _own_part(value: Tensor, cut: Sequence[int], place: int, level: str) -> Tensor:  # noqa: ARG001
    return value.new_empty(cut[place])


def _all_parts(value: Tensor, cut: Sequence[int], place: int, level: str) -> Tensor:  # noqa: ARG001
    return value.new_empty(sum(cut))


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


def _accumulate(bucket: Tensor, velocity: Tensor, momentum: float) -> Tensor:
    return velocity * momentum + bucket


def _mask_velocity(new: Tensor, old: Tensor, residual: Tensor) -> Tensor:
    return torch.where(new.isfinite(), torch.where(residual == 0, 0.0, new), old)


def _exchange_fake(kind: str, sent: Sequence[Tensor], received: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in filled(kind, sent, received)]


# One flat bucket, scaled; buffers of many types as bytes.
_define("pack(Tensor[] gradients, float scale) -> Tensor", _pack, _pack_fake)
# Rows of parts of these sizes, in the parts' order.
_define("turn(Tensor payloads, int outer, int[] sizes) -> Tensor", _turn, _turn_fake)
# Collectives of parts: `cut` counts the elements that each rank of the group owns, `place` is this rank's place in it.
for _name, _fake in {
    "all_gather": _all_parts,
    "broadcast": _all_parts,
    "all_to_all": _own_part_of_all,
    "gather": _own_part_of_all,
    "reduce_scatter": _own_part,
    "reduce": _own_part,
}.items():
    _define(f"{_name}(Tensor value, int[] cut, int place, str level) -> Tensor", _not_run, _fake)
# To the host, for a compressor that runs there, and back.
_define("d2h(Tensor value) -> Tensor", _copy, _like_first)
_define("h2d(Tensor value) -> Tensor", _copy, _like_first)
# A copy of what will be overwritten.
_define("save(Tensor value) -> Tensor", _copy, _like_first)
# Whether parameters may change.
_define("all_finite(Tensor[] values) -> Tensor", _all_finite, _all_finite_fake)
# The residual before it was replaced.
_define("roll_back(Tensor residual, Tensor own, Tensor bucket) -> Tensor", _roll_back, _like_first)
# The next state: the value where it is finite.
_define("keep(Tensor state, Tensor value) -> Tensor", _keep, _like_first)
# momentum · velocity + bucket.
_define("accumulate(Tensor bucket, Tensor velocity, float momentum) -> Tensor", _accumulate, _like_first)
# The next velocity: 0 where the value was sent.
_define("mask_velocity(Tensor new, Tensor old, Tensor residual) -> Tensor", _mask_velocity, _like_first)
# A collective that the loss function asks for.
_define(
    "exchange(str kind, Tensor[] sent, Tensor[] received, str group, str how, SymInt[] numbers) -> Tensor[]",
    exchange,
    _exchange_fake,
)

PACK = torch.ops.fxcomp.pack.default
TURN = torch.ops.fxcomp.turn.default
D2H = torch.ops.fxcomp.d2h.default
H2D = torch.ops.fxcomp.h2d.default
SAVE = torch.ops.fxcomp.save.default
ALL_FINITE = torch.ops.fxcomp.all_finite.default
ROLL_BACK = torch.ops.fxcomp.roll_back.default
KEEP = torch.ops.fxcomp.keep.default
ACCUMULATE = torch.ops.fxcomp.accumulate.default
MASK_VELOCITY = torch.ops.fxcomp.mask_velocity.default
EXCHANGE = torch.ops.fxcomp.exchange.default

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
BROADCAST = torch.ops._c10d_functional.broadcast.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

_OF_PARTS: dict[CollectiveKind, Any] = {
    CollectiveKind.ALL_GATHER: torch.ops.fxcomp.all_gather.default,
    CollectiveKind.BROADCAST: torch.ops.fxcomp.broadcast.default,
    CollectiveKind.ALL_TO_ALL: torch.ops.fxcomp.all_to_all.default,
    CollectiveKind.GATHER: torch.ops.fxcomp.gather.default,
    CollectiveKind.REDUCE_SCATTER: torch.ops.fxcomp.reduce_scatter.default,
    CollectiveKind.REDUCE: torch.ops.fxcomp.reduce.default,
}

COLLECTIVE_KINDS: dict[Any, CollectiveKind] = {
    ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    ALL_GATHER: CollectiveKind.ALL_GATHER,
    REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    BROADCAST: CollectiveKind.BROADCAST,
    **{operator: kind for kind, operator in _OF_PARTS.items()},
}
"""The collectives of gradients and buffers."""


def dealing_operator(kind: CollectiveKind) -> Any:
    """Return the operator of a collective whose ranks own parts, which may differ in size."""
    return _OF_PARTS[kind]


def cut_of(operator: Any, arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Read the elements that each rank owns from a collective's arguments; None where all parts are equal."""
    return tuple(arguments[1]) if operator in _OF_PARTS.values() else None
