"""Import and compile once what every rank would: ranks are forked from a process that has imported this file."""

from __future__ import annotations

import gc
import threading

import plans
import planted
import ranks
import replicas
import small_step
import torch
import torch.distributed
from jobs import JOBS, OPTIMIZERS, cross_entropy

import fxcomp

torch.set_num_threads(1)
_USED_BY_TESTS = planted, plans, ranks, replicas, small_step
_job = JOBS["mlp"]
_model = _job.build()
_step = fxcomp.compile_step(_model, cross_entropy, OPTIMIZERS["sgd"](_model.parameters()), _job.batch(0))
_step(_job.batch(0))
_step.close()
torch._dynamo.reset()
del _step, _model, _job
gc.collect()
gc.freeze()  # what the collector does not touch, ranks share
assert threading.active_count() == 1, "a thread is lost when a process forks"
