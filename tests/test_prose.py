"""Docs and docstrings as we write them: short lines, `after` and `again`, and openings that say what a thing does."""

import ast
import io
import re
import tokenize
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


# Patterns that make a sentence hard to read, with the number that is left of each. A number only falls.

PATTERNS = {
    "what": r"\bwhat\b",
    "those that": r"\b(those|ones?|that) (that|which|who|whose)\b|\bof which\b|\b(that|those) of\b",
    "the thing that": r"\bthe (thing|things) that\b",
    "so many": r"\bso (many|often|much|few|long)\b|\bsuch an?\b",
    "tell": r"\b(tells?|told|says?|said)\b",
    "nobody": r"\b(nobody|somebody|someone|whoever|everybody)\b",
    "aside": r"\b(aside|beside)\b",
}

LEFT: dict[str, dict[str, int]] = {
    "docstrings": {"what": 1, "tell": 1, "aside": 3},
    "messages": {"aside": 1},
    "pages": {"what": 4, "tell": 1},
}
"""Places that are left, by kind of text and pattern."""


def counts(texts: Iterator[str]) -> dict[str, int]:
    """Count the patterns that occur in texts, without code in backticks."""
    plain = [re.sub(r"`[^`]*`", "", text) for text in texts]
    found = {name: sum(len(re.findall(p, text, re.IGNORECASE)) for text in plain) for name, p in PATTERNS.items()}
    return {name: count for name, count in found.items() if count}


def strings(source: str, *, are_docstrings: bool) -> Iterator[str]:
    """Yield docstrings, or else the texts of a module that have several words."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if (id(node) in documented) == are_docstrings and " " in text:
                yield text
            case _:
                pass


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def texts_of(kind: str) -> Iterator[str]:
    if kind == "pages":
        yield from (BLOCK.sub("", page.read_text()) for page in PAGES)
        return
    for path in (path for path in MODULES if path.is_relative_to(ROOT / "fxcomp")):
        source = path.read_text()
        yield from strings(source, are_docstrings=kind == "docstrings")
        if kind == "docstrings":
            yield from comments(source)


@pytest.mark.parametrize("kind", LEFT)
def test_hard_sentences_only_become_fewer(kind: str):
    """Rewrite a sentence that adds to a count; lower the number where a count has fallen."""
    assert counts(texts_of(kind)) == LEFT[kind]


def test_planted_patterns_are_counted():
    planted = (
        '"""What those that are told say, so often that nobody asks. `what`"""\n# one that is beside\nx = "what is"\n'
    )
    assert counts(strings(planted, are_docstrings=True)) == {
        "what": 1, "those that": 1, "so many": 1, "tell": 2, "nobody": 1
    }  # fmt: skip
    assert counts(strings(planted, are_docstrings=False)) == {"what": 1}
    assert counts(comments(planted)) == {"those that": 1, "aside": 1}
