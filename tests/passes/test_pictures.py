"""A pass opens with its picture, which shows lines of its golden texts."""

import ast
from pathlib import Path

import pytest

import fxcomp.passes

FILES = sorted(path for path in Path(fxcomp.passes.__file__).parent.glob("*.py") if path.stem != "__init__")
GOLDEN = Path(__file__).parent.parent / "golden"


def words(line: str) -> str:
    return " ".join(line.split())


def pictures(path: Path) -> list[list[str]]:
    """The indented blocks of a pass's docstring, without the lines of dots for what they leave out."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    blocks = [[words(line) for line in block.splitlines()] for block in text.split("\n\n") if block.startswith("    ")]
    return [[line for line in block if line != "..."] for block in blocks]


def is_shown(picture: list[str], golden: str) -> bool:
    """Return whether a text has all lines of a picture, in order."""
    lines = iter(map(words, golden.splitlines()))
    return all(line in lines for line in picture)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_picture_of_a_pass_is_a_part_of_what_it_does(path: Path):
    goldens = {golden.name: golden.read_text() for golden in (GOLDEN / path.stem).glob("*.txt")}
    assert pictures(path)
    for picture in pictures(path):
        assert any(is_shown(picture, text) for text in goldens.values()), "\n".join(picture)
