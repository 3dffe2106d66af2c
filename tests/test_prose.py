"""Docs and docstrings as we write them: short lines, `after` and `again`, and openings that say what a thing does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "csrc/README.md")
PAGES = [*(ROOT / name for name in FRONT), *sorted(ROOT.glob("docs/**/*.md"))]
FOLDERS = ("fxcomp", "benchmarks", "docs/make", "examples", "tests")
MODULES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]
WIDTH = 120
BANNED = re.compile(r"\b(behind|anew)\b", re.IGNORECASE)  # after, again
OPENING = re.compile(r"(##+ )?(What|How|Whether|Tell (that|whether|if))\b")
BLOCK = re.compile(r"^ *```(.|\n)*?^ *```$|(?<=\n\n)(    .*\n)+|^ *\|.*$", re.MULTILINE)


def flaws(text: str) -> Iterator[str]:
    """Name long lines, banned words and openings of headings; code, tables and lines that end in a link may be long."""
    text = BLOCK.sub("", text)
    yield from (f"banned: {word}" for word in BANNED.findall(re.sub(r"`[^`]+`", "", text)))
    for line in text.splitlines():
        if len(line) > WIDTH and not re.search(r"\]\(\S+\)$", line):
            yield f"long: {line[:60]}"
        if line.startswith("##") and OPENING.match(line):
            yield f"opening: {line}"


def flaws_of_docstrings(source: str) -> Iterator[str]:
    """Name banned words and openings of all docstrings, those of attributes too; the formatter sees to their length."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from (flaw for flaw in flaws(text) if flaw.startswith("banned"))
                if OPENING.match(text):
                    yield f"opening: {text[:60]}"
            case _:
                pass


def test_pages_are_short_lines_of_plain_words():
    assert {str(page.relative_to(ROOT)): found for page in PAGES if (found := list(flaws(page.read_text())))} == {}


def test_docstrings_open_with_what_they_do():
    found = {str(path.relative_to(ROOT)): list(flaws_of_docstrings(path.read_text())) for path in MODULES}
    assert {path: flaws for path, flaws in found.items() if flaws} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module holds."""',
        'def f():\n    """Tell that it is so."""',
        'class A:\n    """A."""\n    b: int\n    """How many."""',
        'def f():\n    """Plan anew."""',
    ],
)
def test_a_planted_flaw_of_a_docstring_is_found(source: str):
    assert len(list(flaws_of_docstrings(source))) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 30, "long"),
        ("The node behind it.", "banned"),
        ("Ranks plan\nanew.", "banned"),
        ("## What it costs\n", "opening"),
    ],
)
def test_a_planted_flaw_is_found(text: str, found: str):
    assert [flaw.partition(":")[0] for flaw in flaws(text)] == [found]


@pytest.mark.parametrize(
    "text",
    ["| " + "cell | " * 40, "```\n" + "code " * 40 + "\n```", "See `Workload.behind`.", "# How it works\n"],
)
def test_tables_code_and_titles_are_left_alone(text: str):
    assert list(flaws(text)) == []
