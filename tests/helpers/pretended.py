"""Treat the CPU as an accelerator: steps are rewritten as for a device, and run here."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from fxcomp import compat


@contextmanager
def as_accelerator() -> Generator[None]:
    """Let every device be one that is handed its work."""
    before = compat.is_accelerator
    compat.is_accelerator = _always
    try:
        yield
    finally:
        compat.is_accelerator = before


def _always(_: torch.device) -> bool:
    return True
