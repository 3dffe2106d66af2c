"""Steps that are compared with eager PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from fxcomp.errors import BadOption

SAMPLED = "sampled"
NEVER = "never"

OFTEN = 500
"""Maximum steps between samples. Samples are rare, because an eager step takes as long as 2 or 3 compiled steps."""


@dataclass(frozen=True, slots=True)
class VerifiedSteps:
    """Steps of a job, numbered from 0, that are compared with eager PyTorch. The set is equal on all ranks."""

    every: int | None = 0
    """Interval in steps; 0 for no steps, None for a sample that thins out to one step in `OFTEN`."""

    @classmethod
    def parse(cls, option: object) -> VerifiedSteps:
        """Parse `Checks.verify`. Raise BadOption."""
        if option == SAMPLED:
            return cls(None)
        if option == NEVER:
            return cls(0)
        if isinstance(option, int) and option >= 0:
            return cls(int(option))
        raise BadOption(
            f"verify must be {SAMPLED!r}, {NEVER!r} or a number of steps, 0 for never; it is {option!r}.\n"
            f"  {SAMPLED!r} verifies steps 2, 5, 10, 20, 50, 100 and so on, and every {OFTEN}."
        )

    def __contains__(self, step: int) -> bool:
        if self.every is not None:
            return self.every > 0 and step % self.every == 0
        if step > 0 and step % OFTEN == 0:
            return True
        while step > 0 and step % 10 == 0:
            step //= 10
            if step == 1:
                return True
        return step in (2, 5)

    @property
    def is_sampled(self) -> bool:
        """True for the sample, to which a step after each new capture is added."""
        return self.every is None

    @property
    def is_all(self) -> bool:
        return self.every == 1


NO_STEPS = VerifiedSteps()
