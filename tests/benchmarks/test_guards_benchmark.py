"""Each part of a guard that the benchmark times does run."""

from __future__ import annotations

from typing import Any

import guards
import pytest


@pytest.mark.parametrize("part", [guards.key_and_find, guards.digest, guards.prelude])
def test_every_part_runs_between_steps_that_change_something(part: Any):
    cases = part(guards.Checked())
    assert cases
    for ask, change in cases.values():
        for i in range(3):
            change(i)
            ask()
