"""Join the cells of budget.py to records, judge them, and write the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from budget_cells import DENSE, MODES, REFERENCES, Outcome
from budget_timelines import EXPOSED, HOST, Priced

FEWER = 1.5
"""Times fewer bytes than the uniform setting."""
FASTER = 1.3
"""Times faster where the uniform setting is exposed."""
WITHIN = {"balanced": 0.005, "aggressive": 0.01}
"""Of the dense loss."""
NOISE = 0.002
"""Losses that differ by less are the same."""


@dataclass(frozen=True)
class Record:
    """A found plan and what it is compared with: a uniform setting, or dense training alone in a mode."""

    model: str
    optimizer: str
    reference: str
    seed: int
    bytes_dense: float
    bytes_uniform: float | None
    bytes_found: float
    step_ms_uniform: float | None
    """On eight hosts at 1 Gbit/s, with the compute of one thread."""
    step_ms_found: float | None
    """Of the plan that is fastest there under the same error."""
    error_uniform: float | None
    """On the true gradients, as all errors here but the last two."""
    error_found: float
    error_found_late: float
    """The mean over the second half of the steps."""
    error_by_table: float
    limit_by_table: float
    loss_dense: float
    loss_uniform: float | None
    loss_found: float | None
    families: Mapping[str, float]
    plans: int
    solve_ms: float
    look_ms: float

    @property
    def fewer(self) -> float | None:
        return None if self.bytes_uniform is None else self.bytes_uniform / self.bytes_found

    @property
    def over_dense(self) -> float | None:
        return None if self.loss_found is None else self.loss_found / self.loss_dense - 1

    @property
    def uniform_over_dense(self) -> float | None:
        return None if self.loss_uniform is None else self.loss_uniform / self.loss_dense - 1


def records_of(outcomes: Sequence[Outcome], timelines: Sequence[Priced]) -> list[Record]:
    """Join what belongs together; cells whose dense or uniform one is missing are left out."""
    known = {(each.model, each.optimizer, each.seed, each.setting): each for each in outcomes}
    steps = {(each.model, each.optimizer, each.reference): each for each in timelines if each.compute == HOST}
    found: list[Record] = []
    for (model, optimizer, seed, setting), each in known.items():
        kind, _, reference = setting.partition(" ")
        dense = known.get((model, optimizer, seed, DENSE))
        uniform = known.get((model, optimizer, seed, f"uniform {reference}"))
        if kind != "found" or dense is None or dense.loss is None or (uniform is None and reference in REFERENCES):
            continue
        step, late = steps.get((model, optimizer, reference)), each.errors[len(each.errors) // 2 :]
        found.append(
            Record(
                model=model,
                optimizer=optimizer,
                reference=reference,
                seed=seed,
                bytes_dense=dense.bytes,
                bytes_uniform=uniform and uniform.bytes,
                bytes_found=each.bytes,
                step_ms_uniform=step and step.step_ms_uniform,
                step_ms_found=step and step.step_ms_found,
                error_uniform=uniform and uniform.error,
                error_found=each.error,
                error_found_late=statistics.fmean(late) if late else each.error,
                error_by_table=each.error_by_table,
                limit_by_table=each.limit_by_table,
                loss_dense=dense.loss,
                loss_uniform=uniform and uniform.loss,
                loss_found=each.loss,
                families=each.families,
                plans=each.plans,
                solve_ms=each.solve_ms,
                look_ms=each.look_ms,
            )
        )
    return found


def report(records: Sequence[Record], timelines: Sequence[Priced], date: str) -> str:
    """Verdicts, tables, and every miss, as Markdown."""
    uniform = [each for each in records if each.reference in REFERENCES]
    modes = [each for each in records if each.reference in MODES]
    sections = ["# Error budgets against uniform settings", "", *_verdict(uniform, modes, timelines), ""]
    sections += ["## Bytes and loss", "", BYTES.format(date=date), *_table(uniform, _ROW), ""]
    sections += ["## Modes", "", MODE_WORDS, *_table(modes, _MODE_ROW), ""]
    sections += ["## Eight hosts at 1 Gbit/s", "", TIMES.format(exposed=EXPOSED), *_table(timelines, _TIME_ROW), ""]
    sections += ["## Misses", "", *_misses(uniform, modes, timelines), "", REASONS]
    return "\n".join(sections).rstrip() + "\n"


BYTES = """\
Four workers in one process, 1,000 steps, {date}; made with `python benchmarks/budget.py`. A *found* plan has the
fewest bytes that a rank sends, on four hosts where nothing else costs, at the error of the uniform setting by the
same table of errors. It begins by assumed errors; tables are measured every 20 steps, from step 200 on every 50, and
plans are chosen by them again, for 95 % of the budget. *Errors* are measured on the true gradients of every tenth
step ([definition](../error_budget.md)); the *budget* is what the uniform setting would lose by the tables of the
found plan's training, whose residuals are its own. *Bytes* are a mean over all steps. *Loss* is the final one over
that of dense training, minus 1, of the first seed; ± is half the range over two seeds. One-shot settings pay three
payloads on four hosts, two shots one and a half: a part of what is saved is that.
"""

MODE_WORDS = """\
`Compress(within="balanced", measured=True)` and `"aggressive"`, with the same minimal-bytes costs: the coarsest plans
that these budgets allow. A running job spends the budget only where its step becomes shorter.
"""

TIMES = """\
Simulated steps, both by the same costs and error table. *Exposed* is a uniform setting whose step is at least
{exposed} times the step without communication. *full gpt* has 14.3 M parameters, *full resnet* 25.5 M in 314 tensors;
their tables are from 20 steps of training, without residuals. Models without *full* are the trained ones. `v100` is
priced by its data sheet, `one thread` with the processor time measured here.
"""

REASONS = """\
What limits them:

