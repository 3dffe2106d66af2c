"""Train a model compiled and eagerly, from the same seed, and compare every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxcomp


def trains_as_eager(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batches: Sequence[Any]
) -> fxcomp.CompiledStep:
    """Assert that losses, parameters, buffers and the generator's state are eager's after each step."""
    reference = copy.deepcopy(model)
    optimizer, eager = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    step = fxcomp.compile_step(model, loss_fn, optimizer, batches[0], compress="dense")
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss: Tensor = step(batch)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        eager.zero_grad()
        expected = loss_fn(reference, batch)
        expected.backward()
        eager.step()
        assert torch.equal(loss, expected), f"the loss of step {number}"
        assert torch.equal(drawn, torch.get_rng_state()), f"what step {number} drew"
        for name, value in model.state_dict().items():
            assert torch.equal(value, reference.state_dict()[name]), f"{name} after step {number}"
    return step
