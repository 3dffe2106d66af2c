"""Regions of plans to come are compiled beside steps that train; all ranks follow them at one step."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks
from helpers.torch_compiled import QUICK
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

import fxcomp
from fxcomp import compat
from fxcomp.codegen import compiled_regions, program

LAST = 40
"""No job here takes more steps."""


class Held:
    """Inductor, which compiles nothing, and in another thread waits until it may return."""

    def __init__(self, fails: bool) -> None:
        self.may_return, self.fails, self.threads = threading.Event(), fails, list[str]()

    def __call__(self, module: GraphModule, _: Any, *, keeps_order: bool) -> Callable[..., Any]:  # noqa: ARG002
        thread = threading.current_thread()
        self.threads.append(thread.name)
        if thread is not threading.main_thread():
            assert self.may_return.wait(60)
            if self.fails:
                raise ArithmeticError("no kernel was found")
        return lambda *inputs: module(*inputs)


def wait_for_regions(step: Any) -> None:
    coming = step._schedule._next
    for program_of in coming.programs if coming is not None else ():
        wait(program_of.under_way)


def trained_beside(compiled_by: int, fails: bool = False) -> dict[str, Any]:
    """Train while rank 1 compiles until after a step; what each step followed."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)
    dist.barrier()
    held, rank = Held(fails and dist.get_rank() == 1), dist.get_rank()
    with (
        patch.object(compat, "standalone_compile", held),
        patch.object(program, "INDUCTOR_DEVICES", ("cpu",)),
        patch.object(compiled_regions, "_key", lambda *_, **__: None),  # nothing is shared: all plans compile
    ):
        model = JOBS["mlp"].build()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = fxcomp.compile_step(model, cross_entropy, optimizer, JOBS["mlp"].batch(0, rank), compress="balanced")
        begun_with, followed, said, losses, error = set(held.threads), list[bool](), "", list[float](), ""
        try:
            for number in range(LAST):
                if number == (compiled_by if rank == 1 else 0):
                    held.may_return.set()
                    wait_for_regions(step)
                losses.append(float(step(JOBS["mlp"].batch(number, rank))))
                followed.append(not step.in_force.decision.is_provisional)
                said = said or (step.explain() if number == compiled_by - 1 else "")
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        held.may_return.set()
        bits = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
        step.close()
    return {
        "begun with": begun_with,
        "threads": set(held.threads),
        "followed": followed,
        "said": " ".join(said.split()),
        "losses": losses,
        "bits": bits,
        "error": error,
    }


@pytest.mark.parametrize(("compiled_by", "followed_from"), [(0, 10), (16, 17), (20, 25)])
def test_training_goes_on_until_all_ranks_have_compiled(compiled_by: int, followed_from: int):
    """After the plan is chosen in step 9, ranks ask after 10, 11, 13, 17, 25 and 41 steps."""
    found = run_ranks(2, trained_beside, compiled_by)
    for each in found:
        assert (each["error"], len(each["losses"])) == ("", LAST)
        assert each["begun with"] == {"MainThread"}, "compile_step returns a program that can run"
        assert any(name.startswith("fxcomp-regions") for name in each["threads"])
        if compiled_by:  # else a thread may need longer than a step
            assert each["followed"].index(True) == followed_from - 1
            assert "the regions of plans that come next are being compiled" in each["said"]
    assert found[0]["followed"] == found[1]["followed"]
    assert found[0]["bits"] == found[1]["bits"]


def test_a_region_that_cannot_be_compiled_ends_all_ranks_with_its_error():
    found = run_ranks(2, trained_beside, 16, True)
    for each in found:
        assert "no kernel was found" in each["error"]
        assert 16 < len(each["losses"]) < LAST
    assert found[0]["bits"] == found[1]["bits"]


def regions_compiled(directory: str) -> tuple[int, int, list[float]]:
    """Compile a step by Inductor itself; its misses and hits of the cache on disk."""
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
    found = copy.copy(counters["inductor"])
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
