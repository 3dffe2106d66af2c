"""Count code, classes, files, collaborators, tests, launches of ranks and silent limits of a checkout.

    python benchmarks/house.py                            the tree that this file stands in
    python benchmarks/house.py --before 023b3660          next to another commit
    python benchmarks/house.py --launches FILE            with the launches of ranks of one `make test`
    python benchmarks/house.py --json house.json          rows as data too

Lines of code exclude docstrings, comments, blank lines and imports. Collaborators of `CompiledStep` are the package's
classes that it constructs or holds, also in containers, except frozen dataclasses and plain data. Private uses are
imports and attributes of torch's private modules, except modules that torch recommends to users (`PUBLIC_ENOUGH`).

`FXCOMP_LAUNCHES=FILE make test` writes one byte to FILE per launch of ranks.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1]

COLLABORATORS = """
import ast, dataclasses, inspect, sys, textwrap, warnings
warnings.simplefilter("ignore")
import torch, fxcomp
from fxcomp.step import compiled_step as module
model = torch.nn.Linear(2, 1)
step = fxcomp.compile_step(
    model, lambda model, batch: model(batch).sum(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(1, 2)
)
found, waiting = set(), list(vars(step).values())
while waiting:
    value = waiting.pop()
    if isinstance(value, dict):
        waiting += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        waiting += value
    if type(value).__module__.startswith("fxcomp."):
        found.add(type(value))
source = textwrap.dedent(inspect.getsource(module.CompiledStep.__init__))
calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
made = [vars(module).get(called.id) for called in calls if isinstance(called, ast.Name)]
found |= {each for each in made if isinstance(each, type) and each.__module__.startswith("fxcomp.")}
plain = {"Notes", "Training", "Site", "StepOptions"}
print(*sorted({
    each.__name__ for each in found
    if each.__name__ not in plain and not (dataclasses.is_dataclass(each) and each.__dataclass_params__.frozen)
}))
"""
"""Program that prints the collaborators of a compiled step."""

PUBLIC_ENOUGH = ("torch._ops", "torch.utils._pytree")
"""Underscored modules that torch recommends to users."""

SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Row = dict[str, float]


def spanned(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def lines_of_code(source: str) -> int:
    """Count lines of code without imports."""
    without: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (is_text and isinstance(node.value.value, str)):
            without.update(spanned(node))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - without)


def classes_in(source: str) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))


def private_uses(source: str) -> Iterator[str]:
    """Yield uses of torch's private modules in imports and attributes: `torch._dynamo.x` is one use."""
    nodes = list(ast.walk(ast.parse(source)))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        for name in names:
            is_private = any(part.startswith("_") for part in name.split(".")[1:3])
            is_public = "__" in name or name.startswith((*PUBLIC_ENOUGH, "torch.ops."))
            if name.startswith("torch.") and is_private and not is_public:
                yield name


def lines_in(folder: Path, *left_out: str) -> int:
    """Count all lines of Python files, except in the folders `left_out`."""
    paths = [path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in left_out]
    return sum(len(path.read_text().splitlines()) for path in paths)


def collaborators(tree: Path) -> list[str]:
    asked = [sys.executable, "-c", COLLABORATORS]
    environment = {"PYTHONPATH": str(tree), "PATH": "", "HOME": tempfile.gettempdir()}
    printed = subprocess.run(asked, cwd=tree, env=environment, check=True, stdout=-1, stderr=-1, text=True).stdout
    return printed.split()


def measure(tree: Path) -> Row:
    sources = [path.read_text() for path in sorted((tree / "fxcomp").rglob("*.py"))]
    words = (tree / "docs" / "limits.md").read_text().split()
    return {
        "lines of code in fxcomp/": sum(map(lines_of_code, sources)),
        "classes in fxcomp/": sum(map(classes_in, sources)),
        "files in fxcomp/": len(sources),
        "collaborators of CompiledStep": len(collaborators(tree)),
        "lines of tests, without benchmarks and recipes": lines_in(tree / "tests", "benchmarks", "recipes"),
        "lines of benchmarks": lines_in(tree / "benchmarks"),
        "words of limits.md": len(words),
        "limits marked (no error)": " ".join(words).count("(no error)"),
        "private uses of torch": sum(len(list(private_uses(source))) for source in sources),
    }


def measure_commit(commit: str) -> Row:
    packed = subprocess.run(["git", "archive", commit], cwd=HERE, check=True, stdout=-1).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return measure(Path(folder))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--launches", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)

    columns = {args.before: measure_commit(args.before)} if args.before else {}
    columns["here"] = measure(HERE)
    if args.launches:
        columns["here"]["launches of ranks in `make test`"] = args.launches.stat().st_size
    print("| | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        cells = [f"{column[row]:,.12g}" if row in column else "" for column in columns.values()]
        print(f"| {row} | " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(columns, indent=1) + "\n")


if __name__ == "__main__":
    main()
