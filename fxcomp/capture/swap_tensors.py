"""Put traced tensors in place of a model's parameters and buffers while its forward pass is traced.

Tied tensors are exchanged in every place. A buffer that the forward pass replaces is written back by the graph.
"""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Table = dict[str, Any]


@contextmanager
def swapped(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Generator[None]:
    """Exchange the model's parameters and buffers for traced tensors, given by the id of the real ones."""
    saved: list[tuple[Table, Table]] = []
    try:
        for module in model.modules():
            tables: list[Table] = [module._parameters, module._buffers]
            for table in tables:
                saved.append((table, dict(table)))
                for name, tensor in saved[-1][1].items():
                    if tensor is not None:
                        table[name] = stand_ins[id(tensor)]
            _refresh_flat_weights(module)
        held = [(table, dict(table)) for table, _ in saved]
        yield
        _write_back(held)
    finally:
        for table, original in saved:
            table.clear()
            table.update(original)
        for module in model.modules():
            _refresh_flat_weights(module)


def _write_back(held: Sequence[tuple[Table, Table]]) -> None:
    """Copy a tensor that the forward pass put in place of a buffer into the buffer that was there."""
    with torch.no_grad():
        for table, original in held:
            for name, tensor in original.items():
                new = table.get(name)
                if new is not tensor and isinstance(new, Tensor) and isinstance(tensor, Tensor):
                    tensor.copy_(new)


def _refresh_flat_weights(module: nn.Module) -> None:
    """Update the second list of weights that recurrent layers keep."""
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names  # pyright: ignore[reportUnknownMemberType]  # a bare list
        module._flat_weights = [getattr(module, name) for name in names]
