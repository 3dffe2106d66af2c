"""Compare two plans: strategies, buckets, step times, bytes and errors.

    12 gradients  30.1 MB  int8 -> powersgd(4)
     3 gradients   0.2 MB  in another bucket

Plans may split a gradient differently. Each compared piece of a gradient lies in one bucket of each plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, cast

from fxcomp.errors import BadPlan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.report.document import Block, Section, Table, count, mb, short

_MOST_ROWS = 8  # rows of a table, unless all are requested
_SHOWN = 2  # names per row

_NUMBERS = {"step_ms": "predicted step, ms", "wire_bytes": "bytes sent by a rank", "loss": "relative squared error"}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and the step time, bytes and errors in its file."""

    plan: Plan
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Error of each gradient, as a fraction of all gradients' squares; empty without an error budget."""

    @classmethod
    def from_json(cls, data: object) -> PlanFile:
        """Read a saved plan or the output of `explain --json`. Raise BadPlan."""
        if not isinstance(data, Mapping):
            raise BadPlan(f"this is a {type(data).__name__}, and no plan")
        facts = cast("Mapping[str, Any]", data)
        if "buckets" in facts:
            return cls(Plan.from_json(facts))
        if "plan" not in facts:
            raise BadPlan("this has neither buckets nor a plan")
        try:
            buckets: Sequence[Mapping[str, Any]] = facts["plan"]["buckets"]
            plan = Plan(tuple(map(_bucket, buckets)))
            found = {
                "step_ms": facts["step_ms"]["chosen"],
                "wire_bytes": sum(bucket["wire_bytes"] for bucket in buckets),
                "loss": facts["plan"].get("loss"),
            }
            numbers = {name: float(value) for name, value in found.items() if value is not None}
            budget: Mapping[str, Any] = facts.get("budget") or {"gradients": ()}
            gradients: Sequence[Mapping[str, Any]] = budget["gradients"]
            return cls(plan, numbers, {str(each["name"]): float(each["spent"]) for each in gradients})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadPlan(f"this is not the output of explain --json: {type(error).__name__}: {error}") from None


def _bucket(data: Mapping[str, Any]) -> Bucket:
    """Read a report's bucket; parts are named like `fc.weight[0:65536]`."""
    names: list[str] = []
    starts: list[int] = []
    for label in data["names"]:
        part = re.fullmatch(r"(.+)\[(\d+):\d+\]", label)
        names.append(part[1] if part else label)
        starts.append(int(part[2]) if part else 0)
    sizes, kind = tuple(map(int, data["sizes"])), ElementType(data.get("type", "f32"))
    at = ExchangePoint(data.get("at", "gradient"))
    return Bucket(tuple(names), sizes, Strategy.parse(data["strategy"]), tuple(starts), kind, at)


_Part = tuple[range, int]

_Piece = tuple[str, int, int, int]
"""Gradient name, number of elements, bucket index before and after."""


@dataclass(frozen=True, slots=True)
class ChangedGradients:
    """Gradients with the same change."""

    what: str
    kinds: tuple[str, ...]
    """Changed properties: compressors, levels, device, exchange point."""
    names: tuple[str, ...]
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanDiff:
    strategies: tuple[ChangedGradients, ...]
    moved: ChangedGradients | None
    """Gradients in another bucket; the plans' buckets are matched by overlap."""
    missing: tuple[ChangedGradients, ...]
    """Gradients that only one plan has, or whose size or type differs."""
    buckets: tuple[int, int]
    gradients: int
    reordered: bool
    """True if buckets or their gradients are in another order."""
    numbers: Mapping[str, tuple[float, float]]
    spent: Mapping[str, tuple[float, float]]
    """Errors that differ, by gradient, largest difference first."""

    @property
    def is_empty(self) -> bool:
        """True if the plans are equal. `numbers` and `spent` may differ."""
        return not (self.strategies or self.moved or self.missing or self.reordered)

    def to_json(self) -> dict[str, Any]:
        return {"same": self.is_empty, **asdict(self)}


