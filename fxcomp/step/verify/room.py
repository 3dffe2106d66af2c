"""Whether a device holds a verified step: what eager PyTorch needs beside what the compiled step does."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fxcomp import compat
from fxcomp.capture.training import Training

MARGIN = 1.1
"""Allocators round up (assumed)."""


def needed_bytes(training: Training, batch: Any) -> int:
    """What is held while the compiled step runs: one set of gradients, buffers twice, the batch, the largest parameter
    with its state. The eager pass itself, which is over by then, needs what a step needs at its peak.
    """
    gradients = [owner.parameter.nbytes for owner in training.owned]
    buffers = sum(buffer.nbytes for buffer in training.model.buffers())
    leaves = sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    states_at_once = 12  # before, expected, and what comparing them makes
    return int(MARGIN * (sum(gradients) + 2 * buffers + leaves + states_at_once * max(gradients)))


def has_room(training: Training, batch: Any) -> bool:
    """Whether that fits beside the largest step so far; yes where nobody knows."""
    spare = compat.spare_bytes(training.device)
    return spare is None or spare >= needed_bytes(training, batch)
