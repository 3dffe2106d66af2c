"""Commands and paths that README, docs and docstrings show: commands parse, scripts know their options, files exist."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fxcomp.__main__ import COMMANDS, main, make_parser

ROOT = Path(__file__).parent.parent
FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in FRONT), *sorted(ROOT.glob("docs/**/*.md"))]
HOME = re.compile(r"https://github\.com/fxcomp/fxcomp/(?:blob|tree)/[^/]+/(.+)")
SOURCES = [
    path
    for folder in ("fxcomp", "benchmarks", "docs/make", "examples")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]
COMMAND = re.compile(r"(fxcomp [a-z]|python [\w./-]|torchrun |make [a-z])")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def in_backticks(text: str) -> Iterator[str]:
    for match in re.finditer(r"`([^`]+)`", FENCED.sub("", text)):
        yield " ".join(match[1].split())


def in_blocks(text: str) -> Iterator[str]:
    """Fenced and indented lines, without their remarks, which two spaces set off."""
    text = re.sub(r"\\\n\s*", "", text)
    for line in "\n".join(FENCED.findall(text)).splitlines() + re.findall(r"^ +(.*)$", text, re.MULTILINE):
        yield re.split(r"\s{2,}", line.strip())[0]


def shown_texts() -> Iterator[tuple[str, str]]:
    """Everything that is read as prose, with its place."""
    yield "fxcomp --help", "".join(command.EXAMPLES for command in COMMANDS)
    for path in PAGES:
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield str(path.relative_to(ROOT)), ast.get_docstring(node, clean=not isinstance(node, ast.Module)) or ""


def words_of(command: str) -> list[str]:
    """Split a command; what a launcher starts counts: `torchrun --nproc-per-node 2 -m fxcomp demo` is `fxcomp demo`."""
    words = shlex.split(re.sub(r"[\[\]]| > .*", "", command), comments=True)
    if words[0] == "torchrun":
        words = ["python", *words[next(k for k, word in enumerate(words) if word == "-m" or word.endswith(".py")) :]]
    return words[2:] if words[:3] == ["python", "-m", "fxcomp"] else words


SHOWN = {
    (place, command): words_of(command)
    for place, text in shown_texts()
    for command in (*in_backticks(text), *in_blocks(text))
    if COMMAND.match(command)
}


@cache
def options_of(script: str) -> set[str]:
    """Options that a script, or what it imports from beside itself, gives to argparse, by the source."""
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    adds = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    mine = {str(word.value) for call in adds for word in call.args if isinstance(word, ast.Constant)}
    beside = [str(Path(script).parent / f"{node.module}.py") for node in nodes if isinstance(node, ast.ImportFrom)]
    return mine.union(*(options_of(other) for other in beside if (ROOT / other).exists()))


def mistake(words: list[str]) -> str | None:
    """Say why a command cannot be run as it is shown."""
    for word in words:
        path = word.partition(":")[0]
        if path.startswith(("examples/", "benchmarks/", "docs/")) and not (ROOT / path).exists():
            return f"there is no {path}"
    if words[0] == "make":
        is_target = re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if is_target else f"make has no target {words[1]}"
    if words[0] == "python":
        if words[1] == "-m":
            return None if importlib.util.find_spec(words[2]) else f"there is no module {words[2]}"
        named = [str(path.relative_to(ROOT)) for path in SOURCES if path.name == words[1]]  # beside the reader
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown -= options_of(words[1] if "/" in words[1] else named[0])
        return f"{words[1]} has no option {min(unknown)}" if unknown else None
    words = words[1:]
    if words[0] in ("explain", "dump", "bisect") and (len(words) == 1 or words[1].startswith("-")):
        words = [*words, "train.py"]  # named in a sentence, without its job
    if len(words) == 1:
        words += {"diff": ["a.json", "b.json"], "plot": ["run.jsonl"]}.get(words[0], [])
    try:
        make_parser().parse_args(words)
    except SystemExit:
        return f"fxcomp does not understand {' '.join(words)}"
    return None


def test_commands_that_are_shown_can_be_run():
    assert len(SHOWN) > 60
    assert [(*key, wrong) for key, words in SHOWN.items() if (wrong := mistake(words))] == []


@pytest.mark.parametrize(
    "command",
    [
        "fxcomp explain examples/gpt.py:job --hosts 2",
        "fxcomp explain examples/none.py:job",
        "fxcomp train examples/gpt.py",
        "torchrun --nproc-per-node 2 -m fxcomp calibrate --compare a b",
        "python benchmarks/guards.py --fast",
        "python -m fxcomp.testing.none",
        "make lunch",
    ],
)
def test_a_command_that_cannot_be_run_is_found(command: str):
    assert COMMAND.match(command)
    assert mistake(words_of(command)) is not None


def test_commands_about_the_smallest_job_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    quick = [words for words in SHOWN.values() if "examples/mlp.py:job" in words]
    assert quick
    for words in quick:
        assert main(words[1:]) == 0
        assert capsys.readouterr().out


PATH = re.compile(
    r"((\.\./)*([\w.-]+/)+([\w.-]+\.(py|md|json|jsonl|toml|cpp|h|txt))?|\w+\.py|(fxcomp|tests)(/\w+)+)(:\w+)?"
)
PLACEHOLDER = "train.py"


def paths_in(page: Path) -> Iterator[str]:
    """Links, and files in backticks and blocks."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        at_home = HOME.fullmatch(target)
        if at_home is not None or "://" not in target:
            yield at_home[1] if at_home is not None else target
    for word in " ".join((*in_backticks(text), *in_blocks(text))).split():
        if PATH.fullmatch(word) and not word.startswith(PLACEHOLDER):
            yield word.partition(":")[0]


def missing(page: Path) -> list[str]:
    places = (page.parent, ROOT, ROOT / "fxcomp")
    names = {path.name for path in SOURCES}
    return [path for path in paths_in(page) if path not in names and not any((p / path).exists() for p in places)]


def test_paths_that_pages_name_exist():
    assert {page.name: gone for page in PAGES if (gone := missing(page))} == {}


def test_a_path_that_does_not_exist_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "`fxcomp/pipeline.py`, `graph/edit.py`, `graph/no.py`, `fxcomp/no`, [no](no.md), `a/b`, `emit.py`, `no.py`,"
        " [costs](https://github.com/fxcomp/fxcomp/blob/main/docs/costs.md), [torch](https://pytorch.org/gone),"
        " [gone](https://github.com/fxcomp/fxcomp/blob/v0.1.0/docs/gone.md)"
    )
    assert missing(page) == ["no.md", "docs/gone.md", "graph/no.py", "fxcomp/no", "no.py"]
