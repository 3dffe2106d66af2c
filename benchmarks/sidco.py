"""Measure how many values the fitted thresholds select: on known distributions, and in training with error feedback.

    python benchmarks/sidco.py --json sidco.json

A cell of the first table is about a stream of independent samples of one distribution: what the first call's fit alone
selects, what the first call sends, and what the calls sent after the controller has settled, as mean and range. All are
relative to the target k. What is sent ends at 1.3, the slots of the payload.

The second table trains a small character model on source text of the standard library, with four workers in one
process and a residual each, every parameter by itself or all in one segment. It counts from step 100 on: what was sent
by all segments, the share of steps within 20 % of the target, the segment that is off the most, and what the fits alone
would have selected, and in which share of the calls the check put the sample's own quantile in the fit's place. "no
check" has the same fits without check and controller; "no fit" has that quantile always, of the same samples.

A minute or two on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from distributions import DISTRIBUTIONS, draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fxcomp.compressors import Compressor, EncoderInput, SidcoE, parse_compressor, survivors
from fxcomp.compressors.sidco import (
    RUN,
    STATE_ELEMENTS,
    Controller,
    Sidco,
    SidcoGP,
    is_contradicted,
    sample_of,
    strides,
)
from fxcomp.compressors.survivors import Cut
from fxcomp.compressors.tail_fits import TailFit, fit_threshold
from fxcomp.compressors.topk import counts

KINDS: dict[str, type[Sidco | SidcoE | SidcoGP]] = {"sidco_e": SidcoE, "sidco_gp": SidcoGP, "sidco": Sidco}
RATIOS = (0.1, 0.01, 0.001)
SETTLED_AFTER = 10
TRAINING_RATIOS = (0.01, 0.001)
WORKERS = 4
BATCH = 64
CONTEXT = 16
CHARACTERS = 128
COUNTED_FROM = 100
TEXT_FILES = ("argparse.py", "ast.py", "asyncio/base_events.py", "decimal.py", "doctest.py", "inspect.py", "typing.py")


@dataclass(frozen=True)
class Selection:
    """One cell of the first table."""

    compressor: str
    distribution: str
    ratio: float
    n: int
    fit_alone: float
    first_call: float
    settled_mean: float
    settled_low: float
    settled_high: float
    stages: int

    @property
    def is_within(self) -> bool:
        return all(0.8 <= value <= 1.2 for value in (self.first_call, self.settled_low, self.settled_high))

    def __str__(self) -> str:
        settled = f"{self.settled_mean:.2f} ({self.settled_low:.2f}–{self.settled_high:.2f})"
        return f"{self.fit_alone:.2f} / {self.first_call:.2f} / {settled}"


def measure_selection(name: str, distribution: str, ratio: float, samples: Sequence[Tensor]) -> Selection:
    """Feed a stream of samples, of one size."""
    compressor, n = KINDS[name](ratio), len(samples[0])
    (k,) = counts((n,), ratio)
    level = fit_threshold(samples[0].abs(), k, 2, compressor.fit)
    state = compressor.fresh_state(n, 0, 0)
    payload = torch.empty(compressor.payload_elements((n,)), dtype=torch.uint8)
    sent: list[float] = []
    for sample in samples:
        compressor.encode(sample, None, payload, (n,), state)
        sent.append(sent_counts(payload, (n,), ratio)[0] / k)
    settled = sent[SETTLED_AFTER:]
    return Selection(
        compressor=name,
        distribution=distribution,
        ratio=ratio,
        n=n,
        fit_alone=int((samples[0].abs().double() >= level).sum()) / k,
        first_call=sent[0],
        settled_mean=statistics.mean(settled),
        settled_low=min(settled),
        settled_high=max(settled),
        stages=int(state[0]),
    )


def sent_counts(payload: Tensor, segments: Sequence[int], ratio: float) -> list[int]:
    """How many values each segment sends."""
    sent: list[int] = []
    start = 0
    for n, slots in zip(segments, survivors.capacities(tuple(segments), ratio), strict=True):
        sent.append(int(payload[start : start + 4].view(torch.int32)))
        start += survivors.section_bytes(n, slots)
    return sent


# Training


def read_text() -> Tensor:
    """Characters of files that come with Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text(encoding="utf-8") for name in TEXT_FILES)
    return torch.tensor([min(ord(character), CHARACTERS - 1) for character in text])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(CHARACTERS, 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, 192),
        nn.ReLU(),
        nn.Linear(192, 192),
        nn.ReLU(),
        nn.Linear(192, CHARACTERS),
    )


@dataclass
class Worker:
    """What one rank keeps, and what it saw from step to step."""

    compressor: Compressor
    segments: tuple[int, ...]
    residual: Tensor
    state: Tensor | None
    payload: Tensor

    def encode(self, gradient: Tensor) -> None:
        self.compressor.encode(gradient, self.residual, self.payload, self.segments, self.state)


