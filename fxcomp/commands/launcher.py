"""Join the ranks that a launcher such as torchrun has started, as the environment's variables say."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fxcomp.cluster.limits import MOST_RANKS
from fxcomp.errors import BadOption

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "  Start every rank with torchrun, which sets these variables; to measure this machine alone: unset RANK WORLD_SIZE"
)


@contextmanager
def launched_ranks() -> Generator[None]:
    """Form the process group of the launcher's ranks; without a launcher do nothing.

    Raises BadOption for an environment that no launcher makes, and if the ranks do not meet.
    """
    local_rank = _local_rank()
    if local_rank is None:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise BadOption(
            f"the ranks did not meet at MASTER_ADDR:MASTER_PORT, {where}: {str(error).partition(chr(10))[0]}\n{_CURE}"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def _local_rank() -> int | None:
    """Read this rank's number on its host; None without a launcher. Raises BadOption naming the variables at fault."""
    values = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    said = " and ".join(f"{name}={values[name]}" for name in ("RANK", "WORLD_SIZE") if name in values)
    if not said:
        return None
    missing = [name for name in _VARIABLES if name not in values]
    if missing:
        raise BadOption(f"the environment has {said}, as of a launcher, but not {', '.join(missing)}.\n{_CURE}")
    world_size = _variable("WORLD_SIZE", 1, MOST_RANKS)
    _variable("RANK", 0, world_size - 1)
    _variable("MASTER_PORT", 1, 65535)
    if not values["MASTER_ADDR"].strip():
        raise BadOption(f"MASTER_ADDR is empty; it names the host of rank 0.\n{_CURE}")
    most = torch.cuda.device_count() if torch.cuda.is_available() else MOST_RANKS
    return _variable("LOCAL_RANK", 0, most - 1) if "LOCAL_RANK" in os.environ else 0


def _variable(name: str, least: int, most: int) -> int:
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadOption(
            f"{name}={text[:40]!r} in the environment must be a whole number from {least} to {most}.\n{_CURE}"
        )
    return value
