"""The ranks that average gradients: the whole job, or one process group.

fxcomp numbers them from 0 in the group's order. torch.distributed and error messages use job (global) ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fxcomp import compat
from fxcomp.errors import BadCall, BadOption

Levels = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a process group, and this rank's index `place`."""

    numbers: tuple[int, ...]
    """Job rank of each member, in the group's order."""
    place: int
    job_ranks: int

    @classmethod
    def of(cls, group: Any = None) -> Members:
        """Return the members of a process group or a 1-D DeviceMesh; None is the whole job.

        Raises BadOption for anything else, and BadCall if this rank is not a member.
        """
        handle = _handle(group)
        me, job_ranks = dist.get_rank(), dist.get_world_size()
        numbers: tuple[int, ...] = tuple(dist.get_process_group_ranks(handle or dist.group.WORLD))
        if me not in numbers:
            raise BadCall(
                f"rank {me} is not in the group of ranks {', '.join(map(str, numbers))}.\n"
                "  Each rank passes the group that it is in."
            )
        return cls(numbers, numbers.index(me), job_ranks)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def is_whole_job(self) -> bool:
        return len(self.numbers) == self.job_ranks

    @property
    def key(self) -> str:
        """Prefix of the names of conversations (`agree.py`); empty for the whole job."""
        return "" if self.is_whole_job else f"of {','.join(map(str, self.numbers))} "

    def __str__(self) -> str:
        if self.is_whole_job:
            return f"all {len(self)} ranks"
        return f"ranks {', '.join(map(str, self.numbers))} of the job's {self.job_ranks}"

    def levels(self, places: Levels) -> Levels:
        """Convert each level's groups from member indices to job ranks."""
        numbers = self.numbers
        return {level: [tuple(numbers[k] for k in ranks) for ranks in lists] for level, lists in places.items()}

    def group_names(self, what: str) -> int:
        """Return the first of 4,096 numbers, derived from `what`, that name process groups of these ranks.

        torch's own counter differs between ranks after one rank failed.
        """
        digest = hashlib.sha256(f"{self.key}{what}".encode()).digest()
        return int.from_bytes(digest[:6], "big") << 12


def _handle(group: Any) -> Any:
    if group is None or isinstance(group, compat.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise BadCall(
            f"rank {dist.get_rank()} is not in the group that process_group= names.\n"
            "  Each rank passes the group that it is in."
        )
    if isinstance(group, compat.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("0", "1")
            raise BadOption(
                f"process_group= is a mesh of {group.ndim} dimensions, {', '.join(names)}: gradients are averaged over"
                f" one.\n  Pass mesh[{names[0]!r}], the dimension whose ranks hold the same parameters."
            )
        return group.get_group()
    raise BadOption(
        f"process_group= takes a torch.distributed process group, or a DeviceMesh of one dimension; it is a"
        f" {type(group).__name__}"
    )
