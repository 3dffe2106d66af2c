"""Schedule looks at gradients so that they take at most 1 % of the steps' time. Numbers alone, the same on all ranks.

    20 quiet steps ─► ranks tell what a step takes ─► a look of some families ─► ranks tell what it took ─► ...
                                                              ▲                                             │
                                                              └── after max(20, ⌈look / (0.01 · step)⌉) steps

That look is the next one, by what it was measured to take before, and what the last one took longer than that. The
first look at each family comes at once if they take 20 steps at most, and is paid for behind: until then errors are
assumed. Families take turns: a look is at as many as lengthen its step to 1.8 medians, and at one alone that has not
been measured yet. Where one takes longer the gradients are split into groups, which take turns, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

SHARE = 0.007
"""The share of a job's time that looks may take. Checks of what was applied may take the rest to 1 %."""

LEAST = 20
"""Steps between looks, and before the first one under a plan: so many make a median, and warm what they use."""

ROOM = 0.8
"""A look of several families takes at most so many steps, by what each took; the rest to twice a step is for noise."""

AT_ONCE = 20.0
"""Steps that the first looks together may take to come at once."""

OUTLIER = 4.0
"""What took longer than so many times what it took before was disturbed, and is not waited for in full."""


class LookSchedule:
    """Says at which steps families are looked at. `estimates_us` has each family's cost before it is measured."""

    def __init__(self, estimates_us: Sequence[float]):
        self._costs_us = [list(estimates_us)]
        """By group of gradients and family; one group at first."""
        self._is_measured = [[False] * len(estimates_us)]
        self.group: int = 0
        """The group whose turn it is, and the family."""
        self._next = 0
        self._earliest = LEAST
        """Up to this step there is nothing to agree on."""
        self._refusals: int = 0
        self._due: int | None = None
        """The step of the next look; None before ranks have told what a step takes."""
        self._step_us = 0.0
        self._unpaid_us = 0.0
        """What looks took that was not waited for before."""
        self._was_at_once = False
        """The next look, or the last one, is not waited for."""
        self._looked_us = self._passed_us = 0.0
        self._last = 0

    def postpone(self, step: int) -> None:
        """Let quiet steps pass first: now they are others' or another plan's."""
        self._earliest = step + LEAST

    def was_refused(self, step: int) -> None:
        """Try again later, after one step more each time: where every 21st batch is another, not always at that one."""
        self._refusals += 1
        self.postpone(step + self._refusals % LEAST)

    def asks_at(self, step: int) -> bool:
        """Tell that ranks should say now what a step takes, once."""
        return self._due is None and step >= self._earliest

    def begin(self, step: int, step_us: float) -> None:
        """Take in what a step takes on the fastest rank; 0 if one does not know."""
        if step_us <= 0:
            self.postpone(step)
            return
        self._step_us, self._last = step_us, step
        self._was_at_once = self._comes_at_once
        self._due = step + (0 if self._was_at_once else self._wait(self._next_us))

    @property
    def due_from(self) -> int | None:
        """The first step that may take the next look; None before ranks have told what a step takes."""
        return None if self._due is None else max(self._due, self._earliest)

    @property
    def families(self) -> tuple[int, ...]:
        """The places of those that the next look is at."""
        costs_us, is_measured = self._costs_us[self.group], self._is_measured[self.group]
        found, sum_us = [self._next], costs_us[self._next]
        wraps = len(self._costs_us) == 1
        for place in (*range(self._next + 1, len(costs_us)), *(range(self._next) if wraps else ())):
            sum_us += costs_us[place]
            if sum_us > ROOM * self._step_us or not (is_measured[place] and is_measured[self._next]):
                break
            found.append(place)
        return tuple(found)

    def took(self, step: int, look_us: float, step_us: float) -> None:
        """Take in what the last step's look took on the slowest rank, and a step without one; 0 if nobody knows.

        `step` is the number of steps so far.
        """
        looked, look_us = self.families, max(look_us, 1.0)
        self._step_us = step_us if step_us > 0 else self._step_us
        self._looked_us += look_us
        self._passed_us += (step - self._last) * self._step_us
        self._last = step
        costs_us, is_measured = self._costs_us[self.group], self._is_measured[self.group]
        before_us = sum(costs_us[place] for place in looked)
        if all(is_measured[place] for place in looked):
            look_us = min(look_us, OUTLIER * before_us)
        else:
            self._correct_guesses(look_us / before_us)
        for place in looked:
            if is_measured[place]:
                ratio = look_us / before_us
                costs_us[place] *= min(ratio, (1 + ratio) / 2)  # what is disturbed takes longer, never less
            is_measured[place] = True
        self._next = looked[-1] + 1
        if self._next == len(costs_us):
            self._next, self.group = 0, (self.group + 1) % len(self._costs_us)
        self._unpaid_us += look_us if self._was_at_once else max(0.0, look_us - before_us)
        self._was_at_once = self._comes_at_once
        if self._was_at_once:
            self._due = step + 1
        else:
            self._due = step - 1 + self._wait(self._next_us + self._unpaid_us)
            self._unpaid_us = 0.0

    def is_too_long(self, group: int) -> bool:
        """Tell a group of which one family alone takes longer than there is room for: a measured one, if any is."""
        both = list(zip(self._costs_us[group], self._is_measured[group], strict=True))
        longest_us = max([us for us, known in both if known] or self._costs_us[group])
        return longest_us > ROOM * self._step_us > 0

    def split(self, group: int, share: float) -> None:
        """Split a group in two, of which the first takes such a share of the time."""
        before_us = self._costs_us[group]
        self._costs_us[group : group + 1] = [[part * us for us in before_us] for part in (share, 1 - share)]
        self._is_measured.insert(group, list(self._is_measured[group]))
        self.group += self.group > group

    def share_at(self, step: int) -> float:
        """Return the share of the time since the schedule began that looks have taken."""
        passed_us = self._passed_us + (step - self._last) * self._step_us
        return self._looked_us / passed_us if passed_us else 0.0

    def _correct_guesses(self, ratio: float) -> None:
        """Multiply what has not been measured by what a measurement was, over its guess."""
        for costs_us, is_measured in zip(self._costs_us, self._is_measured, strict=True):
            for place, known in enumerate(is_measured):
                if not known:
                    costs_us[place] *= ratio

    @property
    def _comes_at_once(self) -> bool:
        """Something was never looked at, and all of it takes little."""
        all_us = sum(map(sum, self._costs_us))
        return not all(map(all, self._is_measured)) and all_us <= AT_ONCE * self._step_us

    @property
    def _next_us(self) -> float:
        return sum(self._costs_us[self.group][place] for place in self.families)

    def _wait(self, look_us: float) -> int:
        return max(LEAST, ceil(look_us / (SHARE * self._step_us)))
