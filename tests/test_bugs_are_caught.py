"""The suite notices bugs: each is planted in a process of its own, where a test that is named must fail."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from helpers.planting import VARIABLE, all_bugs, plant
from helpers.ranks import run_alone

ROOT = Path(__file__).parent.parent


def run_tests(bug: str, tests: list[str], basetemp: Path) -> tuple[int, str]:
    """Run tests in this process with a bug planted; return pytest's exit code and what it printed."""
    os.environ[VARIABLE] = bug
    plant(bug)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", f"--basetemp={basetemp}"]
    printed = StringIO()
    with redirect_stdout(printed):
        code = pytest.main([*options, *(str(ROOT / test) for test in tests)])
    return int(code), printed.getvalue()


@pytest.mark.one_in(16)
@pytest.mark.parametrize("bug", all_bugs())
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path):
    code, printed = run_alone(run_tests, bug, [all_bugs()[bug].caught_by], tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED, printed
    assert "1 failed" in printed


class Collected:
    """A plug-in of pytest that keeps the names of fast cases, and of functions that have one."""

    def __init__(self) -> None:
        self.fast = set[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        fast = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
        self.fast.update(fast, (name.partition("[")[0] for name in fast))


def fast_among(tests: list[str]) -> set[str]:
    """Collect whole functions, since cases are marked by their place among all."""
    found = Collected()
    with redirect_stdout(StringIO()):
        options = ["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
        pytest.main([*options, *(str(ROOT / test.partition("[")[0]) for test in tests)], plugins=[found])
    return found.fast


def test_what_catches_a_bug_is_a_fast_test():
    tests = sorted({bug.caught_by for bug in all_bugs().values()})
    assert set(tests) - run_alone(fast_among, tests) == set()


@pytest.mark.slow
def test_without_a_bug_all_these_tests_pass(tmp_path: Path):
    """Slow, because each of them runs by itself too: this asks only whether running them here lets them pass."""
    tests = sorted({bug.caught_by for bug in all_bugs().values()})
    code, printed = run_alone(run_tests, "", tests, tmp_path)
    assert code == pytest.ExitCode.OK, printed
