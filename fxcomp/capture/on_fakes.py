"""Run the user's Python on traced tensors, and leave everything of the user's as it was.

parameters and buffers   traced stand-ins, tied ones in every place; a buffer that is replaced is written back
everything else          tensors that are kept are taken out again, and refused by name
random, numpy.random     their states are put back; drawing is refused
"""

# Tables of a module's tensors are private, and have no public way in.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxcomp import errors
from fxcomp.capture.reach.draws import Draws
from fxcomp.capture.reach.keep import Before
from fxcomp.capture.reach.walk import walk

Table = dict[str, Any]


@contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any]) -> Generator[None]:
    """Leave everything that Python can reach as it was, and refuse a trace that keeps tensors or draws with Python.

    Around the whole trace: inside it, copies of tensors would be part of it.
    """
    reach = walk(model, {"loss_fn": loss_fn})
    before, draws = Before(reach), Draws(reach)
    kept: list[str] = []
    moved: list[str] = []
    try:
        yield
    finally:
        kept, moved = before.put_back(), draws.put_back()
    if moved:
        _refuse_draws(moved, draws.line(moved))
    if kept:
        raise errors.CaptureFailed(
            f"the forward pass stores a tensor in {kept[0]!r}, which a compiled step would not do again.\n"
            "  Register it as a buffer, or return it beside the loss: (loss, aux). If the model only sets itself up at"
            " its first call, call it once before compile_step."
        )


def _refuse_draws(moved: Sequence[str], line: str) -> None:
    raise errors.DrawsInPython(
        f"the loss function or a forward pass draws from {' and '.join(moved)}{f', at {line}' if line else ''}: a"
        " compiled step does not run that Python again, and would repeat today's numbers for ever.\n"
        "  Draw outside and pass the numbers in the batch, as tensors; or draw with torch.rand, and select with"
        " torch.where."
    )


@contextmanager
def swapped(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Generator[None]:
    """Put traced tensors in place of the model's parameters and buffers, by the id of what they stand for."""
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
    """A forward pass may put a new tensor in place of a buffer; the graph writes it into the buffer that is there."""
    with torch.no_grad():
        for table, original in held:
            for name, tensor in original.items():
                new = table.get(name)
                if new is not tensor and isinstance(new, Tensor) and isinstance(tensor, Tensor):
                    tensor.copy_(new)


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent layers keep their weights a second time, in a list."""
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names  # pyright: ignore[reportUnknownMemberType]  # a bare list
        module._flat_weights = [getattr(module, name) for name in names]
