"""A few steps are timed line by line beside the prediction, and a profiler of torch sees every line by its name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.gathered import gathered
from helpers.jobs import cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import flat_parameters
from helpers.traces import check_trace, slices_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxcomp
from fxcomp import compat
from fxcomp.codegen.profiled import names_of
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import BadOption
from fxcomp.ranks import ALONE
from fxcomp.report.trace import flows_of
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.executor import Executor

ON_POOL = "compress(int8)@cpu > all_gather@world > decompress@cpu"


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def compiled(how: str, **options: Any) -> CompiledStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"compress": how, "race": "off", "costs": fxcomp.CostTable(), **options}
    return fxcomp.compile_step(model, cross_entropy, optimizer, batch(), **gathered(**given))


def names(timeline: Timeline) -> set[str]:
    return {span.task.name for span in timeline.spans if span.end_us > span.start_us}


def profiled(how: str, folder: str) -> dict[str, Any]:
    step, plain = compiled(how), compiled(how)
    rank = dist.get_rank()
    if rank == 0:  # the other rank knows nothing of it
        step.profile(steps=2)
    before = step.report().explanation.notes
    for seed in range(8):
        step(batch(seed)), plain(batch(seed))
    report = step.report()
    report.save_trace(f"{folder}/{rank}.json")
    found = {
        "before": [note for note in before if note.startswith("step.profile")],
        "after": [note for note in report.explanation.notes if note.startswith("step.profile")],
        "measured": {number: names(timeline) for number, timeline in report.explanation.measured.items()},
        "predicted": names(report.explanation.timeline),
        "flows": [
            [span.task.name for span in spans]
            for timeline in report.explanation.measured.values()
            for spans in flows_of(timeline).values()
        ],
        "text": str(report),
        "same": torch.equal(flat_parameters(step.training.model), flat_parameters(plain.training.model)),
    }
    step.close(), plain.close()
    return found


@pytest.mark.parametrize("how", ["int8", ON_POOL])
def test_the_next_steps_are_timed_line_by_line_on_one_rank(how: str, tmp_path: Path):
    first, other = run_ranks(2, profiled, how, str(tmp_path))
    assert first["before"] == ["step.profile: 0 of 2 steps are timed by now"]
    assert first["after"] == other["before"] == []
    assert len(first["measured"]) == 2
    assert other["measured"] == {}
    for measured in first["measured"].values():
        assert measured <= first["predicted"] | {"region 0", "region 1"}
        assert {"region 0", "update 0"} <= measured
        assert any(name.startswith("start all_gather") for name in measured)
        assert any(name.startswith("compress") for name in measured)
    assert all(flow[0].startswith("region") and flow[-1].startswith("update") for flow in first["flows"])
    assert "measured, step " in first["text"]
    assert first["same"], "timing changes no parameter"
    trace = json.loads((tmp_path / "0.json").read_text())
    check_trace(trace)
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.partition(",")[0] for name in processes][-2:] == ["measured", "measured"]
    assert all("price_us" not in event["args"] for event in slices_of(trace, len(processes)))
    check_trace(json.loads((tmp_path / "1.json").read_text()))


def seen_by_torch(how: str) -> dict[str, Any]:
    step, plain = compiled(how), compiled(how)
    for seed in range(3):
        step(batch(seed)), plain(batch(seed))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert compat.is_profiling()
        step(batch(3))
    plain(batch(3))
    events = [event.name for event in profiler.events() if event.name.startswith("fxcomp: ")]
    expected = sorted(name for _, name in names_of(step.in_force.program.graph))
    same = torch.equal(flat_parameters(step.training.model), flat_parameters(plain.training.model))
    watched = step.in_force.runtime.pool.watch
    step.close(), plain.close()
    return {"events": sorted(events), "expected": expected, "same": same, "watched": watched}


def test_a_profiler_of_torch_sees_every_line_by_bucket_compressor_and_leg():
    for found in run_ranks(2, seen_by_torch, "int8"):
        assert found["events"] == found["expected"]
        assert {name.split(", ")[1] for name in found["events"] if "bucket" in name} >= {
            "pack",
            "compress int8",
            "all_gather@world",
            "wait",
            "decompress int8",
        }
        assert "fxcomp: region_0" in found["events"]
        assert found["same"]
        assert found["watched"] is None


def test_without_a_profiler_lines_are_the_runtimes_own():
    runtime = cast(Any, object())
    module = cast(Any, SimpleNamespace(step=lambda *given: given))
    assert Executor(ALONE).run(module, cast(Any, None), runtime, ["batch"]) == (runtime, "batch")


def asked_wrongly() -> str:
    step = compiled("int8")
    with pytest.raises(BadOption) as raised:
        step.profile(steps=0)
    step.close()
    return str(raised.value)


def test_no_steps_cannot_be_profiled():
    assert run_ranks(2, asked_wrongly)[0] == "step.profile(steps=...) takes a number of steps, 1 or more; it is 0"
