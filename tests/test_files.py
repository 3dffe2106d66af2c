"""One function writes files, so that a job killed while it writes leaves the old file or the new one."""

from __future__ import annotations

import ast
import errno
import json
import math
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fxcomp
from fxcomp import compat
from fxcomp.cost.table import CostTable
from fxcomp.cost.table_cache import load_table
from fxcomp.error_tables import ErrorTable
from fxcomp.errors import BadPlan, FxcompError
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

PACKAGE = Path(fxcomp.__file__).parent

ELSEWHERE = {
    "__main__.py": 1,  # the null device
    "compat/files.py": 3,  # write_atomically, and a lock file
    "commands/bisect/rank.py": 2,  # a temporary folder of one command
    "state/checkpoint_folder.py": 2,  # archives in memory, which are read
}
"""Number of places that open a file for writing, by module."""


OTHERS = {
    "write_text",
    "write_bytes",
    "tofile",
    "savez",
    "touch",
    "NamedTemporaryFile",
    "ZipFile",
    "FileHandler",
    "FileIO",
}


def written(tree: ast.AST) -> int:
    """Count calls that write files, and opens with a mode that writes or is not a constant."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [
            *node.args[-1:],
            *(each.value for each in node.keywords if each.arg == "mode"),
        ]  # the path may be bound
        opens = name in ("open", "fdopen") and any(map(_may_write, modes))
        count += opens or name in OTHERS
    return count


def _may_write(mode: ast.expr) -> bool:
    return not isinstance(mode, ast.Constant) or (
        isinstance(mode.value, str) and len(mode.value) <= 3 and bool(set(mode.value) & set("wax+"))
    )


def test_no_other_place_opens_a_file_for_writing():
    found = {str(path.relative_to(PACKAGE)): written(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == ELSEWHERE


PLAN = Plan((Bucket(("a",), (4,), DENSE),))
SAVED: dict[str, Callable[[Path], None]] = {
    "plan": PLAN.save,
    "costs": lambda path: CostTable().save(path),
    "errors": lambda path: ErrorTable({}).save(path),
}


LOADED: dict[str, Callable[[Path], Any]] = {"plan": Plan.load, "costs": CostTable.read, "errors": ErrorTable.load}


@pytest.mark.parametrize("kind", SAVED)
def test_a_damaged_file_is_refused_and_the_one_before_it_offered(kind: str, tmp_path: Path):
    path = tmp_path / "saved.json"
    SAVED[kind](path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data))  # the format does not matter
    assert LOADED[kind](path)
    for text in (path.read_text().replace('"version"', '"versiom"'), path.read_text()[:-9], ""):
        path.write_text(text)
        with pytest.raises(FxcompError, match=r"saved\.json: it is (damaged|not JSON)") as found:
            LOADED[kind](path)
        assert "file before" not in str(found.value)
    SAVED[kind](path)
    path.write_text(json.dumps(json.loads(path.read_text())))
    before = path.read_text()
    for _ in range(3):  # every rank may save the same
        SAVED[kind](path)
    previous = Path(f"{path}~")
    assert previous.read_text() == before
    assert LOADED[kind](previous)
    path.write_text("half")
    link = tmp_path / "latest.json"
    link.symlink_to(path)
    for each in (path, link):
        with pytest.raises(FxcompError, match=r"(?s)it is not JSON.*The file before it is .*saved\.json~"):
            LOADED[kind](each)


def test_a_file_edited_or_written_by_hand_needs_no_checksum(tmp_path: Path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"a"', '"b"'))
    with pytest.raises(BadPlan, match=r'checksum is wrong\.\n  If you edited it, remove "checksum" from it'):
        Plan.load(path)
    edited = json.loads(path.read_text())
    del edited["checksum"]
    path.write_text(json.dumps(edited))
    assert Plan.load(path).buckets[0].names == ("b",)


def test_jobs_that_share_a_cache_never_read_half_a_table(tmp_path: Path):
    tables = [CostTable(), replace(CostTable(), hardware="another " * 10_000)]
    path = tmp_path / "costs.json"
    tables[0].save(path)

    def write(table: CostTable) -> None:
        for _ in range(20):
            table.save(path)

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("error")  # an unreadable table is renamed with a warning
        writing = [pool.submit(write, table) for table in tables]
        while not all(each.done() for each in writing):
            assert load_table(path) in tables
        assert [each.result() for each in writing] == [None, None]
    assert {each.name for each in tmp_path.iterdir()} == {"costs.json", "costs.json~"}


def test_what_a_killed_writer_left_is_deleted_after_a_day(tmp_path: Path):
    path, started = tmp_path / "plan.json", list[Path]()

    def killed(new: Path) -> None:
        new.write_text("half")
        left = new.parent.with_name(new.parent.name.replace(".fxcomp", f"{len(started)}.fxcomp"))
        started.append(shutil.copytree(new.parent, left))  # its writer is killed, and deletes nothing

    for name in ("plan.json", "plan.json", "other.json"):
        compat.write_atomically(tmp_path / name, killed)
    left, writing, another = started
    for each in (left, another):
        os.utime(each, (0, 0))
    PLAN.save(path)
    assert not left.exists()
    assert writing.exists()
    assert another.exists()


@pytest.mark.parametrize("kind", SAVED)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "saved.json"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        SAVED[kind](path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", SAVED)
def test_a_replaced_file_keeps_its_mode_and_its_links(kind: str, tmp_path: Path):
    path, link = tmp_path / "saved.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    SAVED[kind](link)
    assert link.is_symlink()
    assert json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_plan_is_written_into_a_pipe():
    reader, writer = os.pipe()
    PLAN.save(f"/dev/fd/{writer}")
    os.close(writer)
    with os.fdopen(reader) as file:
        assert Plan.from_json(json.load(file)) == PLAN


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced_is_written_in_place(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as a file that is mounted into a container."""
    path = tmp_path / "saved.json"
    path.write_text("old")

    def mounted(new: Path, old: Path) -> None:
        raise OSError(code, os.strerror(code), str(new), None, str(old))

    monkeypatch.setattr(os, "replace", mounted)
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_kept_if_its_writer_fails_with_an_error_of_mounted_files(tmp_path: Path):
    path = tmp_path / "state.pt"
    path.write_text("old")

    def half(new: Path) -> None:
        new.write_text("half")
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.raises(PermissionError):
        compat.write_atomically(path, half)
    assert path.read_text() == "old"


def test_ranks_that_save_the_same_at_once_keep_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, link = tmp_path / "plan.json", os.link
    path.write_text("old")

    def after_another(*places: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        PLAN.save(path)
        link(*places)

    monkeypatch.setattr(os, "link", after_another)
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert (tmp_path / "plan.json~").read_text() == "old"


def test_a_file_without_write_permission_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "saved.json"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"saved\.json"):
        PLAN.save(path)
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["plan [1]*?.json", "\udcff.json", "字" * 80 + ".json", "a" * 250 + ".json", "-"])
def test_any_name_of_a_file_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        PLAN.save(name)
    assert Plan.load(name) == PLAN


def test_keys_of_data_may_be_numbers(tmp_path: Path):
    compat.save_json(tmp_path / "data.json", {"a": {2: 1, 10: 2}, "b": [math.nan, -0.0, 1e300, "字"]})
    assert compat.read_json(tmp_path / "data.json")["a"] == {"2": 1, "10": 2}


@pytest.mark.parametrize("kind", ["plan", "errors"])
def test_a_misspelt_folder_is_not_made(kind: str, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        SAVED[kind](tmp_path / "nowhere" / "saved.json")
    assert not list(tmp_path.iterdir())
