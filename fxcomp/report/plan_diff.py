"""Say what two plans do differently: strategies, buckets, and the numbers that both files have.

    12 gradients  30.1 MB  int8 -> powersgd(4)
     3 gradients   0.2 MB  in another bucket

Plans may cut gradients at different places, so what is compared are pieces that lie in one bucket in both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from fxcomp.errors import BadPlan
from fxcomp.plan.kinds import ElementType
from fxcomp.plan.plan import Bucket, ExchangePoint, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.report.document import Block, Column, Section, Table, count, mb, short

_MOST_ROWS = 8  # of a table, unless all are asked for
_SHOWN = 2  # names in a row

_NUMBERS = {"step_ms": "predicted step, ms", "wire_bytes": "bytes sent by a rank", "loss": "relative squared error"}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and the numbers that its file has about it."""

    plan: Plan
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Errors of gradients, as shares of the whole gradient's squares; empty in a file without an error budget."""

    @classmethod
    def from_json(cls, data: object) -> PlanFile:
        """Read a saved plan, or what `explain --json` prints. Raises BadPlan."""
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadPlan(f"this is not what explain --json prints: {type(error).__name__}: {error}") from None


def _bucket(data: Mapping[str, Any]) -> Bucket:
    """Read a bucket of a report: its parts are named like `fc.weight[0:65536]`."""
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
"""Elements of a gradient, and their bucket."""


