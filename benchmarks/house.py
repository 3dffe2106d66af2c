"""Measure the size of the house: code, files, classes, names, floors, and what to open for a change.

    python benchmarks/house.py                            the tree that this file stands in
    python benchmarks/house.py --before f8a962b           beside another commit
    python benchmarks/house.py --minutes minutes.json     with the minutes of tests that a file has
    python benchmarks/house.py --json house.json          rows as data too

Code lines are those that hold code: no docstrings, comments, blanks and imports. A class name serves two classes if two
classes of the package have it, with or without an underscore in front. The entry `__main__` is no floor. A file of
minutes holds `{"here": {"make test": 4.8, ".ci/run": 14}, "before": {...}}`.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1]

LOADED = """
import sys, warnings
warnings.simplefilter("ignore")
import fxcomp.frontends.compile_step
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fxcomp"]
values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
print(len({value for value in values if str(value.__module__).split(".")[0] == "fxcomp"}))
"""
"""A program that counts the classes of the package that one import loads."""

SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Row = dict[str, float]


def spanned(node: ast.stmt) -> range:
    """Lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_and_imports(source: str) -> tuple[int, int]:
    """Count the lines that hold code, and those of imports."""
    imports: set[int] = set()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(spanned(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(spanned(node))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - imports - docstrings), len(imports)


def classes_of(sources: list[str]) -> Iterator[ast.ClassDef]:
    """Find every class that is written down."""
    for source in sources:
        yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def lines_in(folder: Path, *kinds: str) -> int:
    """Count all lines of a folder's files of some kinds."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in kinds]
    return sum(len(path.read_text().splitlines()) for path in paths)


def loaded_classes(tree: Path) -> int:
    """Import compile_step in a process of its own, and count the package's classes there."""
    asked = [sys.executable, "-c", LOADED]
    return int(subprocess.run(asked, cwd=tree, env={"PYTHONPATH": str(tree)}, check=True, stdout=-1).stdout)


def floors(tree: Path) -> int:
    """Count the floors that the test of imports knows."""
    source = (tree / "tests" / "test_floors.py").read_text()
    listed = re.search(r"^FLOORS = (\[.*?^\])", source, re.DOTALL | re.MULTILINE)
    assert listed, "tests/test_floors.py has no list FLOORS"
    return sum(names != ["__main__"] for names in ast.literal_eval(listed[1]))


def keyword_arguments(tree: Path) -> int:
    """Count the arguments of compile_step that are given by name."""
    parsed = ast.parse((tree / "fxcomp" / "frontends" / "compile_step.py").read_text())
    (found,) = [node for node in parsed.body if isinstance(node, ast.FunctionDef) and node.name == "compile_step"]
    return len(found.args.kwonlyargs)


def files_for_a_collective(tree: Path) -> int:
    """Count the files that the list of steps in docs/architecture.md names, but for those that stay "as it is".

    It is the usual way; what else a collective needs that its facts do not describe comes after the list.
    """
    text = (tree / "docs" / "architecture.md").read_text()
    steps = text.partition("**To add a collective**")[2].partition("\nA collective that")[0].partition("\n**To add")[0]
    sentences = re.split(r"[.;]\s", steps)
    opened = [sentence for sentence in sentences if not sentence.endswith(("as it is", "as they are"))]
    return len(set(re.findall(r"[\w/]+\.(?:py|h|cpp)", ". ".join(opened))))


def measure(tree: Path) -> Row:
    """Count everything in a tree."""
    paths = sorted((tree / "fxcomp").rglob("*.py"))
    sources = [path.read_text() for path in paths]
    counted = [code_and_imports(source) for source in sources]
    classes = list(classes_of(sources))
    names = Counter(found.name.lstrip("_") for found in classes)
    return {
        "code lines in fxcomp/": sum(code for code, _ in counted),
        "files in fxcomp/": len(paths),
        "import lines in fxcomp/": sum(imports for _, imports in counted),
        "classes loaded with compile_step": loaded_classes(tree),
        "class names of two classes or more": sum(times > 1 for times in names.values()),
        "floors": floors(tree),
        "lines of the largest class": max(len(spanned(found)) for found in classes),
        "lines of the largest file": max(len(source.splitlines()) for source in sources),
        "keyword arguments of compile_step": keyword_arguments(tree),
        "files to open to add a collective": files_for_a_collective(tree),
        "lines of csrc": lines_in(tree / "csrc", ".cpp", ".h", ".cu", ".md"),
        "lines of benchmarks": lines_in(tree / "benchmarks", ".py"),
        "lines of tests": lines_in(tree / "tests", ".py"),
    }


def measure_commit(commit: str) -> Row:
    """Count everything in a commit, in a temporary folder."""
    packed = subprocess.run(["git", "archive", commit], cwd=HERE, check=True, stdout=-1).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return measure(Path(folder))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--minutes", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)

    columns = {args.before: measure_commit(args.before)} if args.before else {}
    columns["here"] = measure(HERE)
    if args.minutes:
        minutes = json.loads(args.minutes.read_text())
        for name, column in columns.items():
            given = minutes.get("here" if name == "here" else "before", {})
            column |= {f"minutes of `{command}`": float(taken) for command, taken in given.items()}

    print("| | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        cells = [f"{column[row]:,.12g}" if row in column else "" for column in columns.values()]
        print(f"| {row} | " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(columns, indent=1) + "\n")


if __name__ == "__main__":
    main()