class Unchecked(Worker):
    """The fits alone: no check, no controller."""

    fit: TailFit
    stages: int

    def encode(self, gradient: Tensor) -> None:
        value = gradient + self.residual
        cuts: list[Cut] = []
        ratio: float = self.compressor.ratio  # pyright: ignore[reportAttributeAccessIssue]
        for piece, k in zip(value.split(list(self.segments)), counts(self.segments, ratio), strict=True):
            level = fit_threshold(piece.abs(), k, self.stages, self.fit) if bool(piece.any()) else 0.0
            bits = max(1, int(survivors.magnitude_bits(torch.tensor(level))))
            cuts.append(Cut(bits, bits))
        sent = survivors.compress(EncoderInput(gradient, self.residual, tuple(self.segments)), ratio, cuts)
        assert sent.residual is not None
        self.payload.copy_(sent.payload)
        self.residual.copy_(sent.residual)


class SampledQuantile(Worker):
    """No fit: the k / n quantile of the sample that SIDCo would have taken."""

    calls: int = 0

    def encode(self, gradient: Tensor) -> None:
        ratio: float = self.compressor.ratio  # pyright: ignore[reportAttributeAccessIssue]
        pieces = (gradient + self.residual).split(list(self.segments))
        cuts: list[Cut] = []
        for piece, k, stride in zip(pieces, counts(self.segments, ratio), strides(self.segments, ratio), strict=True):
            sample = sample_of(piece, stride, self.calls)
            bits = survivors.kth_largest(sample, max(1, int(k * len(sample) / len(piece) + 0.5)))
            cuts.append(Cut(bits, bits))
        self.calls += 1
        sent = survivors.compress(EncoderInput(gradient, self.residual, self.segments), ratio, cuts)
        assert sent.residual is not None
        self.payload.copy_(sent.payload)
        self.residual.copy_(sent.residual)


@dataclass
class Training:
    """One row of the second table."""

    name: str
    layout: str
    ratio: float
    loss: float = 0.0
    mean: float = 0.0
    share_within: float = 0.0
    worst_segment: float = 0.0
    fit_alone: float | None = None
    overridden: float | None = None
    sent: list[float] = field(default_factory=list[float])


