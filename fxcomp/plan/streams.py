"""Name the queues in which a step's work runs."""

from __future__ import annotations

from enum import Enum

from fxcomp.cluster.cluster import Level


class Stream(Enum):
    """A queue in which work runs in order."""

    COMPUTE = "compute"  # the device; compressors placed on it run here too
    INTRA = "intra"  # the links inside a host
    INTER = "inter"  # the links between hosts
    D2H = "d2h"
    H2D = "h2d"
    CPU = "cpu"  # the pool's thread that compresses and launches
    CPU_ARRIVING = "arriving"  # the pool's thread that waits and decompresses

    # Members are single objects; Enum's own hash runs in Python and took a third of the simulator's time.
    __hash__ = object.__hash__


WIRES = (Stream.INTRA, Stream.INTER)
POOL = (Stream.CPU, Stream.CPU_ARRIVING)


def wire_of(level: Level, hosts: int) -> Stream:
    """Return a collective's stream: a flat one is limited by the links between hosts, if there are several."""
    return Stream.INTRA if level is Level.INTRA or hosts == 1 else Stream.INTER
