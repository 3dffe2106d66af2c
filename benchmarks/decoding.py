"""Compare what decoding several ranks' payloads takes with its price: `python benchmarks/decoding.py`.

Each line is one compressor at one size. `measured` is the time of decoding 1 to 16 payloads, each as a step finds it.
`priced` comes from points that were measured as a compiling job measures them, in turns with that. The least of the
turns counts for both: other programs make some long. `by halves` is the rule of tables of version 3: ranks times half
of what two payloads take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

from fxcomp.compressors import Compressor, parse_compressor
from fxcomp.cost.measure import CPU_CACHES, RANKS, measure_compressors, median_us
from fxcomp.planning.measure_machine import hardware, versions

NAMES = ("int8", "int4", "topk(0.01)", "sign", "sidco(0.01)")
SIZES = (262_144, 1_048_576)
PAYLOADS = (1, 2, 4, 8, 16)
TURNS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A compressor at one size: us by the number of payloads, in the order of `PAYLOADS`."""

    compressor: str
    elements: int
    measured_us: list[float]
    priced_us: list[float]
    by_halves_us: list[float]


def compare(compressor: Compressor, sizes: Sequence[int]) -> list[Row]:
    """Measure a compressor's decoding at these sizes and price it, in turns; the least of the turns."""
    timed: dict[int, list[list[float]]] = {elements: [] for elements in sizes}
    priced: dict[int, list[list[float]]] = {elements: [] for elements in sizes}
    for _ in range(TURNS):
        (cost,) = measure_compressors([compressor]).values()
        for elements in sizes:
            timed[elements].append(decode_us(compressor, elements))
            priced[elements].append([cost.decode_us(elements, payloads) for payloads in PAYLOADS])
    rows: list[Row] = []
    for elements in sizes:
        measured = least(timed[elements])
        half_us = measured[PAYLOADS.index(2)] / 2
        by_halves = [half_us * payloads for payloads in PAYLOADS]
        rows.append(Row(str(compressor), elements, measured, least(priced[elements]), by_halves))
    return rows


def least(turns: Sequence[Sequence[float]]) -> list[float]:
    """Return the least of each column."""
    return [min(times) for times in zip(*turns, strict=True)]


def decode_us(compressor: Compressor, elements: int) -> list[float]:
    """Time decoding each number of payloads."""
    bound, segments = compressor.bound_to([(elements,)], RANKS), (elements,)
    bucket = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    payload = torch.zeros(bound.payload_elements(segments), dtype=bound.payload_dtype)
    residual = torch.zeros_like(bucket) if bound.needs_error_feedback else None
    state = bound.fresh_state(elements, 0, 0) if bound.has_state else None
    bound.encode(bucket, residual, payload, segments, state)
    other, out = torch.zeros(CPU_CACHES // 4), torch.zeros_like(bucket)
    gathered = {payloads: payload.repeat(payloads) for payloads in PAYLOADS}

    def once_us(payloads: int) -> float:
        def run() -> None:
            bound.decode(gathered[payloads], payloads, segments, out)

        return median_us(run, on=bucket.device, before=other.sum)

    return [once_us(payloads) for payloads in PAYLOADS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = [row for name in NAMES for row in compare(parse_compressor(name), SIZES)]
    print("| compressor | elements | | " + " | ".join(map(str, PAYLOADS)) + " |")
    print("|---|---|---|" + "---|" * len(PAYLOADS))
    for row in rows:
        measured = " | ".join(f"{us:,.0f}" for us in row.measured_us)
        print(f"| {row.compressor} | {row.elements:,} | measured us | {measured} |")
        for name, prices in (("priced", row.priced_us), ("by halves", row.by_halves_us)):
            off = " | ".join(f"{us / real - 1:+.0%}" for us, real in zip(prices, row.measured_us, strict=True))
            print(f"| | | {name} | {off} |")
    if options.output is not None:
        here = torch.device("cpu")
        found = {"date": date.today().isoformat(), "hardware": hardware(here), "versions": versions()}
        found |= {"payloads": PAYLOADS, "rows": [asdict(row) for row in rows]}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
