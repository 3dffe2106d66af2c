"""Training job: model, loss, optimizer and batch. The command line and benchmarks load one from a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxcomp import compat
from fxcomp.capture.optimizer import GivenOptimizers
from fxcomp.errors import BadOption
from fxcomp.plan.compress import GivenCompress


@dataclass(frozen=True)
class Job:
    """Training job of one rank.

    `model`, `loss_fn`, `optimizer`, `batch` (as example_batch), `max_grad_norm`, `max_grad_value` and `scaler` are
    arguments of `compile_step`. `compress` is the default of `--compress` in `fxcomp explain` and `fxcomp dump`.
    `next_batch(step, rank)` returns the batches of a real run; by default, `batch` is repeated.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: GivenOptimizers
    batch: Any
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    next_batch: Callable[[int, int], Any] | None = None
    compress: GivenCompress = "balanced"
    scaler: torch.amp.GradScaler | None = None

    @property
    def bare(self) -> Job:
        """Copy of this job with an unwrapped `model`. The copy's `loss_fn` still calls the wrapped model."""

        def loss_fn(_: nn.Module, batch: Any) -> torch.Tensor:
            return self.loss_fn(self.model, batch)

        model = compat.unwrapped(self.model)
        return self if model is self.model else replace(self, model=model, loss_fn=loss_fn)

    def batch_at(self, step: int, rank: int) -> Any:
        """Return the batch of a `step` on a `rank`."""
        return self.batch if self.next_batch is None else self.next_batch(step, rank)


def compile_arguments(job: Job) -> dict[str, Any]:
    return {
        "model": job.model,
        "loss_fn": job.loss_fn,
        "optimizer": job.optimizer,
        "example_batch": job.batch,
        "max_grad_norm": job.max_grad_norm,
        "max_grad_value": job.max_grad_value,
        "scaler": job.scaler,
    }


def load_job(text: str) -> Job:
    """Call a function in a file, given as `path.py:function` (default `:job`), and return its Job.

    The file runs again at each call. It can import modules from its folder.
    """
    path_text, function_name = file_and_function(text)
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise BadOption(f"cannot load {text!r}: there is no file {path_text!r}. Write it as path/to/file.py:function.")
    function = getattr(_run_file(path), function_name, None)
    if not callable(function):
        raise BadOption(
            f"cannot load {text!r}: {path.name} has no function {function_name!r}.\n"
            f"  Define  def {function_name}() -> fxcomp.Job:  there, or name another one after the colon."
        )
    job = function()
    if not isinstance(job, Job):
        raise BadOption(
            f"{text!r} returned {type(job).__name__}, not a Job.\n"
            f"  Return fxcomp.Job(model, loss_fn, optimizer, batch) from {function_name}()."
        )
    return job


def file_and_function(text: str) -> tuple[str, str]:
    path, colon, function = text.rpartition(":")
    return (path, function) if colon and not function.endswith(".py") else (text, "job")


def _run_file(path: Path) -> ModuleType:
    name = f"fxcomp_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadOption(f"cannot load {str(path)!r}: not a Python file. Write it as path/to/file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up here
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
