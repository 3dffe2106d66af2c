"""docs/first_job.md shows the files of examples/first_job, which train, and a report as the command writes it."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

import pytest
from test_torchrun import TRIED_AGAIN, started

from fxcomp.__main__ import main

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "first_job"
PAGE = (ROOT / "docs" / "first_job.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXPLAIN = "fxcomp explain job.py:job"


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def without_numbers(text: str) -> str:
    """Blank out what differs between machines and versions: numbers, drawn rows, and where lines are broken."""
    text = re.sub(r"[█▓░·\w]*[█▓░·]{2}[█▓░·\w]*", "~", text)
    return " ".join(re.sub(r"\d+([.,]\d+)*", "#", text).split())


def reports() -> list[tuple[str, list[str]]]:
    """Each command that explains the job, with the blocks that quote its report: those up to the next command."""
    found: list[tuple[str, list[str]]] = []
    for text in blocks(""):
        if text.startswith("fxcomp explain"):
            found.append((text.strip(), []))
        elif found:
            found[-1][1].append(text)
    return found


def test_the_page_shows_the_scripts():
    before, after = ((SCRIPTS / name).read_text() for name in ("ddp.py", "job.py"))
    assert blocks("python") == [before, after]
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))[3:]
    assert blocks("diff") == ["".join(f"{'...' if line.startswith('@@') else line}\n" for line in lines)]


def losses(script: Path) -> list[float]:
    """Train on two ranks; return what it prints."""
    for _ in range(3):
        process = started(script)
        output, _ = process.communicate(timeout=300)
        if not any(text in output for text in TRIED_AGAIN):
            break
    assert process.returncode == 0, output
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.mark.slow
def test_the_scripts_train_on_two_ranks_to_the_same_loss_and_lossless_to_equal_ones(tmp_path: Path):
    eager, compiled = (losses(SCRIPTS / name) for name in ("ddp.py", "job.py"))
    assert len(eager) == len(compiled) == 4
    assert eager == pytest.approx(compiled, rel=0.05)
    assert eager[-1] < eager[0] / 2
    source, call = (SCRIPTS / "job.py").read_text(), "batch_at(0, rank))\n    for"
    assert source.count(call) == 1
    script = tmp_path / "lossless.py"
    script.write_text(source.replace(call, call.replace("))", '), compress="lossless")')))
    assert losses(script) == pytest.approx(eager, abs=2e-4)


@pytest.mark.parametrize(("command", "quoted"), reports())
def test_the_page_quotes_the_report(
    command: str, quoted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setenv("COLUMNS", "100")
    assert command.startswith(EXPLAIN)
    assert main(shlex.split(command)[1:]) == 0
    report = without_numbers(capsys.readouterr().out)
    assert len(quoted) > 2
    assert [text for text in quoted if without_numbers(text) not in report] == []


def test_the_page_shows_a_plan_that_compresses_and_one_that_does_not():
    verdicts = ["\n".join(quoted) for _, quoted in reports()]
    assert ["Compress " in verdicts[0], "Do not compress" in verdicts[1]] == [True, True]
    assert "Stays dense:" in verdicts[1]


def test_a_line_that_a_report_lacks_is_found():
    report = without_numbers("  chosen   0.8 ms  -81%\n  compute ██0··11")
    assert without_numbers("chosen 0.75 ms -80.5%\n compute █░··0") in report
    assert without_numbers("chosen in 0.8 ms") not in report
