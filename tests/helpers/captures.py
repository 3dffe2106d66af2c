"""Whole steps of the jobs, captured."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxcomp.capture.fake_mode import FIXED_SIZES, Varying
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph.captured import Captured
from helpers.jobs import OPTIMIZERS, cross_entropy


def captured(
    model: nn.Module,
    batch: Any,
    optimizer: Any = "sgd",
    loss: Any = cross_entropy,
    *,
    max_grad_norm: float | None = None,
    varying: Varying = FIXED_SIZES,
) -> Captured:
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return capture(Training.of(model, loss, optimizer, max_grad_norm), batch, varying)
