"""Capture the whole training step: forward, backward and the user's own optimizer, as one flat FX graph.

    loss_fn(model, batch) ─make_fx─► forward and backward, functionalized ─┐
    optimizer.step()      ─make_fx─► one small in-place graph a parameter  ├─► one graph; inputs and gradients labelled
    clip_grad_norm_       ─────────► norm, coefficient, scaled gradients  ─┘

The optimizer stays in place, right after its gradient: no copies of parameters. Numbers that schedulers change (the
learning rate, momenta, betas, weight decay) are inputs of the graph, so that they stay live without another capture.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from fxcomp.capture.assemble import assemble
from fxcomp.capture.forward_backward import Outputs, check_forward_backward, trace_forward_backward
from fxcomp.capture.optimizer import check_optimizer
from fxcomp.capture.same_with_numbers import same_with_numbers
from fxcomp.capture.shared_memory import check_written
from fxcomp.capture.step_inputs import FIXED_SIZES, StepInputs, Varying
from fxcomp.capture.tensor_kind import check_model
from fxcomp.capture.training import Training
from fxcomp.errors import CaptureFailed
from fxcomp.gc_paused import gc_paused
from fxcomp.graph.captured import Captured


@gc_paused()
def capture(training: Training, batch: Any, varying: Varying = FIXED_SIZES) -> Captured:
    """Trace one training step on fake tensors; nothing of the user's is changed.

    Outputs of the graph: the loss, then the auxiliary results; buffers and parameters change in place. Raises
    CaptureFailed where sizes cannot vary.
    """
    for optimizer in training.optimizers:
        check_optimizer(optimizer)  # its options may have changed since the first capture
    check_model(training.model)  # buffers may be others than at first
    inputs = StepInputs(training, batch, varying)
    body, outputs = trace_forward_backward(training, inputs)
    if varying:
        if not inputs.symbols:
            raise CaptureFailed("the step makes a number of every size that varies; it is captured for each size alone")
        _check_symbols(body, outputs, *trace_forward_backward(training, StepInputs(training, batch, FIXED_SIZES)))
    check_forward_backward(body, training.model)
    check_written(body, inputs.named)
    return assemble(body, outputs, training, inputs)


def _check_symbols(body: GraphModule, outputs: Outputs, plain: GraphModule, told: Outputs) -> None:
    """Refuse symbols where the step is another one with them. Raises CaptureFailed: numbers do."""
    if not same_with_numbers(body, outputs.results_of(body), plain, told.results_of(plain)):
        raise CaptureFailed(
            "the step treats sizes that are symbols in another way than numbers, by their type or as text.\n"
            "  It can be captured for each size alone."
        )
