"""Save the gradient state of a step, and load it on any number of ranks and under any plan.

Every rank saves its residuals as `Slice`s. All ranks load together. `hand_over` preserves the sum of the residuals.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fxcomp.cluster.link import shortened
from fxcomp.errors import BadState
from fxcomp.plan.plan import Plan
from fxcomp.runtime.arena import Slice
from fxcomp.runtime.compressor_states import CompressorStates
from fxcomp.state.checksums import checksum_of_tensor
from fxcomp.state.fields import PLAN, SCALE, VERSION
from fxcomp.state.gradient_state import GradientState, share_memories
from fxcomp.state.handover import Holding, Sharing, hand_over

Given = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Argument of `load_state_dict`: one saved state, several if the job has fewer ranks than before, or None."""


def state_dict(state: GradientState, plan: Plan, steps: int, rank: int, ranks: int) -> dict[str, Any]:
    """Copy a rank's gradient state as plain data and tensors. Residuals are keyed by parameter name."""
    return {
        "version": VERSION,
        "plan": plan.digest,
        "rank": rank,
        "ranks": ranks,
        "steps": steps,
        "learning_rates": dict(state.rates),
        "residuals": {name: [_fields(kept) for kept in pieces] for name, pieces in state.residuals.slices.items()},
        "owed": {name: value.detach().clone() for name, value in state.owed.items()},
        **state.compressor_states.state_dict(),
    }


_NUMBERS, _SHARES = ("start", "size", "slot", "place"), ("weight", "total")


def _fields(kept: Slice) -> dict[str, Any]:
    return {
        "values": kept.values.detach().clone(),
        **{name: getattr(kept, name) for name in _NUMBERS},
        **{name: list(getattr(kept, name).as_integer_ratio()) for name in _SHARES},
    }


def states_given(given: Given) -> Sequence[Mapping[str, Any]]:
    states: Any = () if given is None else (given,) if isinstance(given, Mapping) else given
    return states


def scale_of(given: Given) -> float | None:
    """Return the loss scale of the saved residuals, or None if the loss was not scaled."""
    return next((state[SCALE] for state in states_given(given) if SCALE in state), None)


def plan_of(given: Given) -> Any:
    """Return the first saved plan as JSON, or None without a saved plan."""
    return next((Plan.from_json(state[PLAN]).to_json() for state in states_given(given) if PLAN in state), None)


# Reading one state


@dataclass(frozen=True, slots=True)
class Saved:
    rank: int
    ranks: int
    steps: int
    rates: Mapping[int, float]
    residuals: Mapping[str, Sequence[Slice]]
    owed: Mapping[str, Tensor]
    compressors: Mapping[str, Any]


def _read(given: Any, sizes: Mapping[str, int]) -> Saved:
    """Compare a state with the model. `sizes` has each parameter's number of elements. Raises BadState."""
    rates = {int(group): rate for group, rate in given["learning_rates"].items()}  # JSON has turned indices into texts
    slices = {name: [_slice(kept) for kept in pieces] for name, pieces in given["residuals"].items()}
    whose = given["rank"], given["ranks"], given["steps"]
    saved = Saved(*whose, rates, slices, given["owed"], given["compressors"])
    for name, size in Plan.from_json(given[PLAN]).sizes.items() if PLAN in given else ():
        _check("buckets", name, Slice(torch.empty(0), 0, size), sizes)
    for name, pieces in saved.residuals.items():
        for kept in pieces:
            _check("residuals", name, kept, sizes)
    for name, value in saved.owed.items():
        _check("residuals", name, Slice(value, 0, value.numel()), sizes)
    return saved


def _slice(kept: Mapping[str, Any]) -> Slice:
    start, size, slot, place = (kept[name] for name in _NUMBERS)
    weight, total = (Fraction(*kept[name]) for name in _SHARES)
    return Slice(kept["values"], start, size, slot, place, weight, total)


def _check(what: str, name: str, kept: Slice, sizes: Mapping[str, int]) -> None:
    wanted = sizes.get(name)
    if wanted is None:
        raise BadState(
            f"the saved {what} are of another model: they hold {name!r}, which this model does not have.\n"
            "  Load the state of the same model."
        )
    if kept.size != wanted or kept.start < 0 or kept.start + kept.values.numel() > wanted:
        raise BadState(
            f"the saved {what} are of another model: {name!r} had {kept.size:,} elements, and has {wanted:,} here.\n"
            "  Load the state of the same model."
        )


# Reading together


@dataclass(frozen=True, slots=True)
class Agreed:
    """Saved states that this rank loads. The other fields describe the saving job and are equal on all ranks."""

    states: tuple[Saved, ...]
    ranks: int
    steps: int
    rates: Mapping[int, float]
    lost: tuple[int, ...]
    """Ranks of the saving job whose states no rank loads."""


