"""The logger tells phases, choices and notes; a terminal is shown what takes long, and is left clean."""

import io
import logging
import time

import pytest
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy

import fxcomp
from fxcomp import progress
from fxcomp.status_line import written_over


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compiled() -> fxcomp.CompiledStep:
    job = JOBS["mlp"]
    model = job.build()
    return fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["plain"](model.parameters()), job.batch(0, 0))


def test_each_phase_and_the_choice_are_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "fxcomp"):
        step = compiled()
    said = [record.getMessage() for record in caplog.records]
    assert any(each.startswith("capturing the step: ") for each in said)
    assert any("a step is predicted to take" in each for each in said)
    caplog.clear()
    with caplog.at_level(logging.INFO, "fxcomp"):
        step.notes.append("a note")
        step.notes += ["a late note"]
        step.notes.extend(["two", "more"])
    assert [record.getMessage() for record in caplog.records] == ["a note", "a late note", "two", "more"]
    assert step.notes[-4:] == ["a note", "a late note", "two", "more"]


def test_nothing_is_logged_where_nobody_asks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "QUIET_S", 1e6)
    compiled()
    assert capsys.readouterr() == ("", "")


def test_what_takes_long_is_one_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress.time, "perf_counter", iter(float(n) for n in range(1000)).__next__)
    with progress.compiling("compile_step"):
        with progress.phase("capturing"):
            pass
        with progress.compiling("another inside it"), progress.phase("choosing"), progress.phase("measuring"):
            pass
    assert capsys.readouterr().err == "fxcomp: compile_step took 7.0 s: capturing 1.0, measuring 1.0, choosing 3.0\n"


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("FXCOMP_PROGRESS", "0")])
def test_other_ranks_and_who_wants_nothing_show_nothing(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setenv(name, value)
    with progress.compiling("compile_step"), progress.phase("capturing"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_the_phase_and_is_left_clean(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_S", 1e6)

    def fails() -> None:
        with progress.compiling("compile_step"), progress.phase("capturing"):
            made = progress._under_way.get()  # pyright: ignore[reportPrivateUsage]
            assert made is not None
            assert terminal.getvalue() == ""
            made._show()  # pyright: ignore[reportPrivateUsage]
            with progress.phase("choosing"):
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    lines = ("fxcomp: compile_step, capturing", "fxcomp: compile_step, choosing", "")
    assert terminal.getvalue() == "".join(map(written_over, lines))


class Gone(Terminal):
    def write(self, text: str) -> int:  # noqa: ARG002
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, Gone(), Terminal()], ids=["none", "gone", "closed"])
def test_standard_error_that_is_gone_stops_nobody(stream: Terminal | None, monkeypatch: pytest.MonkeyPatch):
    if stream is not None and not isinstance(stream, Gone):
        stream.close()
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    done = []
    with progress.compiling("compile_step"):
        time.sleep(0.05)
        with progress.phase("capturing"):
            done.append(True)
    assert done
