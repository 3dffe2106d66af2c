"""A rank is killed at the freeze of second moments, under them, or at a thaw: all others say what did not end."""

from __future__ import annotations

import os
import re
import signal
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.guarded import JUMP, STEPS, WARM, batch, started
from helpers.ranks import try_ranks

from fxcomp.runtime.transport import Launch
from fxcomp.state.momenta import Momenta
from fxcomp.step.freeze import LOOK_EVERY

RANKS = 3
THAWS = -(-(JUMP + 1) // LOOK_EVERY) * LOOK_EVERY


def one_is_killed(rank: int, killer: tuple[type, str], first_step: int) -> None:
    """Kill one rank when it calls a method in a step or after it."""

    def killed(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    _, _, step = started()
    for number in range(STEPS):
        dies = dist.get_rank() == rank and number >= first_step
        with patch.object(*killer, killed) if dies else nullcontext():
            step(batch(number))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("victim", "killer", "first_step", "what"),
    [
        (0, (Momenta, "lacking"), WARM, "rank 0 has gone before it arrived at freezing second moments"),
        (2, (Launch, "start"), WARM + 1, rf"step {WARM + 1} did not end: .* rank 2 left a collective"),
        (1, (Momenta, "energies"), WARM + 1, rf"step {LOOK_EVERY - 1} did not end: .* left a collective"),
        (1, (Momenta, "thaw"), JUMP, "rank 1 has gone before it arrived at the end of exchanging gradients again"),
        (2, (Launch, "start"), THAWS, rf"step {THAWS} did not end: .* rank 2 left a collective"),
    ],
    ids=["at the freeze", "at momenta", "at a look", "at the thaw", "after the thaw"],
)
def test_all_others_say_what_did_not_end(victim: int, killer: tuple[type, str], first_step: int, what: str):
    outcomes = try_ranks(RANKS, one_is_killed, victim, killer, first_step)
    assert outcomes[victim].error == "RankDied"
    for rank in {*range(RANKS)} - {victim}:
        assert outcomes[rank].error == "PeerFailed"
        assert re.match(what, outcomes[rank].text)
