"""Process groups over NCCL, in a model of it: who takes part where one is made, and what is aborted at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import nccl
from helpers.ranks import run_ranks, try_ranks
from torch import nn

import fxcomp
from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.runtime.members import Members
from fxcomp.runtime.transport import Groups

TWO_BY_TWO = {"intra": [[0, 1], [2, 3]], "inter": [[0, 2], [1, 3]], "world": [[0, 1, 2, 3]]}


# The model


def make(ranks: list[int], backend: str | None, callers: list[int]) -> list[Any]:
    """Make a group on some ranks; returns how often the default communicator was split, and what was made."""
    with nccl.job_over("nccl", bound=True):
        group = dist.new_group(ranks, backend=backend) if dist.get_rank() in callers else None
        whole, *others = nccl.made
        is_member = group is not None and dist.get_rank() in ranks
        return [whole.splits, [each.is_split for each in others], dist.get_backend(group) if is_member else None]


def test_a_bound_default_group_is_split_by_all_ranks_for_a_group_of_some():
    found = run_ranks(3, make, [0, 1], None, [0, 1, 2])
    assert found == [[1, [True], "nccl"]] * 2 + [[1, [], None]]


def test_ranks_that_never_call_it_leave_members_waiting():
    found = try_ranks(3, make, [0, 1], None, [0, 1], grace_s=3)
    assert [each.error for each in found[:2]] == ["Hang", "Hang"]
    assert "split 0 of the communicator of 3 ranks, for group 1: not rank 2" in found[0].text


@pytest.mark.slow
def test_members_of_a_gloo_group_leave_the_others_waiting():
    found = try_ranks(3, make, [0, 1], "gloo", [0, 1, 2], grace_s=0)
    assert [each.error for each in found[2:]] == ["Hang"]
    assert "for a group of other ranks: not rank 0" in found[2].text


def unbound() -> list[int]:
    with nccl.job_over("nccl"):
        dist.new_group([0, 1], backend="gloo")
        if dist.get_rank() < 2:
            dist.new_group([0, 1])
        return [each.splits for each in nccl.made]


def test_an_unbound_default_group_is_never_split():
    assert run_ranks(3, unbound) == [[0, 0], [0, 0], [0]]


# Over it


def all_ranks_make_groups() -> list[int]:
    with nccl.job_over("nccl", bound=True):
        groups = Groups.create(TWO_BY_TWO, ["main", "pool"], ["intra", "inter"])
        splits = nccl.made[0].splits
        assert compat.default_group().bound_device_id == nccl.DEVICE
        groups.give_up()
    return [splits, len(nccl.made)]


def test_hosts_of_several_ranks_make_groups_of_a_bound_job():
    assert run_ranks(4, all_ranks_make_groups) == [[0, 4]] * 4


def members_make_groups() -> str:
    with nccl.job_over("nccl", bound=True):
        of_hosts = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # the user's own, made on all ranks
        if dist.get_rank() % 2:
            return "elsewhere"
        members = Members.of(of_hosts[0])
        groups = Groups.create(members.levels({"world": [[0, 1]]}), ["main", "pool"], ["world"], members, 1000)
        return "made" if groups.place("world") == members.place else "misplaced"


def test_members_of_a_bound_job_make_groups_by_themselves():
    assert run_ranks(4, members_make_groups) == ["made", "elsewhere", "made", "elsewhere"]


def fail_to_make_a_group() -> tuple[str, bool]:
    with nccl.job_over("nccl", bound=True):
        with pytest.raises(ValueError, match="out of range") as raised:
            compat.new_group([0, 7], None, nccl.PATIENCE, None)
        return str(raised.value), compat.default_group().bound_device_id == nccl.DEVICE


def test_a_group_that_cannot_be_made_leaves_the_job_bound():
    assert all(is_bound for _, is_bound in run_ranks(2, fail_to_make_a_group))


def give_up_over(backend: str | None, cpu: bool) -> list[Any]:
    with nccl.job_over(backend, processor_is_accelerator=cpu):
        groups = Groups.create({"world": [[0, 1]]}, ["main", "pool"], ["world"])
        is_direct = [groups._groups["world", lane].is_direct for lane in ("main", "pool")]
        groups.give_up()
    return [*is_direct, *(each.was_aborted for each in nccl.made)]


@pytest.mark.parametrize(
    ("backend", "direct", "cpu"),
    [("nccl", False, False), ("cpu:gloo,cuda:nccl", True, False), (None, False, True)],
    ids=["named", "by device", "undefined"],
)
def test_what_is_under_way_over_nccl_is_aborted_whatever_the_backend_is_called(
    backend: str | None, direct: bool, cpu: bool
):
    """The job's own communicator, made first, is left alone."""
    assert run_ranks(2, give_up_over, backend, cpu) == [[direct, True, False, True]] * 2


# Whole steps


def train_bound(members: list[int] | None) -> list[float]:
    with nccl.job_over("nccl", bound=True, processor_is_accelerator=True):
        group = None if members is None else dist.new_group(members)
        if members is not None and dist.get_rank() not in members:
            return []
        torch.manual_seed(0)
        model, batch = nn.Linear(8, 4), torch.ones(2, 8) * dist.get_rank()
        step = fxcomp.compile_step(
            model,
            lambda model, batch: model(batch).square().mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            batch,
            costs=CostTable(),
            process_group=group,
            cluster=fxcomp.Cluster.parse("2x2, inter 25gbit@8us, intra 100gbit") if group is None else None,
            compress="compress(int8)@pool > all_gather@world > decompress@pool",
        )
        losses = [float(step(batch)) for _ in range(3)]
        step.close()
        return losses


@pytest.mark.one_in(3)
@pytest.mark.parametrize("members", [None, [0, 2]], ids=["all ranks", "some"])
def test_a_bound_job_trains_with_offloaded_work(members: list[int] | None):
    found = run_ranks(4, train_bound, members)
    for rank in members or range(4):
        assert len(found[rank]) == 3
        assert found[rank][-1] < found[rank][0] or rank == 0
