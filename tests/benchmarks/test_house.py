"""The counts of the house: each row is a number, and a change moves it."""

import json
from pathlib import Path

import house
import pytest

FILES = {
    "fxcomp/__init__.py": '"""A package."""\n',
    "fxcomp/frontends/__init__.py": "",
    "fxcomp/frontends/compile_step.py": '"""A file."""\n\nimport os\n\n\nclass One:\n    pass\n\n\n'
    "def compile_step(model, *, cluster=None):\n    # nothing\n    return os\n",
    "tests/test_floors.py": 'FLOORS = [\n    ["frontends"],\n    ["__main__"],\n]\n',
    "docs/architecture.md": "**To add a collective** do this.\n\n1. `plan/a.py`. `plan/b.py` stays as it is.\n\n"
    "**To add a line**: `c.py`\n",
    "csrc/one.cpp": "int one;\n",
    "benchmarks/one.py": "1\n",
}

COUNTED = {
    "code lines in fxcomp/": 4,
    "files in fxcomp/": 3,
    "import lines in fxcomp/": 1,
    "classes loaded with compile_step": 1,
    "class names of two classes or more": 0,
    "floors": 1,
    "lines of the largest class": 2,
    "lines of the largest file": 12,
    "keyword arguments of compile_step": 1,
    "files to open to add a collective": 1,
    "lines of csrc": 1,
    "lines of benchmarks": 1,
    "lines of tests": 4,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_small_tree_is_counted(tree: Path):
    assert house.measure(tree) == COUNTED


@pytest.mark.parametrize(
    ("name", "found", "written", "moved"),
    [
        (
            "fxcomp/frontends/compile_step.py",
            "    pass\n",
            "    pass\n\n    class _One:\n        import sys\n\nclass Two:\n    pass\n",
            {
                "code lines in fxcomp/": 7,
                "import lines in fxcomp/": 2,
                "classes loaded with compile_step": 2,
                "class names of two classes or more": 1,
                "lines of the largest class": 5,
                "lines of the largest file": 18,
            },
        ),
        ("fxcomp/other.py", "", "\n", {"files in fxcomp/": 4}),
        ("fxcomp/frontends/compile_step.py", "=None", "=None, plan=None", {"keyword arguments of compile_step": 2}),
        ("tests/test_floors.py", "[\n", '[\n    ["a", "b"],\n', {"floors": 2, "lines of tests": 5}),
        ("docs/architecture.md", " stays as it is", "", {"files to open to add a collective": 2}),
        ("csrc/one.h", "", "int two;\n", {"lines of csrc": 2}),
        ("benchmarks/deep/two.py", "", "2\n", {"lines of benchmarks": 2}),
    ],
)
def test_a_change_moves_its_rows(tree: Path, name: str, found: str, written: str, moved: dict[str, int]):
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(path.read_text().replace(found, written, 1) if found else written)
    assert house.measure(tree) == COUNTED | moved


@pytest.mark.slow
def test_the_table_has_the_project_and_the_minutes_that_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "minutes.json").write_text('{"here": {"make test": 4.5}}')
    house.main(["--json", str(tmp_path / "rows.json"), "--minutes", str(tmp_path / "minutes.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text()).values()
    assert set(row) == {*COUNTED, "minutes of `make test`"}
    assert all(isinstance(value, int | float) and value > 0 for value in row.values())
    assert "| minutes of `make test` | 4.5 |" in capsys.readouterr().out
