"""Measure error tables: what a look costs, how near it is to the truth, and to the error of the mean that is applied.

    python benchmarks/error_tables.py --json error_tables.json

cost      processor time of a look at 314 gradients of 25 M elements, the shapes of a residual network of 101 layers,
          family by family, and of one training step of that network on four images: least of several, one thread
accuracy  measured over true error: of each column and gradient, the truth being the codec's own error on all values.
          Gradients of training tasks with four workers (tasks.py), of a GPT with 14.3 M parameters, and drawn ones
training  with error feedback and four workers: the error of the mean that is applied, over what the table says of the
          same values; and over what it would say if each rank's own spectrum were measured

About ten minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tasks import make_task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from fxcomp.commands.demo.gpt import gpt_job
from fxcomp.compressors import kernels, parse_compressor
from fxcomp.error_tables import Columns, Draw, measure
from fxcomp.testing.rounds import average, replicas_of

FAMILIES = {
    "reading": Columns((), (), ()),
    "largest": Columns(ranks=(), codecs=()),
    "low rank": Columns(densities=(), codecs=()),
    "codecs": Columns(densities=(), ranks=()),
    "all": Columns(),
}
TRUE = ("topk(0.0001)", "topk(0.001)", "topk(0.01)", "topk(0.02)", "topk(0.25)", "sidco(0.01)", "dgc(0.01)")
CODECS = ("bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int2", "sign")
TASKS = ("charlm", "images", "logreg")
STEPS = (0, 20, 200)
TRAINED = (
    "topk(0.01)",
    "topk(0.1)",
    "sign",
    "int2",
    "int4",
    "int8",
    "bf16",
    "powersgd(1)",
    "powersgd(2)",
    "powersgd(4)",
)
COLUMNS = Columns((0.01, 0.1), (1, 2, 4), tuple(map(parse_compressor, ("sign", "int2", "int4", "int8", "bf16"))))


# Cost


class Block(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1, beside a shortcut."""

    def __init__(self, inside: int, width: int, outside: int, stride: int):
        super().__init__()
        sizes = ((inside, width, 1, 1), (width, width, 3, stride), (width, outside, 1, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(one, other, size, step, size // 2, bias=False) for one, other, size, step in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(other) for _, other, _, _ in sizes)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if inside != outside or stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(relu(y)))
        return self.shortcut(x) + y


def residual_network(width: int = 48) -> nn.Module:
    """314 parameters; 25.2 M elements at this width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.MaxPool2d(3, 2, 1)]
    inside = width
    for stage, blocks in enumerate((3, 4, 23, 3)):
        for block in range(blocks):
            outside = 4 * width * 2**stage
            layers.append(Block(inside, outside // 4, outside, 2 if stage and not block else 1))
            inside = outside
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def least(work: Callable[[], object], times: int) -> float:
    """The least processor time of several, in ms."""
    found: list[float] = []
    for _ in range(times):
        begin = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - begin))
    return min(found)


def costs(times: int) -> dict[str, float]:
    torch.manual_seed(0)
    network = residual_network()
    images, labels = torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))

    def step() -> None:
        network.zero_grad()
        cross_entropy(network(images), labels).backward()

    found = {"step": least(step, max(2, times // 2))}
    gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    residuals = {name: torch.randn_like(each) * each.std(correction=0) for name, each in gradients.items()}
    found["tensors"], found["elements"] = len(gradients), sum(each.numel() for each in gradients.values())
    for family, columns in FAMILIES.items():
        found[family] = least(lambda columns=columns: measure(gradients, residuals, columns), times)
    return found


# Accuracy


@dataclass(frozen=True)
class Compared:
    """The measured error over the true one, of many gradients."""

    column: str
    gradients: int
    median: float
    low: float
    high: float


def pieces(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split_with_sizes(flat, sizes)
    return {str(number): part.view(shape) for number, (part, shape) in enumerate(zip(parts, shapes, strict=True))}


def of_tasks() -> Iterator[dict[str, Tensor]]:
    """Gradients of each worker early and late in dense training, and a residual's worth of them."""
    for name in TASKS:
        task = make_task(name)
        weights, owed = task.start.clone(), torch.zeros_like(task.start)
        for step in range(max(STEPS) + 1):
            found = task.gradients(weights, step)
            if step in STEPS:
                yield from (pieces(each, task.shapes) for each in found)
                yield pieces(owed, task.shapes)
            owed = torch.where(found[0].abs() > 3 * found[0].std(), 0.0, owed + found[0])
            weights = weights - task.rates["sgd"] * torch.stack(found).mean(dim=0)


def of_gpt() -> Iterator[dict[str, Tensor]]:
    job = gpt_job()
    for index in range(2):
        job.optimizer.zero_grad()
        job.loss_fn(job.model, job.batch_at(index, 0)).backward()
        job.optimizer.step()
    yield {name: each.grad for name, each in job.model.named_parameters() if each.grad is not None}


def drawn() -> Iterator[dict[str, Tensor]]:
    normal = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    other = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    yield {"gaussian": normal, "log-normal scales": normal * (1.5 * other).exp()}


def true_error(text: str, gradient: Tensor) -> float:
    compressor, flat, shape = parse_compressor(text), gradient.flatten(), tuple(gradient.shape)
    replicas = replicas_of(compressor.bound_to([shape], 1), (len(flat),), feedback=False)
    left = flat - average(compressor, [flat], replicas, (len(flat),), [shape])
    return (left.double().square().sum() / flat.double().square().sum()).item()


def compared(sources: Mapping[str, Callable[[], Iterator[dict[str, Tensor]]]]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for source, gradients_of in sources.items():
        ratios: dict[str, list[float]] = {text: [] for text in (*TRUE, *CODECS)}
        for look, gradients in enumerate(gradients_of()):
            gradients = {name: each for name, each in gradients.items() if each.numel() > 1 and each.any()}
            table = measure(gradients, draw=Draw(0, look))
            for name, gradient in gradients.items():
                for text, of_text in ratios.items():
                    truth = true_error(text, gradient)
                    if truth > 1e-12:
                        of_text.append(table.error_of(name, parse_compressor(text)).value / truth)
        found[source] = [
            Compared(text, len(each), statistics.median(each), min(each), max(each)) for text, each in ratios.items()
        ]
    return found


# Training


@dataclass(frozen=True)
class Applied:
    """The error of the mean that is applied in training, over what a table says of that step's values."""

    task: str
    compressor: str
    table: float
    """The median of what the table says."""
    ratio: tuple[float, float, float]
    """Tenth percentile, median and ninetieth, over gradients and steps."""
    alone: float
    """The median if each rank's own values had been measured: another number for low rank only."""


def applied(name: str, text: str, steps: int) -> Applied:
    task, compressor = make_task(name), parse_compressor(text)
    weights, segments = task.start.clone(), task.segments
    replicas = replicas_of(compressor.bound_to(task.shapes, task.workers), segments, task.workers, feedback=True)
    unit = task.workers if compressor.is_linear else 1
    of_table: list[float] = []
    ratios: list[float] = []
    alone: list[float] = []
    for step in range(steps):
        gradients = task.gradients(weights, step)
        owed = [torch.zeros_like(weights) if each.residual is None else each.residual * unit for each in replicas]
        given = [one + other for one, other in zip(gradients, owed, strict=True)]
        decoded = average(compressor, gradients, replicas, segments, task.shapes)
        weights = weights - task.rates["sgd"] * decoded
        if step < 20 or step % 10:
            continue
        mean, kept = pieces(torch.stack(given).mean(dim=0), task.shapes), pieces(decoded, task.shapes)
        tables = [measure(pieces(each, task.shapes), columns=COLUMNS) for each in given]
        of_mean = measure(mean, columns=COLUMNS)
        for key, value in mean.items():
            squares = [table.rows[key].squares for table in tables]
            errors = [table.error_of(key, compressor).value for table in tables]
            own = sum(error * weight for error, weight in zip(errors, squares, strict=True)) / (sum(squares) or 1)
            said = of_mean.error_of(key, compressor).value if compressor.facts.needs_whole_parameters else own
            if said > 1e-12 and own > 1e-12:
                true = ((value - kept[key]).square().sum() / value.square().sum()).item()
                of_table.append(said)
                ratios.append(true / said)
                alone.append(true / own)
    tenths = statistics.quantiles(ratios, n=10)
    ratio = (tenths[0], statistics.median(ratios), tenths[-1])
    return Applied(name, text, statistics.median(of_table), ratio, statistics.median(alone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=int, default=5, help="so many looks are timed")
    parser.add_argument("--only", choices=("cost", "accuracy", "training"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, object] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    record["kernels"] = kernels.describe()
    print(record["kernels"])
    if options.only in (None, "cost"):
        record["cost_ms"] = found = costs(options.times)
        for what, number in found.items():
            print(f"{what:>10}  {number:12,.1f}")
        print(f"one look in {found['all'] / (0.01 * found['step']):.0f} steps or more takes 1 % of the steps' time")
    if options.only in (None, "accuracy"):
        accuracy = compared({"tasks": of_tasks, "gpt": of_gpt, "drawn": drawn})
        record["accuracy"] = {source: [asdict(each) for each in found] for source, found in accuracy.items()}
        for source, found in accuracy.items():
            for each in found:
                print(f"{source:>6}  {each.column:14}  {each.median:6.3f}  {each.low:6.3f} to {each.high:6.3f}")
    if options.only in (None, "training"):
        trained = [applied(name, text, 200) for name in TASKS for text in TRAINED]
        record["training"] = [asdict(each) for each in trained]
        for each in trained:
            low, median, high = each.ratio
            print(
                f"{each.task:>6}  {each.compressor:12}  {each.table:9.3g}  {median:5.2f} ({low:.2f} to {high:.2f})"
                f"  {each.alone:5.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
