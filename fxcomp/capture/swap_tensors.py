"""Put traced tensors in place of a model's parameters and buffers while its forward pass is traced.

Tied tensors are exchanged in every place. A buffer that the forward pass replaces is written back by the graph, which
wants it to be as large and of the same dtype.
"""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxcomp.errors import CaptureFailed

Table = dict[str, Any]


@contextmanager
def swapped(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Generator[None]:
    """Exchange the model's parameters and buffers for traced tensors, given by the id of the real ones."""
    saved: list[tuple[Table, Table]] = []
    places: list[str] = []
    try:
        for place, module in _named_modules(model):
            tables: list[Table] = [module._parameters, module._buffers]
            for table in tables:
                saved.append((table, dict(table)))
                places.append(place)
                for name, tensor in saved[-1][1].items():
                    if tensor is not None:
                        table[name] = stand_ins[id(tensor)]
            _refresh_flat_weights(module)
        held = [(place, table, dict(table)) for place, (table, _) in zip(places, saved, strict=True)]
        yield
        _write_back(held)
    finally:
        for table, original in saved:
            table.clear()
            table.update(original)
        for module in model.modules():
            _refresh_flat_weights(module)


def _write_back(held: Sequence[tuple[str, Table, Table]]) -> None:
    """Copy a tensor that the forward pass put in place of a buffer into the buffer that was there."""
    with torch.no_grad():
        for place, table, original in held:
            for name in {**original, **table}:
                was, now = original.get(name), table.get(name)
                if now is was:
                    continue
                if was is None or now is None or _kind(was) != _kind(now):
                    raise _replaced(f"{place}.{name}".removeprefix("."), was, now)
                was.copy_(now)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _replaced(name: str, was: Tensor | None, now: Tensor | None) -> CaptureFailed:
    return CaptureFailed(
        f"the forward pass puts {_text(now)} where {name!r} was {_text(was)}: a compiled step writes into the buffers"
        " that it knows.\n"
        "  Keep a buffer's shape and dtype. If the model only sets itself up, let it do so before compile_step, by one"
        " forward pass of the longest batch."
    )


def _text(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))  # torch leaves its type open


def _refresh_flat_weights(module: nn.Module) -> None:
    """Update the second list of weights that recurrent layers keep."""
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names  # pyright: ignore[reportUnknownMemberType]  # a bare list
        module._flat_weights = [getattr(module, name) for name in names]
