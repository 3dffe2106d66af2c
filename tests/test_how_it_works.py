"""The walk through the compiler in docs/how_it_works.md shows what the compiler does."""

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster, Processors
from fxcomp.cluster.link import Link
from fxcomp.compressors import parse_compressor
from fxcomp.cost.measured import CompressorCost, CompressorPoint
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import Timeline, simulate
from fxcomp.graph.dump import dump
from fxcomp.graph.edit import clone
from fxcomp.graph.run_passes import finished
from fxcomp.passes.annotate_costs import annotate_costs
from fxcomp.pipeline import Compiler
from fxcomp.plan.modes import Mode
from fxcomp.search.choose import choose
from fxcomp.search.plan_tasks import plan_tasks

PAGE = Path(__file__).parent.parent / "docs" / "how_it_works.md"
PLACE = re.compile(r"<!-- listing: (\w+) -->\n(?:\n```\w*\n.*?\n```\n)?", re.DOTALL)

SLOW = Link(alpha_us=50.0, gb_per_s=0.0125)
CLUSTER = Cluster(hosts=2, ranks_per_host=1, intra=SLOW, inter=SLOW)
COSTS = CostTable(
    roofline=Roofline(gflops=10.0, gb_per_s=10.0, launch_us=20.0, source="made up"),
    compressors={
        **dict.fromkeys(
            ("bf16@gpu", "int4@gpu"),
            CompressorCost.of(CompressorPoint(1, 60.0, 40.0), CompressorPoint(1_000_000, 360.0, 140.0)),
        ),
        "int8@gpu": CompressorCost.of(CompressorPoint(1, 1e6, 1e6)),  # too slow here to be chosen
    },
    processors=Processors(1.0, 1.0),
    error=0.05,
)


def listings() -> dict[str, str]:
    """Make what the page shows by the compiler."""
    torch.manual_seed(0)
    layers = {"hidden": nn.Linear(256, 512, bias=False), "act": nn.ReLU(), "out": nn.Linear(512, 4, bias=False)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = (torch.zeros(64, 256), torch.zeros(64, 4))
    training = Training.of(model, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), optimizer)
    captured = capture(training, batch)

    workload = Compiler(CLUSTER).analyze(captured.graph, COSTS)
    plan = choose(workload, COSTS, CLUSTER, Mode.BALANCED).plan
    assert [bucket.strategy.compressor for bucket in plan.buckets] == [None, parse_compressor("int4")]
    program = finished(Compiler(CLUSTER).emit(captured, plan, COSTS))
    history = program.replay()
    labelled = history["label_gradients"]
    dumps = {name: dump(graph, costs=False) for name, graph in history.items()}
    return {
        "capture": dump(captured.graph, costs=False),
        "label_gradients": changed(dump(captured.graph, costs=False), dumps["label_gradients"]),
        "annotate_costs": costly(dump(annotate_costs(clone(labelled), COSTS, CLUSTER))),
        "plan": str(plan),
        "timeline": spans(simulate(plan_tasks(workload, plan, COSTS, CLUSTER))),
        "bucket_gradients": changed(dumps["label_gradients"], dumps["bucket_gradients"]),
        "lower_strategies": changed(dumps["bucket_gradients"], dumps["lower_strategies"]),
        "thread_state": changed(dumps["lower_strategies"], dumps["thread_state"]),
        "source": program.source,
    }


def changed(before: str, after: str) -> str:
    """The lines of `after` that are not in `before`, with dots for the others."""
    known = {" ".join(line.split()) for line in before.splitlines()}
    return elided(after, lambda line: " ".join(line.split()) not in known)


def costly(text: str) -> str:
    return elided(text, lambda line: " us " in line)


def elided(text: str, shown: Callable[[str], bool]) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if shown(line):
            lines.append(line)
        elif lines[-1:] != ["..."]:
            lines.append("...")
    return "\n".join(lines)


def spans(timeline: Timeline) -> str:
    width = max(len(span.task.name) for span in timeline.spans)
    rows = (
        f"{span.task.name:<{width}}  {span.task.stream.value:<7}  {span.start_us:8.1f} to {span.end_us:8.1f} us"
        for span in timeline.spans
    )
    return "\n".join(rows)


def with_listings(page: str, texts: dict[str, str]) -> str:
    """The page with every listing in its place."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        language = "python" if name == "source" else "text"
        return f"<!-- listing: {name} -->\n\n```{language}\n{texts[name].rstrip()}\n```\n"

    return PLACE.sub(fill, page)


def test_every_listing_on_the_page_is_what_the_compiler_prints(request: pytest.FixtureRequest):
    texts, page = listings(), PAGE.read_text()
    assert sorted(PLACE.findall(page)) == sorted(texts)
    expected = with_listings(page, texts)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected
