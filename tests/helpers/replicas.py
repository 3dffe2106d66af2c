"""Compare the replicas of a model that ranks hold."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxcomp import compat


def replica_fingerprint(model: nn.Module) -> str:
    """Digest the bits of all parameters and floating-point buffers."""
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    flat = (t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors)  # NumPy knows no bf16
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in flat)).hexdigest()


def flat_parameters(model: nn.Module) -> Tensor:
    """Copy all parameters into one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def everyone(topic: str, value: Any) -> list[Any]:
    """Return every rank's value, whatever has become of process groups."""
    store, ranks = compat.default_store(), range(dist.get_world_size())
    store.set(f"test/{topic}/{dist.get_rank()}", json.dumps(value))
    store.wait([f"test/{topic}/{rank}" for rank in ranks], timedelta(seconds=60))
    return [json.loads(store.get(f"test/{topic}/{rank}")) for rank in ranks]
