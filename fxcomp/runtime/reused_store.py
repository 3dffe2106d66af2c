"""Refuse a store that an earlier start of the job has left."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from fxcomp import compat
from fxcomp.errors import StoreReused

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def check_store(store: Any) -> None:
    """Refuse what an earlier start of the job has left: ranks would take its answers for those of today."""
    if compat.is_of_another_process(store):
        raise StoreReused(
            f"rank {dist.get_rank()} was another process in this store before: ranks would read what it answered then,"
            " and process groups find addresses that are gone.\n"
            f"  Start torchrun with {OWN_STORE} in its environment: each start then has a store of its own."
        )
    if (what := compat.outlives_restarts()) and dist.get_rank() == 0:
        warnings.warn(
            f"{what} starts dead ranks again with the store that they had: process groups may then find addresses that"
            f" are gone, whoever makes them, and fxcomp refuses.\n  Start torchrun with {OWN_STORE} set.",
            stacklevel=2,
        )