def train(name: str, layout: str, ratio: float, steps: int, text: Tensor) -> Training:
    """Train and count. `name` is a compressor, "dense", or "no check: " and a fit."""
    model = make_model()
    parameters = list(model.parameters())
    sizes = tuple(parameter.numel() for parameter in parameters)
    segments = sizes if layout == "each parameter" else (sum(sizes),)
    workers = [] if name == "dense" else [_make_worker(name, ratio, segments, rank) for rank in range(WORKERS)]
    ks = counts(segments, ratio)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    result = Training(name, layout, ratio)
    by_segment = torch.zeros(len(segments))
    fitted: list[tuple[int, float]] = []
    for step in range(steps):
        gradients = [_gradient(model, parameters, text, generator) for _ in range(WORKERS)]
        for worker, gradient in zip(workers, gradients, strict=False):
            before = None if worker.state is None else worker.state.clone()
            worker.encode(gradient)
            if step >= COUNTED_FROM:
                sent = sent_counts(worker.payload, segments, ratio)
                result.sent.append(sum(sent) / sum(ks))
                by_segment += torch.tensor(sent) / torch.tensor(ks)
                fitted += _fitted(before, worker.state)
        total = torch.cat(gradients).view(WORKERS, -1).mean(dim=0)
        if workers:
            payloads = torch.cat([worker.payload for worker in workers])
            workers[0].compressor.decode(payloads, WORKERS, segments, total)
        for parameter, gradient in zip(parameters, total.split(list(sizes)), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()
        optimizer.step()
        schedule.step()
    result.loss = _held_loss(model, text)
    if workers:
        result.mean = statistics.mean(result.sent)
        result.share_within = sum(0.8 <= value <= 1.2 for value in result.sent) / len(result.sent)
        means = (by_segment / len(result.sent)).tolist()
        result.worst_segment = max(means, key=lambda value: abs(value - 1.0))
        if fitted:
            result.fit_alone = statistics.median(value for _, value in fitted)
            result.overridden = statistics.mean(_is_overridden(value, segments[s], ratio) for s, value in fitted)
    return result


def _make_worker(name: str, ratio: float, segments: tuple[int, ...], rank: int) -> Worker:
    is_checked = not name.startswith("no ")
    compressor = parse_compressor(f"{name if is_checked else 'sidco'}({ratio})")
    state = torch.cat([compressor.fresh_state(n, index, rank) for index, n in enumerate(segments)])
    payload = torch.empty(compressor.payload_elements(segments), dtype=torch.uint8)
    kind = Worker if is_checked else Unchecked if name in UNCHECKED else SampledQuantile
    worker = kind(compressor, segments, torch.zeros(sum(segments)), state if is_checked else None, payload)
    if isinstance(worker, Unchecked):
        worker.fit, worker.stages = UNCHECKED[name]
    return worker


UNCHECKED = {
    "no check: exponential, 1 stage": (TailFit.EXPONENTIAL, 1),
    "no check: Pareto, 2 stages": (TailFit.PARETO, 2),
}


NO_FIT = "no fit: sampled quantile"


def _fitted(before: Tensor | None, after: Tensor | None) -> Iterator[tuple[int, float]]:
    """The segment, and what the fit alone would have selected, from the controllers; not where a window ended."""
    if before is None or after is None or len(before) % STATE_ELEMENTS != 0 or before.dtype != torch.float32:
        return
    both = zip(before.view(-1, STATE_ELEMENTS), after.view(-1, STATE_ELEMENTS), strict=True)
    for segment, (old, new) in enumerate(both):
        was, now = Controller(*map(float, old)), Controller(*map(float, new))
        if now.calls_in_window > was.calls_in_window:
            yield segment, now.fitted - was.fitted


def _is_overridden(fitted: float, n: int, ratio: float) -> bool:
    """The check took the sample's quantile in the fit's place."""
    ((k,), (stride,)) = counts((n,), ratio), strides((n,), ratio)
    reaching = k / n * (n if stride == 1 else n // RUN * RUN / stride)
    return is_contradicted(round(fitted * reaching), reaching, stride)


def _gradient(model: nn.Module, parameters: list[nn.Parameter], text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    loss = cross_entropy(model(windows[:, :-1]), windows[:, -1])
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])


def _held_loss(model: nn.Module, text: Tensor) -> float:
    starts = torch.randint(len(text) - CONTEXT, (8192, 1), generator=torch.Generator().manual_seed(2))
    windows = text[starts + torch.arange(CONTEXT + 1)]
    with torch.no_grad():
        return cross_entropy(model(windows[:, :-1]), windows[:, -1]).item()


# Tables


def selection_table(selections: Sequence[Selection]) -> str:
    lines = ["| fit | ratio | " + " | ".join(DISTRIBUTIONS) + " |", "|---" * (len(DISTRIBUTIONS) + 2) + "|"]
    for name in KINDS:
        for ratio in RATIOS:
            cells = [str(cell) for cell in selections if (cell.compressor, cell.ratio) == (name, ratio)]
            lines.append(f"| {name} | {ratio:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training_table(rows: Sequence[Training]) -> str:
    lines = [
        "| compressor | segments | ratio | sent | steps within 20 % | worst segment | fits alone | overridden | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.name == "dense":
            lines.append(f"| dense | | | | | | | | {row.loss:.3f} |")
            continue
        overridden = "" if row.overridden is None else f"{row.overridden:.0%}"
        fit_alone = "" if row.fit_alone is None else f"{row.fit_alone:.2f}"
        lines.append(
            f"| {row.name} | {row.layout} | {row.ratio:g} | {row.mean:.2f} | {row.share_within:.0%} | "
            f"{row.worst_segment:.2f} | {fit_alone} | {overridden} | {row.loss:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--elements", type=int, default=1 << 20, help="of a sample, default 2^20")
    parser.add_argument("--calls", type=int, default=30, help="samples in a stream, default 30")
    parser.add_argument("--only-training", action="store_true", help="leave the first table out")
    parser.add_argument("--steps", type=int, default=300, help="of training, default 300")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    selections: list[Selection] = []
    for distribution in () if arguments.only_training else DISTRIBUTIONS:
        samples = [draw(distribution, arguments.elements, seed) for seed in range(arguments.calls)]
        selections += [measure_selection(name, distribution, ratio, samples) for name in KINDS for ratio in RATIOS]
    print(f"Fit alone / first call / settled mean (range), relative to k; n = {arguments.elements}\n")
    print(selection_table(selections), flush=True)
    outside = [cell for cell in selections if not cell.is_within]
    print(f"\n{len(selections) - len(outside)} of {len(selections)} cells stay within 20 %, the first call included.\n")

    text = read_text()
    rows = [train("dense", "", 1.0, arguments.steps, text)]
    for ratio in TRAINING_RATIOS:
        for layout in ("each parameter", "all in one"):
            names = (*KINDS, "dgc", NO_FIT, *(UNCHECKED if layout == "all in one" else ()))
            rows += [train(name, layout, ratio, arguments.steps, text) for name in names]
    print(training_table(rows))
    if arguments.json is not None:
        trained = [{key: value for key, value in asdict(row).items() if key != "sent"} for row in rows]
        records = {"selection": [asdict(cell) for cell in selections], "training": trained}
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
