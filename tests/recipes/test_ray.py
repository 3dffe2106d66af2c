"""Ray Train runs a compiled step on two workers, and goes on from its checkpoint bit for bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.recipes import RECIPES, ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

MAIN = """
import sys

import ray, with_ray

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
for folder, steps in (("straight", 40), ("resumed", 20), ("resumed", 40)):
    result = with_ray.main(f"{sys.argv[1]}/{folder}", steps, compress="powersgd(2)")
    print(folder, result.metrics["steps"], result.checkpoint.path, flush=True)
"""


WRAPPED = """
import sys

import ray, ray.train.torch, with_ray
import torch

import fxcomp

out = sys.argv[1] + "/said"


def train_loop_per_worker(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        fxcomp.compile_step(model, with_ray.loss_fn, optimizer, with_ray.batch_at(0, 0))
    except fxcomp.FxcompError as error:
        said = f"{type(error).__name__}: {error}"
    hook = fxcomp.ddp_hook(compress="int8")
    model.register_comm_hook(None, hook)
    for step in range(8):
        with_ray.loss_fn(model, with_ray.batch_at(step, 0)).backward()
    if ray.train.get_context().get_world_rank() == 0:
        with open(out, "w") as file:
            print(said, hook.plan.is_dense, sep="\\n", file=file)


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
with_ray.train_loop_per_worker = train_loop_per_worker
with_ray.main(sys.argv[1], 8)
"""


def under_ray(script: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(RECIPES))),
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_a_prepared_model_takes_the_hook_and_no_compiled_step(tmp_path: Path):
    under_ray(WRAPPED, tmp_path)
    output = (tmp_path / "said").read_text()
    assert "Unsupported: the model is wrapped by torch.nn.parallel.distributed.DistributedDataParallel" in output
    assert output.endswith("False\n"), "int8 is no dense plan"


@pytest.mark.slow
def test_workers_go_on_from_a_checkpoint_bit_for_bit(tmp_path: Path):
    output = under_ray(MAIN, tmp_path)
    ends = [line.split(" ", 2) for line in output.splitlines() if line.startswith(("straight", "resumed"))]
    assert [(name, steps) for name, steps, _ in ends] == [("straight", "40"), ("resumed", "20"), ("resumed", "40")]
    straight, _, resumed = (Path(path) for *_, path in ends)
    names = sorted(path.name for path in straight.iterdir() if path.suffix == ".pt")
    assert names == ["model.pt", "step-rank0.pt", "step-rank1.pt"]
    one, other = (torch.load(folder / "model.pt", weights_only=True)["model"] for folder in (straight, resumed))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    for name in names[1:]:
        one, other = (torch.load(folder / name, weights_only=True) for folder in (straight, resumed))
        assert any(".residuals." in key for key in one)
        assert all(torch.equal(value, other[key]) for key, value in one.items())
