"""The demo without ranks: where it runs, what it hears, and lines of progress without a terminal."""

import io
import json

import pytest

from fxcomp.commands.demo.run import MARK, Findings, Progress, place_for
from fxcomp.commands.demo.shaped_hosts import Rights
from fxcomp.errors import Unsupported


def refused() -> Rights:
    raise Unsupported("shaped hosts need tc")


@pytest.mark.parametrize("rights", list(Rights))
def test_the_link_is_shaped_by_the_rights_that_are_found(rights: Rights):
    place = place_for("300mbit", lambda: rights)
    assert (place.inter, place.rights, place.sentence) == ("300mbit", rights, "")
    assert str(place) == "a link of 300mbit between two network namespaces"


def test_without_rights_a_sentence_says_why_it_runs_over_loopback():
    place = place_for("300mbit", refused)
    assert str(place) == "loopback"
    assert place.rights is None
    assert place.sentence == (
        "No link of 300mbit can be shaped, so this runs over loopback, where the network costs little "
        "(shaped hosts need tc)."
    )


def test_loopback_that_was_asked_for_needs_no_rights_and_no_sentence():
    assert place_for("loopback", refused) == place_for("loopback")
    assert place_for("loopback", refused).sentence == ""


def test_what_ranks_tell_is_kept_and_what_else_they_print_is_not():
    said: list[str] = []
    found = Findings()
    told = {"name": "ddp", "step_s": [0.5], "wire_bytes": 7}
    for line in (
        "gloo talks too",
        MARK + json.dumps({"parameters": 5, "note": "planning"}),
        MARK + json.dumps({"contestants": [told], "plan": "dense"}),
    ):
        found.hear(line, said.append)
    assert said == ["planning"]
    assert (found.parameters, found.plan) == (5, "dense")
    assert found.contestants[0].median_ms == 500


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_there_is_a_line_every_few_seconds():
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, in_place=False, clock=clock)
    progress.say("start")
    for second in range(1, 10):
        clock.now = second
        if second == 3:
            progress.say("plan")
        progress.show_if_due()
    assert out.getvalue() == "   0 s  start\n   4 s  plan\n   8 s  plan\n"


def test_on_a_terminal_one_line_is_written_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, clock = io.StringIO(), Clock()
    with Progress(out, in_place=True, clock=clock) as progress:
        progress.say("start")
        clock.now = 2
        progress.say("plan")
    blank = f"\r{' ' * 79}\r"
    assert out.getvalue() == f"{blank}   0 s  start{blank}   2 s  plan{blank}"


def test_a_narrow_terminal_sees_one_line_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "16")
    out, clock = io.StringIO(), Clock()
    with Progress(out, in_place=True, clock=clock) as progress:
        progress.say("fxcomp captures the step, measures the machine and the link, and plans")
    blank = f"\r{' ' * 15}\r"
    assert out.getvalue() == f"{blank}   0 s  fxcomp {blank}"
