"""Draw points of the kill sweep: a kind of job, a phase, a fault, a victim, and a place within the phase."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PLANNED = ("compiling", "stepping", "verifying", "saving", "loading")
EAGER = ("compiling", "stepping", "saving", "loading")
PHASES = ("compiling", "measuring", "racing", "stepping", "verifying", "saving", "loading", "replanning")

KINDS: Mapping[str, Sequence[str]] = {
    "dense": PLANNED,
    "int8": PLANNED,
    "two-shot int4": PLANNED,
    "PowerSGD": PLANNED,
    "momenta": PLANNED,
    "scaler": PLANNED,
    "accumulation": PLANNED,
    "backend": EAGER,
    "hook": EAGER,
    "HSDP": EAGER,
    "race": ("measuring", "racing", "racing", "compiling", "measuring", "saving", "loading", "racing", "verifying"),
    "hook race": ("racing", "measuring", "racing", "measuring", "saving", "loading", "stepping"),
    "replanning": ("replanning", "measuring", "replanning", "racing", "replanning", "loading", "replanning", "saving"),
}
"""Kinds of jobs and the phases that are hit, in turns."""

RACING = ("race", "hook race", "replanning")
"""Kinds that choose their plan: their bits depend on measured times."""

KILL, TERM, EXIT, STOP, ALLOCATION, LIMIT = (
    "SIGKILL",
    "SIGTERM",
    "SIGTERM, handled",
    "SIGSTOP",
    "allocation",
    "RLIMIT_AS",
)
DISK, BLINK, CUT = "full disk", "link down 2 s", "link down"
ANYWHERE = (KILL, STOP, CUT, ALLOCATION, EXIT, BLINK, LIMIT, KILL, TERM, STOP)
SAVING = (DISK, KILL, DISK, STOP, DISK, EXIT, DISK, TERM, LIMIT, CUT)
FAULTS = (KILL, TERM, EXIT, STOP, ALLOCATION, LIMIT, DISK, BLINK, CUT)
LINK = (BLINK, CUT)


@dataclass(frozen=True)
class Point:
    number: int
    kind: str
    phase: str
    fault: str
    world: int
    victim: int
    next_world: int
    """Number of ranks of the restart."""
    resumes: bool
    """True if the job that is hit has itself loaded a checkpoint."""
    by: str
    """Writer of checkpoints: `files`, one for each rank, or `dcp`."""
    store_at: str
    """Process that hosts the store: rank 0, or the parent, like torchrun's agent."""
    restart_by: str
    function: float
    """Relative position of the function in the phase's list of functions, in [0, 1)."""
    call: float
    """Place among the calls of the function, in [0, 1)."""

    @property
    def is_linear(self) -> bool:
        """True if gradients do not depend on parameters, so that what was applied and is owed can be summed."""
        return self.kind in RACING or self.next_world != self.world

    def __str__(self) -> str:
        ranks = f"{self.world} ranks" + (f", then {self.next_world}" if self.next_world != self.world else "")
        return f"{self.number}: {self.kind}, {self.phase}, {self.fault} on rank {self.victim} of {ranks}"


def drawn(seed: int, count: int) -> list[Point]:
    """Return the points of a seed. Point k does not depend on the count."""
    return list(itertools.islice(_points(seed), count))


def _points(seed: int) -> Iterator[Point]:
    rng = random.Random(seed)
    phases = {kind: itertools.cycle(_shifted(rng, of)) for kind, of in KINDS.items()}
    faults = {phase: itertools.cycle(_shifted(rng, SAVING if phase == "saving" else ANYWHERE)) for phase in PHASES}
    others = ["race" if kind == "HSDP" else kind for kind in (*KINDS, "replanning", "hook race")]  # HSDP: half as often
    for number, kind in enumerate(itertools.cycle([*KINDS, *others])):
        phase = next(phases[kind])
        fault = next(faults[phase])
        world = 4 if kind == "HSDP" else rng.choice((3, 4))
        resumes = phase == "loading" or (phase == "compiling" and rng.random() < 0.5)
        is_elastic = rng.random() < 0.3 and kind not in ("HSDP", "momenta") and (not resumes or kind in RACING)
        is_by_dcp = rng.random() < 0.15 and kind not in ("backend", *RACING) and fault != DISK and not resumes
        yield Point(
            number, kind, phase, fault, world,
            victim=rng.randrange(world),
            next_world=7 - world if is_elastic else world,
            resumes=resumes,
            by="dcp" if is_by_dcp or kind == "HSDP" else "files",
            store_at="rank 0" if fault in LINK or rng.random() < 0.5 else "parent",
            restart_by="torchrun" if number % 32 == 1 else "fork",
            function=rng.random(),
            call=rng.random(),
        )  # fmt: skip


def _shifted(rng: random.Random, of: Sequence[str]) -> Sequence[str]:
    first = rng.randrange(len(of))
    return [*of[first:], *of[:first]]
