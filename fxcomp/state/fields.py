"""Fields of a saved state, and the check of a state that comes from a file.

Other modules read a state only after `check_state`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fxcomp.cluster.link import MOST_RANKS, shortened
from fxcomp.compat import CHECKSUM
from fxcomp.cost.reading import FLAG, TEXT, Reader, keyed, listed, null_or, number, record, whole, wrong
from fxcomp.errors import BadState, FxcompError
from fxcomp.plan.plan import Plan
from fxcomp.state.checksums import is_whole

VERSION = 4
"""Version of the format of saved states."""

PLAN, SCALE, GENERATORS, CALENDAR = "followed plan", "scale of the loss", "generators", "calendar"
"""Keys of a saved state: the current plan, the loss scale of residuals, and the states of default random generators."""

SHARD = "shard"
"""Key of the index of a rank's shard, and the number of shards."""

MOVED, THAWED, THAWS, FREEZES_AT = "momenta", "thawed", "thaws", "freezes_at"
"""Keys of a state of a job that exchanges momenta; see `state/momenta.py`."""


def flat_tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.requires_grad)
        if is_plain and value.dim() == 1 and value.nbytes <= value.untyped_storage().nbytes():  # no value repeats
            return value
    raise wrong(place, "a flat tensor of values", value if isinstance(value, Tensor) else cast("object", type(value)))


def _values(value: Any, place: str) -> Tensor:
    if not flat_tensor(value, place).is_floating_point():
        raise wrong(place, "a tensor of floating-point values", value.dtype)
    return value


def _generator(value: Any, place: str) -> Tensor:
    state = flat_tensor(value, place)
    try:
        if place.endswith(".cpu"):  # a device's states have another format
            torch.Generator().set_state(state.cpu())
    except (RuntimeError, TypeError):
        raise wrong(place, "the state of a random generator", state.dtype) from None
    return state


def _index(value: Any, place: str) -> int:
    """Read the index of a parameter group, which JSON has turned into a text."""
    return whole(0)(int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) else value, place)


def _share(value: Any, place: str) -> float:
    """Read a weight, the numerator and denominator of a number above 0."""
    parts = listed(whole(1))(value, place)
    if len(parts) != 2 or parts[0] > parts[1] * MOST_RANKS:
        raise wrong(place, f"a numerator and a denominator of a number up to {MOST_RANKS:,}", value)
    return parts[0] / parts[1]


_COUNT = whole(0)
_SLICE = record(
    dict[str, Any], values=_values, start=_COUNT, size=_COUNT, slot=_COUNT, place=_COUNT, weight=_share, total=_share
)
_PART = record(
    dict[str, Any], compressor=TEXT, size=_COUNT, elements=_COUNT, dtype=TEXT, slot=_COUNT, start=_COUNT, place=_COUNT,
    state=flat_tensor,
)  # fmt: skip


def _part(value: Any, place: str) -> Any:
    part = _PART(value, place)
    held = part["state"].numel(), str(part["state"].dtype).removeprefix("torch.")
    if held != (part["elements"], part["dtype"]):
        raise wrong(f"{place}.state", f"{part['elements']} values of {part['dtype']}", held)
    return part


_NEEDED: Mapping[str, Reader[Any]] = {
    "plan": TEXT,
    "rank": _COUNT,
    "ranks": whole(1, MOST_RANKS),
    "steps": _COUNT,
    "learning_rates": keyed(number(), key=_index),
    "residuals": keyed(listed(_SLICE)),
    "owed": keyed(_values),
    "compressors": keyed(listed(_part)),
}
_OTHERS: Mapping[str, Reader[Any]] = {
    PLAN: lambda value, _: Plan.from_json(value),
    SCALE: number(2.0**-149, 2.0**128),  # range of float32
    GENERATORS: keyed(_generator),
    CALENDAR: record(dict[str, Any], patience=whole(1), patient_until=_COUNT, begins=null_or(_COUNT), is_settled=FLAG),
    SHARD: listed(_COUNT),
    MOVED: listed(TEXT),
    THAWED: FLAG,
    THAWS: whole(0, 64),  # each doubles the time to the next
    FREEZES_AT: null_or(_COUNT),
}


_KNOWN = {"version", CHECKSUM, *_NEEDED, *_OTHERS}
"""Fields that the checksum covers; users may add others."""


def check_state(given: Any) -> Mapping[str, Any]:
    """Return a saved state whose fields have the right types and possible values. Raises BadState."""
    if not isinstance(given, Mapping) or not isinstance(given.get("residuals"), Mapping):  # pyright: ignore[reportUnknownMemberType]
        what = "it has no residuals" if isinstance(given, Mapping) else f"it is a {type(given).__name__}"
        raise BadState(
            f"this is not a saved state: {what}.\n"
            "  Pass the result of state_dict() or checkpoint(), which torch.load, load_file or fxcomp.read_checkpoint"
            " read from a file."
        )
    state = cast("Mapping[str, Any]", given)
    # values of other types may be endless
    version, rank = (value if isinstance(value := state.get(name), int) else "unknown" for name in ("version", "rank"))
    if version != VERSION:
        raise BadState(
            f"this state has version {shortened(version)}; this fxcomp reads version {VERSION}.\n"
            "  Load it with the fxcomp that saved it, or start without a state: load None on every rank."
        )
    if not is_whole({name: value for name, value in state.items() if name in _KNOWN}):
        raise BadState(
            f"the saved state of rank {shortened(rank)} is damaged, was edited, or was mixed with another rank's: its"
            " checksum is wrong.\n"
            "  Load an earlier one, on every rank. With a checkpoint library, save step.checkpoint()."
        )
    try:
        record(dict[str, Any], **_NEEDED)({name: state[name] for name in _NEEDED if name in state}, "")
        for name, reader in _OTHERS.items():
            if name in state:
                reader(state[name], name)
    except FxcompError as error:
        raise BadState(f"the state is not whole: {error}.\n  Load a state as state_dict() returned it.") from None
    if state["rank"] >= state["ranks"]:
        raise BadState(f"the state is of rank {state['rank']} of {state['ranks']}: there is no such rank")
    if (begins := state.get(CALENDAR, {"begins": 0})["begins"] or 0) > state["steps"]:
        raise BadState(f"the state is of step {state['steps']}, and its warm-up begins later, at step {begins}")
    return state
