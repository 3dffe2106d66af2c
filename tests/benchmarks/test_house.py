"""The counts of the house: each row is a number, and a change moves it."""

import json
from pathlib import Path

import house
import pytest

FILES = {
    "fxcomp/one.py": '"""A file."""\n\nimport os\n\n\nclass One:\n    pass\n\n\ndef two():  # nothing\n    return 2\n',
    "tests/test_one.py": "1\n",
    "tests/benchmarks/test_two.py": "1\n2\n",
    "benchmarks/one.py": "1\n",
    "docs/limits.md": "A limit *(no\nerror)*.\n",
}

COUNTED = {
    "lines of code in fxcomp/": 4,
    "classes in fxcomp/": 1,
    "files in fxcomp/": 1,
    "collaborators of CompiledStep": 0,
    "lines of tests, without benchmarks and recipes": 1,
    "lines of benchmarks": 1,
    "words of limits.md": 4,
    "limits marked (no error)": 1,
    "private uses of torch": 0,
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house, "collaborators", lambda _: [])
    return tmp_path


def test_a_small_tree_is_counted(tree: Path):
    assert house.measure(tree) == COUNTED


@pytest.mark.parametrize(
    ("name", "added", "moved"),
    [
        (
            "fxcomp/one.py",
            "\nclass Two:\n    class Three: ...\n",
            {"lines of code in fxcomp/": 6, "classes in fxcomp/": 3},
        ),
        ("fxcomp/one.py", "import torch._dynamo\n", {"private uses of torch": 1}),
        ("fxcomp/one.py", "torch._C._one.two\n", {"private uses of torch": 1, "lines of code in fxcomp/": 5}),
        ("fxcomp/one.py", "from torch.utils._pytree import tree_map\n", {}),
        ("fxcomp/two.py", "\n", {"files in fxcomp/": 2}),
        ("tests/test_one.py", "2\n", {"lines of tests, without benchmarks and recipes": 2}),
        ("tests/recipes/test_three.py", "2\n", {}),
        ("benchmarks/deep/two.py", "2\n", {"lines of benchmarks": 2}),
        ("docs/limits.md", "Another (no error).\n", {"words of limits.md": 7, "limits marked (no error)": 2}),
    ],
)
def test_a_change_moves_its_rows(tree: Path, name: str, added: str, moved: dict[str, int]):
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + added)
    assert house.measure(tree) == COUNTED | moved


def test_collaborators_are_the_classes_that_a_compiled_step_works_with():
    found = house.collaborators(house.HERE)
    assert {"PlanInForce", "Verifier"} <= set(found)
    assert not {"StepOptions", "Notes", "Site"} & set(found)


@pytest.mark.slow
def test_the_table_has_the_project_and_what_was_counted_while_tests_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "launches").write_bytes(b"." * 7)
    given = {"--json": "rows.json", "--launches": "launches"}
    house.main([word for option, name in given.items() for word in (option, str(tmp_path / name))])
    (row,) = json.loads((tmp_path / "rows.json").read_text()).values()
    assert set(row) == {*COUNTED, "launches of ranks in `make test`"}
    assert all(isinstance(value, int | float) and value > 0 for value in row.values())
    assert "| launches of ranks in `make test` | 7 |" in capsys.readouterr().out