def read_together(given: Given, sizes: Mapping[str, int], sharing: Sharing) -> Agreed | None:
    """Validate the states that all ranks load; return None if there are none. Every rank calls it.

    `sizes` has each parameter's number of elements. Raises BadState on all ranks if states do not belong together, and
    PeerFailed if another rank's state is bad.
    """

    def mine() -> tuple[Saved, ...]:
        return tuple(_read(state, sizes) for state in states_given(given))

    states = sharing.attempt("reading", mine)
    facts: list[Any] = [[s.rank, s.ranks, s.steps, list(s.rates.items())] for s in states]
    everyone = sharing.gather("comparing", facts)
    flat: list[Any] = [(reader, *fact) for reader, theirs in enumerate(everyone) for fact in theirs]
    if not flat:
        return None
    readers: dict[int, int] = {}
    for reader, saver, *_ in flat:
        if saver in readers:
            raise BadState(
                f"rank {readers[saver]} and rank {reader} load the state of rank {saver}: its residuals would count"
                " twice.\n  Save a state on every rank, and load each one once."
            )
        readers[saver] = reader
    check_shared_facts({saver: {"number of ranks": n, "number of steps": steps} for _, saver, n, steps, _ in flat})
    _, _, ranks, steps, rates = flat[0]
    lost = tuple(rank for rank in range(ranks) if rank not in readers)
    return Agreed(states, ranks, steps, {int(group): rate for group, rate in rates}, lost)


def check_shared_facts(known: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise BadState for the first fact that differs between ranks; the error is the same on all ranks."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, facts in known.items():
        for what, value in facts.items():
            first, other = seen.setdefault(what, (rank, value))
            if value != other:
                values = f" ({value} and {other})" if what.startswith("number of") else ""
                raise BadState(
                    f"the states of rank {rank} and rank {first} do not belong together: they differ in"
                    f" {what}{values}.\n"
                    "  Load on every rank the state that it saved at the same step, and None on a rank without one."
                )


# Loading


def restore(agreed: Agreed, into: GradientState, trained: Mapping[str, int], sharing: Sharing) -> None:
    """Load the saved states into the current plan's state `into`. Every rank calls it.

    `trained` has the number of elements of each parameter with a gradient, in the same order on all ranks. Raises
    BadState if a compressor state differs between ranks that must share it.
    """
    states, rank = agreed.states, sharing.peers.rank
    sharing.attempt("reporting lost residuals", lambda: tell_what_is_lost(agreed, trained, rank))
    residuals = Holding(agreed.ranks, _joined([s.residuals for s in states]), _by_name([s.owed for s in states]))
    owed = hand_over(residuals, into.residuals, trained, sharing)
    own_first = sorted(states, key=lambda saved: saved.rank != rank)
    _restore_compressors([saved.compressors for saved in own_first], into.compressor_states, sharing)
    into.owed, into.rates = owed, dict(agreed.rates)


def _joined(states: Sequence[Mapping[str, Sequence[Slice]]]) -> dict[str, list[Slice]]:
    return {name: list(itertools.chain(*pieces)) for name, pieces in _by_name(states).items()}


def _by_name(states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [state[name] for state in states if name in state] for state in states for name in state}


def tell_what_is_lost(agreed: Agreed, trained: Collection[str], rank: int) -> None:
    if agreed.lost and rank == 0:
        who = shortened(", ".join(map(str, agreed.lost)))
        _warn(
            f"no rank loads the state of rank {who} of {agreed.ranks}: the residuals there are lost. Where"
            " ranks have gone, load their states too, on any rank: step.load_state_dict([state, another]). Under a"
            f" Trainer, put the missing files (fxcomp-rank{agreed.lost[0]} in a name) back where the others are, and"
            " go on from that checkpoint again."
        )
    held = [(n, kept.values) for s in agreed.states for n, pieces in s.residuals.items() for kept in pieces]
    held += [(n, value) for s in agreed.states for n, value in s.owed.items()]
    frozen = sorted({name for name, values in held if name not in trained and bool(values.any())})
    if frozen:
        _warn(
            f"{frozen[0]!r} gets no gradient any more{f', and {len(frozen) - 1} others' if len(frozen) > 1 else ''}:"
            " the residuals are dropped."
        )


def _warn(text: str) -> None:
    warnings.warn(f"fxcomp: {text}", stacklevel=4)


# Compressor states


def _restore_compressors(states: Sequence[Mapping[str, Any]], kept: CompressorStates, sharing: Sharing) -> None:
    """Load compressor states that match the plan. A rank that lacks a shared state receives another rank's."""
    reset = sharing.attempt("loading compressor states", lambda: kept.take_back(states))
    shared = kept.shared()
    fingerprints = {label: checksum_of_tensor(value) for label, value in shared.items() if label not in reset}
    everyone = sharing.gather("comparing compressor states", fingerprints)
    check_shared_facts(dict(enumerate(everyone)))
    missing = share_memories(kept, reset, sharing)
    told = {label: found for label, found in reset.items() if label in missing}
    sharing.attempt("reporting lost compressor states", lambda: kept.tell(told))