def diff_plans(before: PlanFile, after: PlanFile) -> PlanDiff:
    old, new = before.plan, after.plan
    sizes, others = old.sizes, new.sizes
    parts, other_parts = _parts(old), _parts(new)
    names = [name for name in sizes if others.get(name) == sizes[name]]
    pieces = [piece for name in names for piece in _pieces(name, parts[name], other_parts[name])]
    partner = _partners(pieces)
    moved = [piece for piece in pieces if partner.get(piece[2]) != piece[3]]
    followed = [partner[k] for k in range(len(old.buckets)) if k in partner]
    strategies, missing = _strategies(pieces, old, new), _missing(old, new)
    is_same_but_for_order = not (strategies or moved or missing)
    spent = {name: pair for name, pair in _pairs(before.spent, after.spent).items() if pair[0] != pair[1]}
    return PlanDiff(
        strategies=strategies,
        moved=_change("in another bucket", moved, old) if moved else None,
        missing=missing,
        buckets=(len(old.buckets), len(new.buckets)),
        gradients=len(sizes.keys() | others.keys()),
        reordered=followed != sorted(followed) or (is_same_but_for_order and old != new),
        numbers=_pairs(before.numbers, after.numbers),
        spent=dict(sorted(spent.items(), key=lambda each: -abs(each[1][1] - each[1][0]))),
    )


def _pairs(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (before[name], after[name]) for name in before if name in after}


def _pieces(name: str, old: Sequence[_Part], new: Sequence[_Part]) -> Iterator[_Piece]:
    for start, stop in pairwise(sorted({0, *(extent.stop for extent, _ in (*old, *new))})):
        before, after = (next(k for extent, k in each if start in extent) for each in (old, new))
        yield name, stop - start, before, after


def _parts(plan: Plan) -> dict[str, list[_Part]]:
    found: dict[str, list[_Part]] = {}
    for number, bucket in enumerate(plan.buckets):
        for name, extent in zip(bucket.names, bucket.extents, strict=True):
            found.setdefault(name, []).append((extent, number))
    return found


def _partners(pieces: Sequence[_Piece]) -> dict[int, int]:
    """Match buckets one to one, largest overlap first."""
    common = Counter[tuple[int, int]]()
    for _, elements, before, after in pieces:
        common[before, after] += elements
    found: dict[int, int] = {}
    for (before, after), _ in sorted(common.items(), key=lambda each: (-each[1], each[0])):
        if before not in found and after not in found.values():
            found[before] = after
    return found


_Way = tuple[Strategy, ExchangePoint]


def _strategies(pieces: Sequence[_Piece], old: Plan, new: Plan) -> tuple[ChangedGradients, ...]:
    groups: dict[tuple[_Way, _Way], list[_Piece]] = {}
    for piece in pieces:
        before, after = _way(old.buckets[piece[2]]), _way(new.buckets[piece[3]])
        if before != after:
            groups.setdefault((before, after), []).append(piece)
    found = [_change(_words(*pair), members, old, _kinds(*pair)) for pair, members in groups.items()]
    return tuple(sorted(found, key=lambda change: -change.elements))


def _way(bucket: Bucket) -> _Way:
    return bucket.strategy, bucket.at


def _words(old: _Way, new: _Way) -> str:
    (before, point), (after, other) = old, new
    pair = [short(before), short(after)] if short(before) != short(after) else [str(before), str(after)]
    if before == after:
        return f"{short(before)}: at the {point.value} -> at the {other.value}"
    if point is other:
        return " -> ".join(pair)
    return f"{pair[0]} at the {point.value} -> {pair[1]} at the {other.value}"


def _kinds(old: _Way, new: _Way) -> tuple[str, ...]:
    (before, point), (after, other) = old, new
    levels = [[step.level for step in strategy.collectives] for strategy in (before, after)]
    differ = {
        "compressors": before.compressors != after.compressors,
        "levels": set(levels[0]) != set(levels[1]),
        "device": bool(before.devices and after.devices) and before.devices != after.devices,
        "exchange point": point is not other,
    }
    return tuple(name for name, is_other in differ.items() if is_other) or ("steps",)


