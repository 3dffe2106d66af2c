"""Imports point down, private modules of torch stay in one file, and optional looks stay where they belong."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fxcomp"

FLOORS = [
    ["compat", "errors", "gc_paused", "status_line"],
    ["cluster", "compressors", "progress"],
    ["error_tables"],
    ["plan", "runtime"],
    ["cost", "graph", "ranks"],
    ["capture", "codegen", "options", "passes", "search", "site"],
    ["pipeline", "report", "state"],
    ["planning"],
    ["step"],
    ["frontends", "testing"],
    ["__init__", "commands"],
    ["__main__"],
]
"""Files and folders from the ground up. What stands on one floor does not know its neighbours."""

FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}

ALONE = {"passes"}
"""Folders whose files do not know each other either."""

ONLY_IN = {
    "jinja2": ("report/html/render.py",),
    "markupsafe": ("report/html/render.py",),
    "rich": ("report/terminal.py",),
    "sympy": ("compat/symbols.py", "cost/collectives.py"),
}

PUBLIC_ENOUGH = ("torch._ops", "torch.utils._pytree")
"""Modules with an underscore that torch itself tells people to use."""

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The file or folder that has a floor."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of what a file imports anywhere in it, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"a relative import in line {node.lineno}: write the full name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def climbing(path: Path, tree: ast.Module) -> list[str]:
    """Imports that do not point down."""
    mine = part_of(path)
    found: list[str] = []
    for name, line in imported(tree):
        parts = name.split(".")
        if parts[0] != "fxcomp":
            continue
        theirs = parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "__init__"
        same_folder = theirs == mine and path.parent != PACKAGE and mine not in ALONE
        if not same_folder and FLOOR_OF[theirs] >= FLOOR_OF[mine]:
            found.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}, which is not below it")
    return found


def private_modules(tree: ast.Module) -> list[str]:
    """Private modules of torch that are imported, or reached as attributes: `torch._dynamo.x`."""
    names = [name for name, _ in imported(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    found = [n for n in names if n.startswith("torch.") and any(part.startswith("_") for part in n.split(".")[1:3])]
    return [n for n in found if not n.startswith(PUBLIC_ENOUGH) and "__" not in n and not n.startswith("torch.ops.")]


def test_imports_point_down():
    assert [path for path in FILES if part_of(path) not in FLOOR_OF] == [], "they have no floor yet: give them one"
    assert [found for path in FILES for found in climbing(path, ast.parse(path.read_text()))] == []


def test_private_modules_of_torch_stay_in_compat():
    outside = [path for path in FILES if path.parent.name != "compat"]
    found = {str(path.relative_to(PACKAGE)): private_modules(ast.parse(path.read_text())) for path in outside}
    assert {name: modules for name, modules in found.items() if modules} == {}


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_in_one_place(library: str):
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for name, _ in imported(ast.parse(path.read_text()))
        if name.split(".")[0] == library
    }
    assert users <= set(ONLY_IN[library])


def test_emitted_code_needs_nothing_above_the_runtime():
    from fxcomp.codegen import emit

    lines = [
        line
        for line in Path(emit.__file__).read_text().splitlines()
        if '"from fxcomp' in line or '"import fxcomp' in line
    ]
    assert all("fxcomp.compressors" in line or "fxcomp.runtime" in line for line in lines)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("cluster/cluster.py", "from fxcomp.plan.strategy import Plan"),
        ("plan/strategy.py", "from fxcomp.runtime.arena import Arena"),
        ("passes/one.py", "from fxcomp.passes.another import other"),
        (
            "search/tasks.py",
            "def f():\n    from fxcomp.search.read_workload import graph_tasks\n    import fxcomp.pipeline",
        ),
        ("step/compiled_step.py", "import fxcomp"),
    ],
)
def test_an_import_that_climbs_is_found(place: str, text: str):
    assert len(climbing(PACKAGE / place, ast.parse(text))) == 1


@pytest.mark.parametrize(
    "text", ["from torch._dynamo import source", "import torch._inductor", "torch._C._get_tracing_state()"]
)
def test_a_private_module_is_found(text: str):
    assert private_modules(ast.parse(text))
