"""A job with other parallel dimensions: ranks of one group average with each other, and with nobody else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadCall, BadOption, ReplicasDiffer

STEPS = 4
PLAN = "int8"


def model_of(line: int) -> nn.Module:
    """Each line of the mesh trains a model of its own."""
    torch.manual_seed(10 + line)
    return nn.Sequential(nn.Linear(6, 8 + line), nn.Tanh(), nn.Linear(8 + line, 3))


def batch_of(step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def train_in_lines(plan: str, columns: str) -> dict[str, Any]:
    """Two lines of a mesh of 2 x 2 compile and train at the same time; returns distances to DDP over the same group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    data = mesh["data"]
    line = dist.get_rank() // 2
    if columns == "strided":  # ranks 0 and 2, ranks 1 and 3
        data, line = mesh["other"], dist.get_rank() % 2
    model = model_of(line)
    eager = copy.deepcopy(model)
    step = fxcomp.compile_step(
        model,
        squares,
        sgd(model),
        batch_of(0),
        costs=CostTable(),
        process_group=data,
        compress=plan,
        checks=fxcomp.Checks(verify=1),
    )
    ddp = DistributedDataParallel(eager, process_group=data.get_group())
    optimizer = sgd(eager)
    for number in range(STEPS):
        step(batch_of(number))
        optimizer.zero_grad()
        squares(ddp, batch_of(number)).backward()
        optimizer.step()
    mine, neighbours = flat(model), [torch.empty(flat(model).numel()) for _ in range(2)]
    dist.all_gather(neighbours, mine, group=data.get_group())
    report = step.explain()
    step.close()
    return {
        "apart": float((mine - flat(eager)).abs().max()),
        "same": bool(torch.equal(*neighbours)),
        "report": report,
        "loss": float(squares(model, batch_of(0))),
    }


@pytest.mark.parametrize("columns", ["adjacent", "strided"])
@pytest.mark.parametrize("plan", ["dense", PLAN])
@pytest.mark.one_in(3)
def test_each_line_of_a_mesh_trains_as_under_ddp_over_its_group(plan: str, columns: str):
    found = run_ranks(4, train_in_lines, plan, columns)
    for rank, each in enumerate(found):
        assert each["same"], rank
        assert each["apart"] <= (0.0 if plan == "dense" else 1e-2), rank
    members = "0, 1" if columns == "adjacent" else "0, 2"
    said = " ".join(found[0]["report"].split())
    assert f"averaged over ranks {members} of the job's 4; the other ranks are left alone" in said
    assert len({each["loss"] for each in found}) > 1


def compile_backwards_in_lines() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    data, line = mesh["data"], dist.get_rank() // 2
    model = model_of(line)
    eager = copy.deepcopy(model)
    run = fxcomp.compile_model(model, "dense", costs=CostTable(), process_group=data)
    ddp = DistributedDataParallel(eager, process_group=data.get_group())
    pairs = [(run, sgd(model)), (ddp, sgd(eager))]
    for number in range(STEPS):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            module(batch_of(number)).square().mean().backward()
            optimizer.step()
    return {"apart": float((flat(model) - flat(eager)).abs().max())}


def test_the_backend_averages_over_a_group():
    assert [each["apart"] for each in run_ranks(4, compile_backwards_in_lines)] == [0.0] * 4


def fail_on_rank_3() -> str:
    group = dist.new_group([1, 3])
    model = model_of(0)
    if dist.get_rank() == 3:
        model = nn.Linear(6, 2)
    if dist.get_rank() in (0, 2):
        return "elsewhere"
    with pytest.raises(ReplicasDiffer) as raised:
        fxcomp.compile_step(model, squares, sgd(model), batch_of(0), costs=CostTable(), process_group=group)
    return str(raised.value)


def test_errors_name_ranks_by_the_jobs_numbers_and_ranks_outside_go_on():
    found = run_ranks(4, fail_on_rank_3)
    assert found[0] == found[2] == "elsewhere"
    assert found[1] == found[3]
    assert "rank 3 and rank 1 bring different steps" in found[1]


def pass_what_is_no_group() -> list[str]:
    said: list[str] = []
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    model = model_of(0)
    for given in (mesh, "data"):
        with pytest.raises(BadOption) as raised:
            fxcomp.compile_step(model, squares, sgd(model), batch_of(0), costs=CostTable(), process_group=given)
        said.append(str(raised.value))
    lone = [dist.new_group([rank]) for rank in range(2)]
    step = fxcomp.compile_step(
        model, squares, sgd(model), batch_of(0), costs=CostTable(), process_group=lone[dist.get_rank()]
    )
    step(batch_of(0))
    return said


def test_what_is_no_group_is_refused_and_a_group_of_one_trains_alone():
    for said in run_ranks(2, pass_what_is_no_group):
        assert "a mesh of 2 dimensions, outer, inner" in said[0]
        assert "mesh['outer']" in said[0]
        assert "it is a str" in said[1]


def test_a_group_without_torch_distributed_is_refused():
    model = model_of(0)
    with pytest.raises(BadCall, match="not initialised"):
        fxcomp.compile_step(model, squares, sgd(model), torch.zeros(5, 6), process_group="data")


def hook_in_columns() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    column = mesh["other"].get_group()
    trained: list[Tensor] = []
    for hook in (fxcomp.ddp_hook(costs=CostTable(), compress="dense"), None):
        model = model_of(dist.get_rank() % 2)
        ddp = DistributedDataParallel(model, process_group=column)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        optimizer = sgd(model)
        for number in range(8):
            optimizer.zero_grad()
            squares(ddp, batch_of(number)).backward()
            optimizer.step()
        trained.append(flat(model))
        if hook is not None:
            assert hook.plan is not None
            hook.close()
    return {"apart": float((trained[0] - trained[1]).abs().max()), "loss": float(trained[0].sum())}


def test_the_hook_averages_over_the_group_of_its_wrapper():
    found = run_ranks(4, hook_in_columns)
    assert [each["apart"] for each in found] == [0.0] * 4
    assert len({each["loss"] for each in found}) == 2