def _missing(old: Plan, new: Plan) -> tuple[ChangedGradients, ...]:
    before, after = old.sizes, new.sizes
    gone = [name for name in before if name not in after]
    added = [name for name in after if name not in before]
    resized = [name for name in before if name in after and after[name] != before[name]]
    retyped = [name for name, kind in old.types.items() if before[name] == after.get(name) and new.types[name] != kind]
    found = [
        ("only in the first plan", gone, old),
        ("only in the second plan", added, new),
        ("another size", resized, new),
        ("another type", retyped, new),
    ]
    return tuple(
        _change(what, [(name, plan.sizes[name], 0, 0) for name in names], plan) for what, names, plan in found if names
    )


def _change(what: str, pieces: Sequence[_Piece], plan: Plan, kinds: tuple[str, ...] = ()) -> ChangedGradients:
    names, types = dict.fromkeys(name for name, *_ in pieces), plan.types
    elements = sum(number for _, number, *_ in pieces)
    return ChangedGradients(
        what, kinds, tuple(names), elements, sum(types[name].itemsize * number for name, number, *_ in pieces)
    )


def headline(diff: PlanDiff) -> str:
    old, new = diff.buckets
    if diff.is_empty:
        return f"The plans are the same: {count(diff.gradients, 'gradient')} in {count(old, 'bucket')}."
    return f"The plans differ: {count(old, 'bucket')} before, {count(new, 'bucket')} after."


def note_on_another_plan(before: Plan | None, after: Plan) -> str:
    """Describe the difference between a loaded state's plan and `after`; empty if equal or unknown."""
    if before is None or before == after:
        return ""
    diff = diff_plans(PlanFile(before), PlanFile(after))
    changes = (*diff.strategies, *((diff.moved,) if diff.moved else ()), *diff.missing)
    parts = [f"{count(len(each.names), 'gradient')} {each.what}" for each in changes[:_MOST_ROWS]]
    parts += ["others in another order"] if diff.reordered else []
    return (
        f"the loaded state was saved under another plan: {', '.join(parts)}. All residuals are kept, but training"
        " does not go on bit for bit; compile with compress=fxcomp.saved_plan(state) for that."
    )


def sections_of(diff: PlanDiff, *, all_names: bool = False) -> list[Section]:
    found: list[Section] = []
    for title, changes in (
        ("Strategies", diff.strategies),
        ("Buckets", (diff.moved,) if diff.moved else ()),
        ("Other gradients", diff.missing),
    ):
        if changes:
            found.append(Section(title, _blocks(changes, all_names=all_names)))
    if diff.reordered:
        found.append(Section("Order", ["Buckets leave, or gradients lie in them, in another order."]))
    if diff.numbers:
        rows = [
            (_NUMBERS[name], f"{before:,.6g}", f"{after:,.6g}", f"{after / before - 1:+.1%}" if before else "")
            for name, (before, after) in diff.numbers.items()
        ]
        found.append(Section("Numbers", [Table(_COMPARED, rows)]))
    if diff.spent:
        rows = [
            (name, f"{before:.3g}", f"{after:.3g}", f"{after - before:+.2g}")
            for name, (before, after) in diff.spent.items()
        ]
        shown = rows if all_names else rows[:_MOST_ROWS]
        rest = [f"... and {count(len(rows) - len(shown), 'other gradient')} (--all)"] if len(rows) > len(shown) else []
        found.append(Section("Lost of the gradient's square", [Table(_COMPARED, shown), *rest]))
    return found


_COMPARED = ("", "before", "after", "change")


def _blocks(changes: Sequence[ChangedGradients], *, all_names: bool) -> list[Block]:
    shown = changes if all_names else changes[:_MOST_ROWS]
    rows = [
        (str(len(each.names)), mb(each.bytes), each.what, _names(each.names, all_names=all_names)) for each in shown
    ]
    rest = changes[len(shown) :]
    more = f"... and {count(len(rest), 'other change')} of {mb(sum(each.bytes for each in rest))} MB (--all)"
    return [Table(("gradients", "MB", "", "which"), rows, text=("", "which")), *([more] if rest else [])]


def _names(names: Sequence[str], *, all_names: bool) -> str:
    if all_names or len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"