- **Equal squares are not equal loss.** A budget adds up squares, which a few layers have. The cheapest plan keeps
  those and lets the others wait: at the error of top-k 1 % most values go by top-k 0.3 %, and wait three times as
  long. The loss feels the wait of every layer. The floor under what a strategy keeps (`LEAST_KEPT`) bounds that and
  does not prevent it. Tried on the logistic regression with SGD: if each layer must keep half of what top-k 1 % keeps
  of it, the loss is below the uniform one, and 16 % more bytes are sent than by top-k 1 %, where the found plan sends
  less than half.
- **Errors of low rank and of top-k are not alike.** With PowerSGD of rank 4 half of the squares wait and little loss
  shows it; top-k, which found plans take at the same error, lets small values wait for a hundred steps and more.
- **Before AdamW few values may come in bursts**, so that top-k is no choice for most of them. Where the uniform
  setting is top-k, which a compiled step would refuse there, the found plan may have to send more bytes than that;
  its loss is lower in turn.
- **Tables follow with a lag.** In the first hundred steps of the GPT errors rise tenfold within twenty steps; what
  was chosen by the look before is too coarse until the next.
- **Chance.** The GPT before AdamW ends at losses that differ by some percent between runs which should be alike: with
  int4, which loses 2 % of the squares, below dense.
- **Against PowerSGD on a fast device** the uniform setting is already near what its error allows: latencies, and
  layers of full rank, are what is left.
