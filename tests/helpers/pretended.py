"""Treat the CPU as an accelerator: steps are rewritten as for a device, and run here."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.compressors import kernels
from fxcomp.compressors.triton import dispatch


@contextmanager
def as_accelerator() -> Generator[None]:
    """Let every device be one that is handed its work."""
    before = compat.is_accelerator
    compat.is_accelerator = _always
    try:
        yield
    finally:
        compat.is_accelerator = before


@contextmanager
def runs_triton(*patches: AbstractContextManager[Any]) -> Generator[None]:
    """Take the processor's tensors for the device's, under other patches too."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(kernels, "can_run_on", return_value=False))
        stack.enter_context(patch.object(dispatch, "can_run_on", return_value=True))
        for each in patches:
            stack.enter_context(each)
        yield


def mean_square(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The loss of what is rewritten."""
    return model(batch[0]).square().mean()


def _always(_: torch.device) -> bool:
    return True