@dataclass(frozen=True, slots=True)
class ComparedPiece:
    """Elements of one gradient that lie in one bucket before and in one after."""

    name: str
    elements: int
    dense_bytes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ChangedGradients:
    """Gradients to which the same happens."""

    what: str
    names: tuple[str, ...]
    elements: int
    dense_bytes: int
    kinds: tuple[str, ...] = ()
    """Of a change of strategy: compressors, levels, device, exchange point."""

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "kinds": list(self.kinds),
            "names": list(self.names),
            "elements": self.elements,
            "bytes": self.dense_bytes,
        }


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All differences, the largest first."""

    strategies: tuple[ChangedGradients, ...]
    moved: ChangedGradients | None
    """Gradients that are in another bucket than the match of the one before."""
    missing: tuple[ChangedGradients, ...]
    """Gradients that one plan alone has, or has in another size."""
    buckets: tuple[int, int]
    gradients: int
    is_reordered: bool
    """Buckets leave, or gradients lie in them, in another order."""
    numbers: tuple[tuple[str, float, float], ...]
    spent: tuple[tuple[str, float, float], ...] = ()
    """Errors that differ between the files, the largest differences first."""

    @property
    def is_empty(self) -> bool:
        """The plans are the same; numbers may differ, because clusters or costs do."""
        return not (self.strategies or self.moved or self.missing or self.is_reordered)

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.is_empty,
            "strategies": [each.to_json() for each in self.strategies],
            "moved": self.moved and self.moved.to_json(),
            "missing": [each.to_json() for each in self.missing],
            "buckets": list(self.buckets),
            "gradients": self.gradients,
            "reordered": self.is_reordered,
            "numbers": {name: [before, after] for name, before, after in self.numbers},
            "spent": {name: [before, after] for name, before, after in self.spent},
        }


def diff_plans(before: PlanFile, after: PlanFile) -> PlanDiff:
    """Compare two plans."""
    old, new = before.plan, after.plan
    sizes, others = old.sizes, new.sizes
    names = [name for name in sizes if others.get(name) == sizes[name]]
    parts, other_parts = _parts(old), _parts(new)
    types = old.types
    pieces = [piece for name in names for piece in _pieces(parts[name], other_parts[name], name, types[name])]
    partner = _partners(pieces)
    moved = [piece for piece in pieces if partner.get(piece.before) != piece.after]
    followed = [partner[k] for k in range(len(old.buckets)) if k in partner]
    shared = [name for name in _NUMBERS if name in before.numbers and name in after.numbers]
    strategies, missing = _strategies(pieces, old, new), _missing(old, new)
    is_same_but_for_order = not (strategies or moved or missing)
    return PlanDiff(
        strategies=strategies,
        moved=_change("in another bucket", moved) if moved else None,
        missing=missing,
        buckets=(len(old.buckets), len(new.buckets)),
        gradients=len(sizes.keys() | others.keys()),
        is_reordered=followed != sorted(followed) or (is_same_but_for_order and old != new),
        numbers=tuple((name, before.numbers[name], after.numbers[name]) for name in shared),
        spent=_spent_otherwise(before.spent, after.spent),
    )


def _spent_otherwise(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    found = [(name, before[name], after[name]) for name in before if name in after and before[name] != after[name]]
    return tuple(sorted(found, key=lambda each: -abs(each[2] - each[1])))


def _pieces(old: Sequence[_Part], new: Sequence[_Part], name: str, kind: ElementType) -> list[ComparedPiece]:
    """Cut a gradient where either plan cuts it."""
    borders = sorted({0, *(extent.stop for extent, _ in (*old, *new))})
    found: list[ComparedPiece] = []
    for start, stop in pairwise(borders):
        before, after = (next(k for extent, k in each if start in extent) for each in (old, new))
        found.append(ComparedPiece(name, stop - start, kind.itemsize * (stop - start), before, after))
    return found


def _parts(plan: Plan) -> dict[str, list[_Part]]:
    """List the parts of each gradient, with the bucket of each."""
    found: dict[str, list[_Part]] = {}
    for number, bucket in enumerate(plan.buckets):
        for name, extent in zip(bucket.names, bucket.extents, strict=True):
            found.setdefault(name, []).append((extent, number))
    return found


def _partners(pieces: Sequence[ComparedPiece]) -> dict[int, int]:
    """Match buckets one to one, those with the most in common first."""
    common = Counter[tuple[int, int]]()
    for piece in pieces:
        common[piece.before, piece.after] += piece.elements
    found: dict[int, int] = {}
    for (before, after), _ in sorted(common.items(), key=lambda each: (-each[1], each[0])):
        if before not in found and after not in found.values():
            found[before] = after
    return found


_Way = tuple[Strategy, ExchangePoint]
"""The way that a piece travels."""


def _strategies(pieces: Sequence[ComparedPiece], old: Plan, new: Plan) -> tuple[ChangedGradients, ...]:
    groups: dict[tuple[_Way, _Way], list[ComparedPiece]] = {}
    for piece in pieces:
        before, after = _way(old.buckets[piece.before]), _way(new.buckets[piece.after])
        if before != after:
            groups.setdefault((before, after), []).append(piece)
    found = [_change(_words(*pair), members, _kinds(*pair)) for pair, members in groups.items()]
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
    """Name what of a way differs."""
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
    return tuple(_whole(what, names, plan) for what, names, plan in found if names)


def _whole(what: str, names: Sequence[str], plan: Plan) -> ChangedGradients:
    sizes, types = plan.sizes, plan.types
    dense_bytes = sum(types[name].itemsize * sizes[name] for name in names)
    return ChangedGradients(what, tuple(names), sum(sizes[name] for name in names), dense_bytes)


def _change(what: str, pieces: Sequence[ComparedPiece], kinds: tuple[str, ...] = ()) -> ChangedGradients:
    names = dict.fromkeys(piece.name for piece in pieces)
    elements, dense_bytes = sum(piece.elements for piece in pieces), sum(piece.dense_bytes for piece in pieces)
    return ChangedGradients(what, tuple(names), elements, dense_bytes, kinds)


# In words


def headline(diff: PlanDiff) -> str:
    """Say in a sentence whether the plans differ."""
    old, new = diff.buckets
    if diff.is_empty:
        return f"The plans are the same: {count(diff.gradients, 'gradient')} in {count(old, 'bucket')}."
    return f"The plans differ: {count(old, 'bucket')} before, {count(new, 'bucket')} after."


def note_on_another_plan(before: Plan | None, after: Plan) -> str:
    """Say that a loaded state is of another plan, and what differs; empty if it is of the same one, or says of none."""
    if before is None or before == after:
        return ""
    diff = diff_plans(PlanFile(before), PlanFile(after))
    changes = (*diff.strategies, *((diff.moved,) if diff.moved else ()), *diff.missing)
    parts = [f"{count(len(each.names), 'gradient')} {each.what}" for each in changes[:_MOST_ROWS]]
    parts += ["others in another order"] if diff.is_reordered else []
    return (
        f"the loaded state was saved under another plan: {', '.join(parts)}. All that is owed is kept, but training"
        " does not go on bit for bit; compile with compress=fxcomp.saved_plan(state) for that."
    )


def sections_of(diff: PlanDiff, *, all_names: bool = False) -> list[Section]:
    """Lay the differences out; every gradient by name if asked for."""
    found: list[Section] = []
    for title, changes in (
        ("Strategies", diff.strategies),
        ("Buckets", (diff.moved,) if diff.moved else ()),
        ("Other gradients", diff.missing),
    ):
        if changes:
            found.append(Section(title, _blocks(changes, all_names=all_names)))
    if diff.is_reordered:
        found.append(Section("Order", ["Buckets leave, or gradients lie in them, in another order."]))
    if diff.numbers:
        found.append(Section("Numbers", [_numbers(diff)]))
    if diff.spent:
        found.append(Section("Lost of the gradient's square", _spent(diff.spent, all_names=all_names)))
    return found


def _blocks(changes: Sequence[ChangedGradients], *, all_names: bool) -> list[Block]:
    shown = changes if all_names else changes[:_MOST_ROWS]
    columns = (Column("gradients"), Column("MB"), Column("", is_text=True), Column("which", is_text=True))
    rows = [
        (str(len(each.names)), mb(each.dense_bytes), each.what, _names(each.names, all_names=all_names))
        for each in shown
    ]
    rest = changes[len(shown) :]
    more = f"... and {count(len(rest), 'other change')} of {mb(sum(each.dense_bytes for each in rest))} MB (--all)"
    return [Table(columns, rows), *([more] if rest else [])]


def _names(names: Sequence[str], *, all_names: bool) -> str:
    if all_names or len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"


def _spent(spent: Sequence[tuple[str, float, float]], *, all_names: bool) -> list[Block]:
    """Show the gradients whose share of what is lost changes most."""
    shown = spent if all_names else spent[:_MOST_ROWS]
    columns = (Column("", is_text=True), Column("before"), Column("after"), Column("change"))
    rows = [(name, f"{before:.3g}", f"{after:.3g}", f"{after - before:+.2g}") for name, before, after in shown]
    rest = [f"... and {count(len(spent) - len(shown), 'other gradient')} (--all)"] if len(spent) > len(shown) else []
    return [Table(columns, rows), *rest]


def _numbers(diff: PlanDiff) -> Table:
    columns = (Column("", is_text=True), Column("before"), Column("after"), Column("change"))
    rows = [
        (_NUMBERS[name], f"{before:,.6g}", f"{after:,.6g}", f"{after / before - 1:+.1%}" if before else "")
        for name, before, after in diff.numbers
    ]
    return Table(columns, rows)