"""


def _verdict(uniform: Sequence[Record], modes: Sequence[Record], timelines: Sequence[Priced]) -> list[str]:
    exposed = [each for each in timelines if each.is_exposed]
    faster = [each.step_ms_uniform / each.step_ms_found for each in exposed]
    fewer = [each.fewer for each in uniform if each.fewer is not None]
    slower = [each for each in timelines if each.step_ms_found > each.step_ms_uniform * 1.0001]
    return [
        "| wanted | holds | range |",
        "|---|---|---|",
        _line(f"{FEWER:g} times fewer bytes than the uniform setting", [each >= FEWER for each in fewer], _span(fewer)),
        _line("error on the true gradients within the budget, by the tables of that training",
              [not _exceeds(each) for each in (*uniform, *modes)],
              _span([each.error_found / each.limit_by_table for each in (*uniform, *modes) if each.limit_by_table])),
        _line("error on the true gradients at most what the uniform setting has in its own training",
              [not _is_coarser(each) for each in uniform],
              _span([each.error_found / each.error_uniform for each in uniform if each.error_uniform])),
        _line("loss not worse than the uniform setting's", [not _is_worse(each) for each in uniform],
              _percents([_against_uniform(each) for each in uniform])),
        *(_line(f"loss within {WITHIN[mode]:.1%} of dense in `{mode}`",
                [_is_within(each) for each in modes if each.reference == mode],
                _percents([each.over_dense for each in modes if each.reference == mode])) for mode in MODES),
        _line("step at 1 Gbit/s not slower than the uniform setting's", [each not in slower for each in timelines], ""),
        _line(f"{FASTER:g} times faster where the uniform setting is exposed",
              [each >= FASTER for each in faster], _span(faster)),
    ]  # fmt: skip


def _line(what: str, holds: Sequence[bool], span: str) -> str:
    mark = "✓" if holds and all(holds) else "✗"
    return f"| {what} | {mark} {sum(holds)} of {len(holds)} | {span} |"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}" if values else ""


def _percents(values: Iterable[float | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{min(known):+.1%} to {max(known):+.1%}" if known else ""


def _exceeds(record: Record) -> bool:
    return record.error_found > record.limit_by_table


def _is_coarser(record: Record) -> bool:
    return record.error_uniform is not None and record.error_found > record.error_uniform


def _against_uniform(record: Record) -> float | None:
    if record.loss_found is None or record.loss_uniform is None:
        return None
    return record.loss_found / record.loss_uniform - 1


def _is_worse(record: Record) -> bool:
    more = _against_uniform(record)
    return record.loss_found is None if more is None else more > NOISE


def _is_within(record: Record) -> bool:
    return record.over_dense is not None and record.over_dense <= WITHIN[record.reference]


Columns = Mapping[str, Callable[..., str]]


def _table(rows: Sequence[object], columns: Columns) -> list[str]:
    head = f"| {' | '.join(columns)} |"
    rule = "|---|---|---|" + "--:|" * (len(columns) - 3)
    if rows and isinstance(rows[0], Record):
        of_seeds = {key: list(each) for key, each in groupby(sorted(rows, key=_key), key=_key)}
        return [
            head,
            rule,
            *(f"| {' | '.join(cell(each) for cell in columns.values())} |" for each in of_seeds.values()),
        ]
    return [head, rule, *(f"| {' | '.join(cell(each) for cell in columns.values())} |" for each in rows)]


def _key(record: Record) -> tuple[str, str, int]:
    return record.model, record.optimizer, (*REFERENCES, *MODES).index(record.reference)


def _loss(records: Sequence[Record], of: Callable[[Record], float | None]) -> str:
    values = [of(each) for each in records]
    known = [each for each in values if each is not None]
    if len(known) < len(values) or values[0] is None:
        return "diverges"
    spread = f" ± {(max(known) - min(known)) / 2:.2%}" if len(known) > 1 else ""
    return f"{values[0]:+.2%}{spread}"


def _mean(records: Sequence[Record], of: Callable[[Record], float | None], form: str) -> str:
    known = [value for each in records if (value := of(each)) is not None]
    return format(statistics.fmean(known), form) if known else "–"


def _families(families: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {name}" for name, share in list(families.items())[:4] if share >= 0.01)


_ROW: Columns = {
    "model": lambda rows: rows[0].model,
    "optimizer": lambda rows: rows[0].optimizer,
    "reference": lambda rows: rows[0].reference,
    "kB uniform": lambda rows: _mean(rows, lambda each: (each.bytes_uniform or 0) / 1e3, ".1f"),
    "kB found": lambda rows: _mean(rows, lambda each: each.bytes_found / 1e3, ".1f"),
    "fewer": lambda rows: f"{_mean(rows, lambda each: each.fewer, '.2f')} ×",
    "error uniform": lambda rows: _mean(rows, lambda each: each.error_uniform, ".3g"),
    "error found": lambda rows: _mean(rows, lambda each: each.error_found, ".3g"),
    "budget": lambda rows: _mean(rows, lambda each: each.limit_by_table, ".3g"),
    "loss uniform": lambda rows: _loss(rows, lambda each: each.uniform_over_dense),
    "loss found": lambda rows: _loss(rows, lambda each: each.over_dense),
    "values by strategy": lambda rows: _families(rows[0].families),
}

_MODE_ROW: Columns = {
    "model": lambda rows: rows[0].model,
    "optimizer": lambda rows: rows[0].optimizer,
    "mode": lambda rows: rows[0].reference,
    "kB dense": lambda rows: _mean(rows, lambda each: each.bytes_dense / 1e3, ".1f"),
    "kB found": lambda rows: _mean(rows, lambda each: each.bytes_found / 1e3, ".1f"),
    "error found": lambda rows: _mean(rows, lambda each: each.error_found, ".3g"),
    "budget": lambda rows: _mean(rows, lambda each: each.limit_by_table, ".3g"),
    "loss dense": lambda rows: f"{rows[0].loss_dense:.4f}",
    "loss found": lambda rows: _loss(rows, lambda each: each.over_dense),
    "values by strategy": lambda rows: _families(rows[0].families),
}

_TIME_ROW: Columns = {
    "model": lambda row: row.model,
    "optimizer": lambda row: row.optimizer,
    "reference": lambda row: row.reference,
    "compute": lambda row: row.compute,
    "no network, ms": lambda row: f"{row.free_ms:.1f}",
    "dense": lambda row: f"{row.dense_ms:.1f}",
    "uniform": lambda row: f"{row.step_ms_uniform:.1f}",
    "found": lambda row: f"{row.step_ms_found:.1f}",
    "faster": lambda row: f"{row.step_ms_uniform / row.step_ms_found:.2f} ×{'' if row.is_exposed else ' (hidden)'}",
    "error uniform": lambda row: f"{row.error_uniform:.3g}",
    "error found": lambda row: f"{row.error_found:.3g}",
    "values by strategy": lambda row: _families(row.families),
}


def _misses(uniform: Sequence[Record], modes: Sequence[Record], timelines: Sequence[Priced]) -> list[str]:
    found: list[str] = []
    for each in uniform:
        where = f"{each.model}, {each.optimizer}, {each.reference}, seed {each.seed}"
        if each.fewer is not None and each.fewer < FEWER:
            found.append(f"- {where}: {each.fewer:.2f} times fewer bytes")
        if _exceeds(each):
            found.append(f"- {where}: error {each.error_found:.3g}, budget {each.limit_by_table:.3g}")
        if _is_coarser(each):
            found.append(f"- {where}: error {each.error_found:.3g}, of the uniform setting {each.error_uniform:.3g}")
        if _is_worse(each):
            more = _against_uniform(each)
            found.append(
                f"- {where}: {'diverges' if more is None else f'loss {more:+.2%} against the uniform setting'}"
            )
    for each in modes:
        if _exceeds(each):
            where = f"{each.model}, {each.optimizer}, {each.reference}, seed {each.seed}"
            found.append(f"- {where}: error {each.error_found:.3g}, budget {each.limit_by_table:.3g}")
        if not _is_within(each):
            loss = "diverges" if each.over_dense is None else f"loss {each.over_dense:+.2%} against dense"
            found.append(f"- {each.model}, {each.optimizer}, {each.reference}, seed {each.seed}: {loss}")
    for row in timelines:
        times = row.step_ms_uniform / row.step_ms_found
        if times < (FASTER if row.is_exposed else 0.9999):
            found.append(f"- {row.model}, {row.optimizer}, {row.reference}, {row.compute}: {times:.2f} times faster")
    return found or ["None."]
