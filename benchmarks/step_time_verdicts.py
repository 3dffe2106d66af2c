"""Turn measured steps into tables, ratios with confidence intervals, verdicts and records.

Records of several models and links in one table: python benchmarks/step_time_verdicts.py mlp.json gpt.json
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from baselines import BASELINES, FREE, FXCOMP
from records import Record, read, spread, table

TWICE = "ddp_fp32"  # measured against itself
BEFORE = "_before"  # suffix of another checkout's contestants
BASELINES_OF = {name: ("ddp_bf16", "ddp_powersgd")[: 2 if mode == "lossy" else 1] for name, mode in FXCOMP.items()}
"""Baselines of each fxcomp contestant, in addition to the best alternative and the contestant of another checkout."""
AS_PRECISE = {
    name: {"lossless": BASELINES[:1], "lossy": BASELINES}.get(mode, BASELINES[:3]) for name, mode in FXCOMP.items()
}
"""Baselines that lose no more than each fxcomp contestant may; low rank is only for `lossy`."""
ENOUGH_BLOCKS = 20
MARGIN = 1.02  # factor allowed by "never slower", plus the A/A spread
LARGEST_SPREAD = 0.10  # no verdict above
RESAMPLES = 2000


@dataclass
class Turns:
    """Measurements of one contestant at one bandwidth. Blocks hold step times in ms."""

    name: str
    blocks: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)  # second turns of TWICE
    wire_bytes: float = 0.0  # per host and step
    predicted_ms: float | None = None
    predicted_free_ms: float | None = None
    final_loss: float | None = None
    race: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None

    @property
    def pairs(self) -> list[list[float]]:
        return [a + b for a, b in zip(self.blocks, self.again, strict=True)] if self.again else self.blocks

    @property
    def median_ms(self) -> float:
        return statistics.median(flat(self.pairs))


@dataclass(frozen=True)
class Ratio:
    name: str
    to: str
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name} / {self.to} = {self.ratio:.3f}, 95 % interval {self.low:.3f}–{self.high:.3f}"


def records(model: str, hosts: int, inter: str, turns: Sequence[Turns]) -> list[dict[str, object]]:
    same = aa_spread(turns)
    return [
        {
            "model": model,
            "hosts": hosts,
            "inter": inter,
            "name": turn.name,
            "measured_ms": spread(flat(turn.pairs)),
            "predicted_ms": turn.predicted_ms,
            "final_loss": turn.final_loss,
            "race": turn.race,
            "plan": turn.plan,
            "rounds_ms": [[round(ms, 3) for ms in pair] for pair in turn.pairs],
            "wire_bytes": round(turn.wire_bytes),
            "aa_spread": same,
            "ratios": {
                found.to: [found.ratio, found.low, found.high] for found in ratios(turns) if found.name == turn.name
            },
        }
        for turn in with_one_free(turns)
    ]


def with_one_free(turns: Sequence[Turns]) -> list[Turns]:
    """Replace the steps without a network by the faster one, named `free`."""
    free = [turn for turn in turns if turn.name in FREE]
    if not free:
        return list(turns)
    fastest = min(free, key=lambda turn: turn.median_ms)
    return [*(turn for turn in turns if turn.name not in FREE), replace(fastest, name=FREE[0])]


def aa_spread(turns: Sequence[Turns]) -> float | None:
    """Return |a / b − 1| of the medians of two measurements of one contestant."""
    for turn in turns:
        if turn.again:
            return abs(statistics.median(flat(turn.blocks)) / statistics.median(flat(turn.again)) - 1)
    return None


def ratios(turns: Sequence[Turns]) -> Iterator[Ratio]:
    """Yield ratios to each contestant's baselines and to another checkout's contestant, over all rounds."""
    by_name = {turn.name: turn for turn in turns}
    for name, baselines in BASELINES_OF.items():
        for other in (*baselines, name + BEFORE):
            if name in by_name and other in by_name:
                yield ratio(by_name[name], by_name[other])


def ratio(mine: Turns, theirs: Turns, rounds: slice = slice(None)) -> Ratio:
    """Return the ratio of medians; its interval is bootstrapped over rounds."""
    ours, others = mine.pairs[rounds], theirs.pairs[rounds]
    generator = random.Random(0)
    drawn_ratios: list[float] = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(range(len(ours)), k=len(ours))
        numerator = statistics.median(flat([ours[i] for i in drawn]))
        drawn_ratios.append(numerator / statistics.median(flat([others[i] for i in drawn])))
    drawn_ratios.sort()
    found = statistics.median(flat(ours)) / statistics.median(flat(others))
    low, high = drawn_ratios[int(0.025 * RESAMPLES)], drawn_ratios[int(0.975 * RESAMPLES)]
    return Ratio(mine.name, theirs.name, found, low, high)


def analyse(inter: str, turns: Sequence[Turns]) -> str:
    by_name = {turn.name: turn for turn in turns}
    same = aa_spread(turns)
    rows: list[tuple[str, ...]] = []
    for turn in turns:
        span = spread(flat(turn.pairs))
        rows.append(
            (
                turn.name,
                f"{span['median']:.0f}",
                f"{span['p10']:.0f}–{span['p90']:.0f}",
                "–" if turn.predicted_ms is None else f"{turn.predicted_ms:.0f}",
                "–" if (share := recovered(turn, by_name)) is None else f"{share:.0%}",
                f"{turn.wire_bytes / 1e6:.2f}",
                "–" if turn.final_loss is None else f"{turn.final_loss:.3f}",
            )
        )
    head = "name | median ms > | p10–p90 > | predicted > | recovered > | MB on the wire > | loss >"
    lines = [f"## {inter}", "", table(head, rows), ""]
    lines += [f"A/A spread {same:.1%}." if same is not None else "No A/A measurement.", ""]
    for turn in turns:
        if turn.name in FXCOMP:
            said = [str(each) for each in verdicts(turn, by_name, same)]
            lines += said or [f"- {turn.name}: nothing to compare with."]
    lines += [f"- {found}{verdict_on_before(found)}." for found in ratios(turns)]
    lines += [prediction_line(turn, by_name) for turn in turns if turn.predicted_ms is not None]
    lines += [line for turn in turns if (line := loss_line(turn, by_name))]
    return "\n".join(lines) + "\n"


def recovered(turn: Turns, by_name: dict[str, Turns]) -> float | None:
    free = [by_name[name].median_ms for name in FREE if name in by_name]
    if turn.name in FREE or TWICE not in by_name or not free:
        return None
    plain = by_name[TWICE].median_ms
    return (plain - turn.median_ms) / (plain - min(free)) if plain > min(free) else None


@dataclass(frozen=True)
class Verdict:
    """Comparison with the best rival, which is chosen on odd rounds and compared on even ones."""

    found: Ratio
    rounds: int
    spread: float | None

    @property
    def is_known(self) -> bool:
        return self.spread is not None and self.spread <= LARGEST_SPREAD

    @property
    def holds(self) -> bool:
        """True unless significantly slower than the best alternative."""
        return self.found.low < MARGIN + (self.spread or 0.0)

    def __str__(self) -> str:
        text = f"- {self.found} ({self.rounds // 2} pairs), the best alternative: "
        if not self.is_known:
            return text + "no verdict, the A/A spread is too large or unknown."
        if self.rounds < ENOUGH_BLOCKS:
            text += f"provisional, {self.rounds} rounds of {ENOUGH_BLOCKS}; "
        return text + ("never slower: holds." if self.holds else "SLOWER than the best alternative.")


def verdict(turn: Turns, rivals: Sequence[Turns], spread: float | None) -> Verdict | None:
    """Compare with the best rival; None without rivals or rounds."""
    if not rivals or len(turn.blocks) < 2:
        return None
    best = min(rivals, key=lambda rival: statistics.median(flat(rival.pairs[0::2])))
    return Verdict(ratio(turn, best, slice(1, None, 2)), len(turn.blocks), spread)


def verdicts(turn: Turns, by_name: Mapping[str, Turns], spread: float | None) -> list[Verdict]:
    """Compare with the best alternative that loses no more, and with the overall best if different."""
    found = [
        verdict(turn, [by_name[name] for name in names if name in by_name], spread)
        for names in (AS_PRECISE[turn.name], BASELINES)
    ]
    known = [each for each in found if each is not None]
    return known[:1] if len({each.found.to for each in known}) == 1 else known


def verdict_on_before(found: Ratio) -> str:
    """Return a verdict on a ratio to another checkout; empty for other ratios."""
    if not found.to.endswith(BEFORE):
        return ""
    if found.ratio <= MARGIN:
        return f": no slower than before, at most {MARGIN}"
    return f": SLOWER than before, above {MARGIN}" if found.low > MARGIN else f": above {MARGIN}, but so may chance be"


def prediction_line(turn: Turns, by_name: dict[str, Turns]) -> str:
    """Return the prediction's error, raw and scaled by the machine's current speed."""
    assert turn.predicted_ms is not None, "asked only for contestants with a prediction"
    text = f"- {turn.name}: prediction off by {turn.predicted_ms / turn.median_ms - 1:+.1%}"
    free = [by_name[name].median_ms for name in FREE if name in by_name]
    if not free or not turn.predicted_free_ms:
        return text + "."
    scaled = turn.predicted_ms * min(free) / turn.predicted_free_ms
    return text + f", {scaled / turn.median_ms - 1:+.1%} scaled to this run's free step."


def loss_line(turn: Turns, by_name: dict[str, Turns]) -> str | None:
    dense = by_name[TWICE].final_loss if TWICE in by_name else None
    if turn.name == TWICE or turn.final_loss is None or dense is None:
        return None
    return f"- {turn.name}: final loss {turn.final_loss / dense - 1:+.2%} of that of {TWICE}."


def flat(blocks: Sequence[list[float]]) -> list[float]:
    return [step for block in blocks for step in block]


# A table of several models and links

HEAD = "hosts | model | link | contestant | ms > | predicted > | alternative | ratio, 95 % interval | A/A > | verdict"


def page(measured: Iterable[Record]) -> str:
    """Return all comparisons of compiled steps as Markdown, with counts of verdicts."""
    rows: list[Sequence[str]] = []
    alike: list[Verdict] = []
    slower: list[str] = []
    for (hosts, model, inter), group in itertools.groupby(measured, itemgetter("hosts", "model", "inter")):
        by_name = {each["name"]: each for each in group}
        turns = {
            name: Turns(name, blocks=each["rounds_ms"], predicted_ms=each["predicted_ms"])
            for name, each in by_name.items()
        }
        for name, record in by_name.items():
            turn = turns[name]
            if name not in FXCOMP:
                continue
            found = verdicts(turn, turns, record["aa_spread"])
            alike += [each for each in found if each.found.to in AS_PRECISE[name]][:1]
            rows += [(str(hosts), model, inter, *cells(each, record)) for each in found]
            if TWICE in turns and ratio(turn, turns[TWICE]).low > MARGIN + record["aa_spread"]:
                slower.append(f"{name} on {model}, {hosts} hosts, {inter}")
    known = [each for each in alike if each.is_known]
    holding = sum(each.holds for each in known)
    return (
        f"{table(HEAD, rows)}\n\nOf {len(alike)} comparisons with the best alternative that loses no more, {len(known)}"
        f" have a verdict and {holding} hold. Slower than plain DDP: {', '.join(slower) or 'none'}.\n"
    )


def cells(verdict: Verdict, record: Record) -> tuple[str, ...]:
    found, predicted = verdict.found, record["predicted_ms"]
    says = ("holds" if verdict.holds else "SLOWER") if verdict.is_known else "none"
    if found.to not in AS_PRECISE[found.name]:
        says += ", loses less"
    return (
        found.name,
        f"{record['measured_ms']['median']:.0f}",
        "" if predicted is None else f"{predicted:.0f}",
        found.to,
        f"{found.ratio:.3f} ({found.low:.3f}–{found.high:.3f})",
        "" if verdict.spread is None else f"{verdict.spread:.1%}",
        says,
    )


if __name__ == "__main__":
    print(page(record for path in sys.argv[1:] for record in read(Path(path))))
