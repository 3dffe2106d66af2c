"""Import and compile once what every rank would: ranks are forked from a process that has imported this file.

Autograd never runs here. Its first backward pass starts a thread for each accelerator that this build of torch knows
of, which is there on fake tensors even without one; a fork does not take the threads along, so that no rank could
differentiate. The step is compiled with gradients that are written down.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

import fxcomp
from helpers import plans, planted, planted_on_devices, ranks, replicas, small_step
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy


def written_gradients(outputs: Sequence[Tensor], parameters: Sequence[Tensor], *_: Any, **__: Any) -> list[Tensor]:
    """Give each parameter a gradient, by operators of a backward pass."""
    rows, places, one = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), outputs[0].detach()
    log = torch.ops.aten.nll_loss_backward(one, rows, places, None, 1, -100, one + 2)
    soft = torch.ops.aten._log_softmax_backward_data(log, rows, 1, torch.float32)
    passed = torch.ops.aten.threshold_backward(soft, rows, 0).t().mm(rows).sum([0], keepdim=True).view(3)
    return [parameter.detach() * passed.sum() for parameter in parameters]


def warm_up() -> None:
    """Compile a step and run it, for what that imports and keeps."""
    job = JOBS["mlp"]
    model = job.build()
    no_engine = patch.object(torch.autograd.Variable, "_execution_engine", None)
    with no_engine, patch.object(torch.autograd, "grad", written_gradients):
        step = fxcomp.compile_step(
            model,
            cross_entropy,
            OPTIMIZERS["sgd"](model.parameters()),
            job.batch(0),
            checks=fxcomp.Checks(verify="never"),
        )
        step(job.batch(0))
    step.close()
    torch._dynamo.reset()


torch.set_num_threads(1)
_USED_BY_TESTS = planted, planted_on_devices, plans, ranks, replicas, small_step
warm_up()
symbolic_shapes.uninteresting_files()  # imports what each rank would on the first number that it traces
gc.collect()
gc.freeze()  # what the collector does not touch, ranks share
assert threading.active_count() == 1, "a thread is lost when a process forks"
