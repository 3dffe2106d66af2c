"""The demo without ranks: where it runs, what it hears, and lines of progress without a terminal."""

import io
import json

import pytest

from fxcomp.commands.demo.run import MARK, hear, place_for, progress


def test_the_link_is_shaped_where_it_can_be():
    assert place_for("300mbit", lambda: None) == ("300mbit", "a link of 300mbit between two network namespaces")


def test_where_no_link_can_be_shaped_a_sentence_says_why_it_runs_over_loopback(capsys: pytest.CaptureFixture[str]):
    assert place_for("300mbit", lambda: "shaped hosts need tc") == (None, "loopback")
    assert capsys.readouterr().err == (
        "No link of 300mbit can be shaped, so this runs over loopback, where the network costs little "
        "(shaped hosts need tc).\n"
    )


def test_loopback_that_was_asked_for_needs_no_reason(capsys: pytest.CaptureFixture[str]):
    assert place_for("loopback", lambda: "shaped hosts need tc") == (None, "loopback")
    assert capsys.readouterr().err == ""


def test_what_ranks_tell_is_kept_and_what_else_they_print_is_not():
    found: dict[str, object] = {"note": "start"}
    told = {"name": "ddp", "step_s": [0.5], "wire_bytes": 7}
    for line in (
        "gloo talks too",
        MARK + json.dumps({"parameters": 5, "note": "planning"}),
        MARK + json.dumps({"contestants": [told], "plan": "dense"}),
    ):
        hear(found, 0, line)
    assert found == {"note": "planning", "parameters": 5, "plan": "dense", "contestants": [told]}


def test_without_a_terminal_a_line_is_added():
    out = io.StringIO()
    with progress({"note": "start"}, out, in_place=False):
        pass
    assert out.getvalue() == "   0 s  start\n"


@pytest.mark.parametrize(("columns", "shown"), [(80, "   0 s  start of all"), (16, "   0 s  start o")])
def test_on_a_terminal_one_line_is_written_over(monkeypatch: pytest.MonkeyPatch, columns: int, shown: str):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    with progress({"note": "start of all"}, out, in_place=True):
        pass
    blank = f"\r{' ' * (columns - 1)}\r"
    assert out.getvalue() == f"{blank}{shown}{blank}"
