"""Reduce a bucket's tasks to numbers: how long each stage occupies which stream, one block after the other.

    pack, compress, start all_gather | all_gather | decompress | update        the tasks of a bucket
    compute 120                      | inter 900  | compute 60 | update 30     its blocks, in us

Neighbours on one stream are one block: nothing else may run between them. A step of such buckets on streams that share
no processors is a longest path: every block starts when its stream and the block before it are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxcomp.cost.timeline import Task
from fxcomp.plan.kinds import POOL
from fxcomp.search.least_work import COMPUTE, STREAMS
from fxcomp.search.plan_tasks import BucketTasks

POOLS = tuple(STREAMS.index(stream) for stream in POOL)

Block = tuple[int, float]
"""A stream's number, and for how many us it is occupied."""

Stage = tuple[Block, ...]


@dataclass(frozen=True)
class Blocks:
    """A bucket in numbers."""

    stages: tuple[Stage, ...]
    final: Stage
    update_us: float

    @classmethod
    def of(cls, tasks: BucketTasks) -> Blocks | None:
        """Reduce a bucket's tasks; None where some wait for others than the one before, as a saved residual's do."""
        chain = [task for stage in (*tasks.stages, tasks.final) for task in stage]
        if any(not after.after or after.after[0] != before.name for before, after in pairwise(chain)):
            return None
        return cls(tuple(map(_stage, tasks.stages)), _stage(tasks.final), tasks.update.duration_us)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Sum the time that each stream is occupied, the update included."""
        work = [0.0] * len(STREAMS)
        for stage in (*self.stages, self.final):
            for stream, us in stage:
                work[stream] += us
        work[COMPUTE] += self.update_us
        return tuple(work)

    def is_within(self, other: Blocks) -> bool:
        """Return whether giving `other`'s place to this one cannot lengthen any step.

        Each of its blocks has one of `other`'s to itself, in the same stage and order, on the same stream and no
        shorter. So it is what remains of `other` where blocks are shortened and left out, and a longest path never
        grows by that.
        """
        if self.update_us > other.update_us or len(self.stages) > len(other.stages):
            return False
        pairs = zip((*self.stages, self.final), (*other.stages[: len(self.stages)], other.final), strict=True)
        return all(stage_within(one, another) for one, another in pairs)


def stage_within(one: Stage, other: Stage) -> bool:
    """Return whether the blocks of a stage fit one by one into those of another, in order."""
    rest = iter(other)
    return all(any(stream == at and us <= most for at, most in rest) for stream, us in one)


def _stage(tasks: Sequence[Task]) -> Stage:
    return merged((STREAMS.index(task.stream), task.duration_us) for task in tasks)


def merged(blocks: Iterable[Block]) -> Stage:
    """Join neighbours on one stream."""
    found: list[Block] = []
    for stream, us in blocks:
        if found and found[-1][0] == stream:
            found[-1] = (stream, found[-1][1] + us)
        else:
            found.append((stream, us))
    return tuple(found)
