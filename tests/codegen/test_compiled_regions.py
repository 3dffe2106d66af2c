"""Programs of one captured step share the regions that are alike; what differs in anything is compiled by itself."""

from __future__ import annotations

import fcntl
import math
import os
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.graphs import TWO
from helpers.jobs import JOBS, OPTIMIZERS, captured_step, cross_entropy
from helpers.plans import plan_in_turns
from helpers.pretended import mean_square
from helpers.ranks import run_ranks
from helpers.torch_compiled import QUICK
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.fx import Graph, GraphModule

import fxcomp
from fxcomp import compat
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.codegen import program
from fxcomp.codegen.compiled_regions import CompiledRegions
from fxcomp.cost.table import CostTable
from fxcomp.graph.edit import call
from fxcomp.graph.info import NodeInfo, Role
from fxcomp.graph.run_passes import finished
from fxcomp.pipeline import Compiler
from fxcomp.plan.strategy import DENSE, Strategy

INT8 = Strategy.parse("compress(int8)@gpu > all_gather@world > decompress@gpu")
SCALAR = torch.ops.aten.mul.Scalar


class Counted:
    """Inductor, which compiles nothing and is counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: GraphModule, _: Any, *, keeps_order: bool) -> Callable[..., Any]:  # noqa: ARG002
        self.calls += 1
        return lambda *inputs: module(*inputs)


@pytest.fixture
def inductor() -> Generator[Counted]:
    counted = Counted()
    with patch.object(compat, "standalone_compile", counted), patch.object(program, "INDUCTOR_DEVICES", ("cpu",)):
        yield counted


def test_plans_of_one_step_compile_regions_that_are_alike_once(inductor: Counted, model: nn.Module):
    """One bucket is one region, which is another one."""
    captured, compiler = captured_step("transformer"), Compiler(TWO)
    finished(compiler.emit(captured, plan_in_turns(model, [DENSE], 5), CostTable()))
    regions = inductor.calls
    assert regions > 1
    finished(compiler.emit(captured, plan_in_turns(model, [INT8], 5), CostTable()))
    assert inductor.calls == regions
    finished(compiler.emit(captured, plan_in_turns(model, [INT8], len(list(model.parameters()))), CostTable()))
    assert inductor.calls == regions + 1


def test_like_layers_of_a_model_compile_their_backward_pass_once(inductor: Counted):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))
    training = Training.of(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
    made = finished(
        Compiler(TWO).emit(capture(training, (torch.ones(4, 8),)), plan_in_turns(model, [DENSE], 2), CostTable())
    )
    assert (made.source.count("def region_"), inductor.calls) == (7, 3)


def test_steps_captured_apart_share_nothing(inductor: Counted, model: nn.Module):
    for _ in range(2):
        finished(Compiler(TWO).emit(captured_step("transformer"), plan_in_turns(model, [DENSE], 20), CostTable()))
    assert inductor.calls == 2


@pytest.fixture
def model() -> nn.Module:
    return JOBS["transformer"].build()


def region(value: Any = 2.0, given: Tensor | None = None, name: str = "given", constant: Tensor | None = None) -> Any:
    """A region that multiplies by a number, and adds a constant."""
    root, graph = nn.Module(), Graph()
    mode, _ = compat.fake_mode()
    taken = graph.placeholder(name)
    taken.meta["val"] = mode.from_tensor(torch.ones(2, 3) if given is None else given, static_shapes=True)
    with mode:
        made = call(graph, SCALAR, (taken, value), NodeInfo(Role.COMPUTE))
    if constant is not None:
        root.constant = constant
        (read := graph.get_attr("constant")).meta["val"] = taken.meta["val"]
        made = call(graph, torch.ops.aten.add.Tensor, (made, read), NodeInfo(Role.COMPUTE), value=made.meta["val"])
    graph.output((made,))
    return GraphModule(root, graph)


def compiled(known: CompiledRegions, gm: GraphModule, *, keeps_order: bool = False) -> Callable[..., Any]:
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return known.of(gm, fakes, keeps_order=keeps_order)


def test_names_do_not_count(inductor: Counted):
    known = CompiledRegions()
    assert compiled(known, region()) is compiled(known, region(name="other"))
    assert inductor.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        region(2),
        region(True),
        region(math.nan),
        region(given=torch.ones(3, 2)),
        region(given=torch.ones(3, 2).t()),
        region(given=torch.ones(2, 3, dtype=torch.bfloat16)),
        region(given=torch.ones(12)[1:7].view(2, 3)),
        region(constant=torch.ones(2, 3)),
    ],
    ids=("a whole number", "a truth", "no number", "sizes", "strides", "type", "place in memory", "a constant"),
)
def test_what_differs_in_anything_is_compiled_by_itself(inductor: Counted, other: GraphModule):
    known = CompiledRegions()
    compiled(known, region())
    compiled(known, other)
    assert inductor.calls == 2


def test_inputs_that_share_memory_are_others_than_those_that_do_not(inductor: Counted):
    known, whole = CompiledRegions(), compat.fake_mode()[0].from_tensor(torch.ones(6), static_shapes=True)
    for pair in ((whole[:3], whole[3:]), (whole[:3], whole.clone()[3:])):
        graph = Graph()
        for name, value in zip("ab", pair, strict=True):
            graph.placeholder(name).meta["val"] = value
        nodes = list(graph.nodes)
        graph.output((call(graph, torch.ops.aten.add.Tensor, (nodes[0], nodes[1]), NodeInfo(Role.COMPUTE)),))
        compiled(known, GraphModule(nn.Module(), graph))
    assert inductor.calls == 2


def test_order_and_constants_count(inductor: Counted):
    known, constant = CompiledRegions(), torch.ones(2, 3)
    compiled(known, region(constant=constant))
    compiled(known, region(constant=constant))
    assert inductor.calls == 1
    compiled(known, region(constant=constant.clone()))
    compiled(known, region(constant=constant), keeps_order=True)
    assert inductor.calls == 3


def test_an_argument_that_cannot_be_compared_is_compiled_each_time(inductor: Counted):
    known = CompiledRegions()
    for _ in range(2):
        gm = region()
        next(iter(gm.graph.find_nodes(op="call_function", target=SCALAR))).kwargs = {"mark": object()}
        compiled(known, gm)
    assert inductor.calls == 2


def regions_compiled(directory: str) -> tuple[int, int, list[float]]:
    """Compile a step by Inductor itself; return misses and hits of the cache on disk."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    counters.clear()
    with (
        patch.object(program, "INDUCTOR_DEVICES", ("cpu",)),
        inductor_config.patch(QUICK),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Inductor's own
        model = JOBS["mlp"].build()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = fxcomp.compile_step(model, cross_entropy, optimizer, JOBS["mlp"].batch(0, rank), compress="dense")
        losses = [float(step(JOBS["mlp"].batch(number, rank))) for number in range(2)]
        step.close()
    found = counters["inductor"]
    return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], losses


@pytest.mark.slow
def test_ranks_of_a_machine_compile_a_region_once_among_them_and_later_jobs_compile_none(tmp_path: Path):
    first = run_ranks(2, regions_compiled, str(tmp_path))
    regions = first[0][0] + first[0][1]
    assert regions > 0
    assert sum(misses for misses, _, _ in first) == regions, "each was compiled by one of the ranks"
    second = run_ranks(2, regions_compiled, str(tmp_path))
    assert [(misses, hits) for misses, hits, _ in second] == [(0, regions)] * 2
    assert [losses for _, _, losses in first] == [losses for _, _, losses in second]


def test_a_lock_keeps_others_out_until_it_is_left_and_none_is_needed_where_no_file_can_be_made(tmp_path: Path):
    with compat.alone_on_this_machine(tmp_path / "locks" / "one"):
        (child := os.fork()) or os._exit(0)  # a forked process has the file open until it ends
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not can_lock(tmp_path / "locks" / "one")
    assert can_lock(tmp_path / "locks" / "one")
    (tmp_path / "a file").write_text("")
    with compat.alone_on_this_machine(tmp_path / "a file" / "one"), compat.alone_on_this_machine(None):
        pass


def can_lock(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
