"""Write docs/benchmarks/optimality.md from records of `optimality.py`, the second file from `--published`.

python benchmarks/optimality_page.py RECORDS PUBLISHED DATE > docs/benchmarks/optimality.md
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import optimality_published as published
from optimality import MOST_LABELS, MOST_TENSORS, Record, to_markdown, worst

PAGE = """# How far from the best possible

`benchmarks/optimality.py` compares what the search chooses with the best plan of all, found by an exact search
(`tests/helpers/optimum/oracle.py`), and with a lower bound that is proved for any size (`fxcomp/search/bound.py`). Run
on {date}; the records are [beside](optimality_{date}.json). Gaps are exact: they are differences of simulated steps and
depend on no clock. `decide_ms` in the records does: other work shared the processors, so it says nothing.

## Against the best plan

{small} workloads of 5 to 8 tensors were drawn: a quarter of the tensors are vectors, sizes differ by a factor of 50
within a workload, bandwidths between hosts are 100 Mbit/s to 100 Gbit/s, clusters are 2x1, 4x1 and 8x8. Prices are a
V100's by its data sheet, a host's, and a host's with a pool. Large tensors are cut into up to four atoms, as the search
cuts them. Each workload is judged in one mode, each mode in turn. Of {unknown} the best plan is not known, because more
than {most:,} partial plans were left; they count for the bound alone, and so do {larger} larger workloads.

Over the {exact} others the mean gap is {mean:.4f} % and the worst {largest:.3f} %; 0.1 % and 2 % are asked for.

{table}
`at the optimum` is within a thousandth of a percent. The exact search itself looks for nothing that is better by less
than a millionth. The furthest from the optimum:

```text
{worst}
```

## Against published schedules

Espresso (EuroSys 2023; zhuangwang93/Espresso at a0294e3) publishes traces of models and a schedule for each. Both plans
are put on our timeline, at the published prices of links and compressors (`benchmarks/optimality_published.py` says
how), on four hosts of eight GPUs. The published schedules send each tensor alone; ours, in `aggressive`, fuses them and
may use other compressors. So this compares plans under one model of costs, and not systems.

{published}
Slower than published: {slower}. `above the bound` is how far ours may be from the best at most.

## What the bound leaves open

The bound counts what each stream must do at least. It lets every element travel by what is cheapest for it in a mean
over streams, and knows that a stage waits for the one before it only for one gradient at a time. So it is close where
one stream rules, as on slow networks and under long compute, and loose where messages that follow each other are on the
critical path.
"""


def main() -> None:
    records = [Record(**record) for record in json.loads(Path(sys.argv[1]).read_text())]
    rows = json.loads(Path(sys.argv[2]).read_text())
    gaps = [record.gap for record in records if record.gap is not None]
    small = sum(record.tensors <= MOST_TENSORS for record in records)
    slower = [row["workload"] for row in rows if row["step_ms"] > row["published_ms"]]
    page = PAGE.format(
        date=sys.argv[3],
        small=small,
        larger=len(records) - small,
        unknown=small - len(gaps),
        most=MOST_LABELS,
        exact=len(gaps),
        mean=100 * statistics.fmean(gaps),
        largest=100 * max(gaps),
        table=to_markdown(records),
        worst="\n".join(worst(records)) or "none",
        published=published.to_markdown(rows),
        slower=", ".join(slower) or "none",
    )
    print(page, end="")


if __name__ == "__main__":
    main()
