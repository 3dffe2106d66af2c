"""Tables of the kill sweep's records."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from records import table

from killing.points import FAULTS, KINDS, PHASES

Record = dict[str, Any]


def in_a_line(record: Record) -> str:
    ends = Counter(f"{end['how']} {end['error']}".strip() for end in record["ends"])
    told = ", ".join(f"{count} {how}" for how, count in ends.items())
    verdict = "; ".join(record["wrong"]) or "ok"
    more = f" ANOMALIES: {'; '.join(each.splitlines()[0] for each in record['anomalies'])}" * bool(record["anomalies"])
    hit = "" if record["hit"] else "NOT HIT, "
    return (
        f"{record['function']}#{record['call']}: {hit}{told} | {verdict.splitlines()[0]} ({record['seconds']} s){more}"
    )


def in_full(record: Record) -> str:
    lines = [
        f"  rank {e['rank']}: {e['how']} after {e['seconds']} s: {e['error']}: {e['line']}" for e in record["ends"]
    ]
    lines += [
        f"  began again at step {record.get('began')}, off {record.get('off')}, followed {record.get('followed')}"
    ]
    return "\n".join([*lines, *record["wrong"], *record["anomalies"]])


def survivors(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return how ranks other than the victim ended, where they ended with an error."""
    return [{**end, "fault": record["fault"]} for record in records for end in record["ends"]
            if not end["victim"] and end["how"] == "error"]  # fmt: skip


def report(found: Sequence[Record]) -> str:
    records = [record for record in found if "not_run" not in record]
    not_run = Counter((record["fault"], record["not_run"]) for record in found if "not_run" in record)
    ends = survivors(records)
    nameless = [end for end in ends if not end["names"]]
    seconds = [end["seconds"] for end in ends if end["seconds"] is not None]
    lost, hangs = sum(record["lost"] for record in records), sum("hangs" in str(r["anomalies"]) for r in records)
    total = sum(record["seconds"] for record in records) / 60
    parts = [
        f"{len(records)} points in {total:.0f} minutes; lost: {lost}; jobs with a rank that hangs: {hangs}; restarts on"
        f" another number of ranks: {sum(r['next_world'] != r['world'] for r in records)}, by torchrun:"
        f" {sum(r['restart_by'] == 'torchrun' for r in records)}; faults that were not reached:"
        f" {sum(not r['hit'] for r in records)}.",
        _by("kind", KINDS, records),
        _by("phase", PHASES, records),
        _by("fault", FAULTS, records),
        f"{len(ends)} errors of survivors; {len(nameless)} ({len(nameless) / max(1, len(ends)):.1%}) name no rank."
        + (
            f" Seconds to the error: median {statistics.median(seconds):.1f}, at most {max(seconds):.1f}."
            * bool(seconds)
        ),
        _messages(ends),
    ]
    parts += [f"Not run: {count} points with {fault}: {why}" for (fault, why), count in not_run.items()]
    return "\n\n".join(parts)


def _by(what: str, values: Iterable[str], records: Sequence[Record]) -> str:
    rows: list[Sequence[object]] = []
    for value in values:
        some = [record for record in records if record[what] == value]
        seconds = [end["seconds"] for end in survivors(some) if end["seconds"] is not None]
        median, most = (f"{f(seconds):.1f}" if seconds else "" for f in (statistics.median, max))
        bits = sum(record.get("same_bits") is True for record in some)
        owed = [record["off"] for record in some if record.get("off") is not None]
        followed = sum(record.get("followed") is True for record in some)
        rows.append([value, len(some), median, most, bits, f"{max(owed):.0e} ({len(owed)})" if owed else "", followed,
                     sum(record["lost"] for record in some)])  # fmt: skip
    head = "points > | s to the error > | at most > | same bits > | off (points) > | plan in force > | lost >"
    return table(f"{what} | {head}", rows)


def _messages(ends: Sequence[Record]) -> str:
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for end in ends:
        names = "yes" if end["names"] else f"**no**: {end['cause'] or 'fxcomp'}"
        groups[end["error"], general(end["line"]), names].append(end["seconds"] or 0.0)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [[len(seconds), f"{statistics.median(seconds):.1f}", error, names, line]
            for (error, line, names), seconds in ordered]  # fmt: skip
    return table("count > | median s > | error | names a rank | first line", rows)


_GENERAL: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"ranks? \d+(, \d+)*( and \d+)?", "rank R"),
    (r"one of rank R", "one of ranks R"),
    (r"\[[^\]]*gloo/[^\]]*\]", "[gloo]"),
    (r"\(line \w+\)", "(line L)"),
    (r"\d+\.\d+\.\d+\.\d+(:\d+)?|\[::[^ ]*", "ADDRESS"),
    (r"'[^']*/[^']*'", "PATH"),
    (r"\d+", "N"),
    (r"\|", "/"),
)


def general(line: str) -> str:
    """Replace ranks, numbers, addresses and paths, so that equal messages are counted together."""
    for pattern, by in _GENERAL:
        line = re.sub(pattern, by, line)
    return line[:200]
