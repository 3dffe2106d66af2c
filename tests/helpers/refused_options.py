"""Refusals of jobs, options and folders, and what their advice makes of each; one rank, in a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fxcomp
from fxcomp.capture.backward_graph import _check_parameter
from fxcomp.frontends.average_replicas import _check_module
from fxcomp.frontends.backend_options import read_options
from fxcomp.frontends.ddp_hook import _wrapped
from fxcomp.frontends.job import load_job
from fxcomp.frontends.what_if import WhatIf
from fxcomp.options import StepOptions
from fxcomp.state.checkpoint import read_checkpoint
from helpers.advised import Row, small

JOB, OPTIONS, FOLDER = "frontends/job.py", "frontends/backend_options.py", "state/checkpoint.py"

TEXT = """
import torch, fxcomp
from torch import nn

def job():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxcomp.Job(model, lambda m, x: m(x).square().mean(), optimizer, torch.ones(4, 3))

def nothing():
    return 3
"""


def written(name: str = "train.py") -> Path:
    path = Path(name).absolute()
    path.write_text(TEXT)
    sys.modules.pop(path.stem, None)
    return path


def loads(name: str, function: str) -> Any:
    return lambda: load_job(f"{written(name)}:{function}")


def trained() -> None:
    """Train the job of a file."""
    job = load_job(f"{written()}:job")
    assert job.loss_fn is not None
    step = fxcomp.compile_step(job.model, job.loss_fn, job.optimizer, job.batch)
    assert step(job.batch) > step(job.batch)


def options(**given: Any) -> Any:
    return lambda: read_options(given, {})


def model() -> torch.nn.Module:
    return small()


def sharded(**facts: bool) -> Any:
    """Check what stands for a module of fully_shard, which needs ranks."""
    module: Any = SimpleNamespace(name="layer", **{"divides_afterwards": False, "offloads": False, **facts})
    return lambda: _check_module(module)


OPTIONS_ROWS = {
    "a divisor of its own": Row("has a divisor of its own", sharded(divides_afterwards=True), sharded()),
    "parameters on the host": Row("offloads its parameters", sharded(offloads=True), sharded()),
    "a hook without a model": Row("cannot find the model", lambda: _wrapped(None, StepOptions())),
    "a sharded parameter": Row(
        "only plain tensors can be trained",
        lambda: _check_parameter("weight", nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))),
        lambda: _check_parameter("weight", nn.Parameter(torch.ones(2))),
    ),
    "no file": Row(
        "Write it as path/to/file.py:function", lambda: load_job("nowhere.py:job"), trained, at=f"{JOB}::load_job"
    ),
    "no such function": Row("or name another one after the colon", loads("train.py", "jobs"), trained),
    "no job": Row("Return fxcomp.Job(model, loss_fn, optimizer, batch)", loads("train.py", "nothing"), trained),
    "no Python": Row("not a Python file", loads("train.txt", "job"), trained),
    "a mode": Row(
        "Write fxcomp.compile_model(model",
        lambda: read_options({}, {"mode": "max-autotune"}),
        options(compress="balanced", model=model()),
    ),
    "an option of steps": Row("or leave it out", options(max_grad_norm=1.0), options()),
    "an option that is none": Row(
        "; did you mean ", options(compres="int8"), options(compress="int8"), at=f"{OPTIONS}::read_options"
    ),
    "a model that is none": Row("must be the module that is compiled", options(model=3), options(model=model())),
    "ignored without a model": Row(
        "needs options['model'] to find them in", options(ignore=["0.bias"]), options(ignore=["0.bias"], model=model())
    ),
    "ignored as a text": Row(
        "is a list of parameter names",
        options(ignore="0.bias", model=model()),
        options(ignore=["0.bias"], model=model()),
    ),
    "an ignored name": Row(
        "which is no parameter of the model; did you mean",
        options(ignore=["0.bia"], model=model()),
        options(ignore=["0.bias"], model=model()),
    ),
    "Inductor": Row("leave it out for the default", options(inductor="yes"), options()),
    "no module in no_sync": Row(
        "takes the model that was compiled",
        lambda: fxcomp.no_sync(small).__enter__(),
        lambda: fxcomp.no_sync(small()).__enter__(),
    ),
    "a path that is none": Row("takes the path of a folder", lambda: read_checkpoint(3)),
    "half a checkpoint": Row("holds no whole checkpoint", lambda: read_checkpoint(Path.cwd())),
    "micro-batches": Row("1 or more", WhatIf(accumulate=0).check, WhatIf(accumulate=1).check),
    "the time of a step": Row(
        "is how long a step takes without a network", WhatIf(step_ms=0.0).check, WhatIf(step_ms=1.0).check
    ),
    "a device with costs": Row(
        "keep one",
        lambda: WhatIf(device="h100", costs=fxcomp.CostTable()).check(),
        lambda: WhatIf(costs=fxcomp.CostTable()).check(),
    ),
}
