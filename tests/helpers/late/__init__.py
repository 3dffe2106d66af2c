"""A device that works late, without one: what a GPU alone gets wrong shows on a CPU, and by a seed.

    with late.schedule(seed) as machine:
        model.to("late:1")          # streams, events, memory and collectives as on a GPU; 0 is the current device
    machine.waits                   # where the host waited for it

`start()` makes the device known to torch; a process that has once run a backward pass is too old for it.
"""

from __future__ import annotations

from helpers.late.backend import DEVICE, schedule, start
from helpers.late.machine import MACHINE, Machine

__all__ = ["DEVICE", "MACHINE", "Machine", "schedule", "start"]
