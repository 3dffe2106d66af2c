"""A model of NCCL's process groups: who must take part when one is made, and what backends are called.

    with job_over("nccl", bound=True):        the job's default group, bound to a device
        dist.new_group([0, 1])                ranks 0 and 1 split the default communicator, 2 and 3 without a colour

torch's own code makes the groups; `Communicator` stands where it calls NCCL. A split is a collective of all ranks of
the parent: one that is left alone in it raises `Hang` and names who did not come. Values travel by gloo, so a group
also meets its members when it is made, as NCCL does where it connects eagerly. A reduce changes the root's tensor only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from fxcomp import compat

c10d = cast("Any", dist.distributed_c10d)

PATIENCE = timedelta(seconds=4)
"""A rank waits so long for the others of its communicator."""

DEVICE = torch.device("cuda", 0)

made: list[Communicator] = []
"""All of this process, in the order in which they were made."""


class Hang(RuntimeError):
    """A rank would wait for ever."""


@dataclass
class Options:
    """The fields that torch writes into ProcessGroupNCCL.Options."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = PATIENCE
    split_from: Communicator | None = None
    split_color: int = 0
    global_ranks_in_group: Sequence[int] = field(default_factory=list[int])
    group_name: str = ""


class Communicator(ProcessGroupGloo):
    """Stands for ProcessGroupNCCL, as far as groups go."""

    Options = Options
    supports_splitting = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.name_, self.store, self.given = options.group_name, store, options
        self.splits = 0
        """The number of times that this rank has taken part in a split of it."""
        self.is_split = self.was_aborted = False
        made.append(self)  # torch would make another Python object for the same backend

    def name(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect at once: by a split of the parent, where there is one, else through the store, members alone."""
        assert device == DEVICE
        if self.given.split_from is not None:
            self.given.split_from._split(f"for group {self.name_}")
            self.is_split = True

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split for others."""
        assert device == DEVICE
        self._split("for a group of other ranks")

    def abort(self) -> None:
        self.was_aborted = True

    def _split(self, purpose: str) -> None:
        number, self.splits = self.splits, self.splits + 1
        self.store.set(f"split/{number}/{self.rank()}", purpose)
        for rank in range(self.size()):
            try:
                self.store.wait([f"split/{number}/{rank}"], PATIENCE)
            except RuntimeError:
                where = f"split {number} of the communicator of {self.size()} ranks"
                raise Hang(f"{where}, {purpose}: not rank {rank}") from None


def _reduce_to(plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Tensor, dst: int, **keywords: Any) -> Any:
        return plain(tensor if dist.get_rank() == dst else tensor.clone(), dst, **keywords)

    return reduce


_inits = 0


@contextmanager
def job_over(backend: str | None, *, bound: bool = False, processor_is_accelerator: bool = False) -> Iterator[None]:
    """Initialise the default group again on all ranks, by this backend string, and put back the one before at the end.

    `processor_is_accelerator` gives tensors on the CPU to NCCL, too, so that steps run.
    """
    global _inits
    store = c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    devices = ["cuda", "cpu"] if processor_is_accelerator else ["cuda"]
    backends = c10d.Backend

    def start(backend: str | None) -> None:
        global _inits
        _inits += 1
        fresh = dist.PrefixStore(f"again/{_inits}", store)
        fresh.set(f"here/{rank}", "")
        fresh.wait([f"here/{other}" for other in range(size)])  # some may still be connecting to the group before
        dist.destroy_process_group()
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=timedelta(seconds=60))

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(c10d, "is_nccl_available", lambda: True))
        enter(patch.object(c10d, "ProcessGroupNCCL", Communicator, create=True))
        enter(patch.dict(backends.backend_capability, {"nccl": devices}))
        enter(patch.object(dist, "reduce", _reduce_to(dist.reduce)))
        if processor_is_accelerator:
            enter(patch.dict(backends.default_device_backend_map, {"cpu": "nccl"}))
        start(backend)
        if bound:  # init_process_group(device_id=...) asks for an accelerator, then does this
            group = compat.default_group()
            group.bound_device_id = DEVICE
            group._get_backend(DEVICE).eager_connect_single_device(DEVICE)
        yield
    start("gloo")
