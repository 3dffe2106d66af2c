"""Each refusal of capture/ and frontends/ is provoked, its advice followed, and the result trained as in eager PyTorch.

Refusals that need several ranks, or a library, have tests of their own, which are named here.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.advised import Row
from helpers.refused_losses import BATCHES, LOSSES, MODELS
from helpers.refused_optimizers import GUARDS, OPTIMIZERS
from helpers.refused_options import OPTIONS_ROWS

import fxcomp
from fxcomp.errors import FxcompError

SOURCE, TESTS = Path(fxcomp.__file__).parent, Path(__file__).parent.parent

ROWS: dict[str, Row] = {**MODELS, **BATCHES, **LOSSES, **OPTIMIZERS, **GUARDS, **OPTIONS_ROWS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_a_refusal_says_what_to_do_and_that_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    row = ROWS[name]
    with pytest.raises(FxcompError) as caught:
        row.provoke()
    assert row.text in str(caught.value)
    assert row.at in raised_at(caught.value)
    if row.follow is not None:
        row.follow()


def raised_at(error: BaseException) -> list[str]:
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [code for code in codes if Path(code.co_filename).is_relative_to(SOURCE)]
    return [
        f"{Path(code.co_filename).relative_to(SOURCE)}::{_scope(code.co_filename, code.co_firstlineno)}" for code in own
    ]


def _scope(file: str, line: int) -> str:
    """Name a function as `places` does; Python 3.10's code objects have no qualified name."""
    found = [scope for scope, node in functions(ast.parse(Path(file).read_text())) if begins(node) == line]
    return found[0] if found else ""


def begins(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            scope = f"{outer}.{child.name}".removeprefix(".")
            if isinstance(child, ast.FunctionDef):
                yield scope, child
            yield from functions(child, scope)
        else:
            yield from functions(child, outer)


@dataclass(frozen=True)
class Place:
    at: str
    text: str
    """The words of the error that stand in the source where it is raised."""


def places() -> list[Place]:
    """List the places in capture/ and frontends/ that raise an error of fxcomp's."""
    found: list[Place] = []
    for path in sorted(path for part in ("capture", "frontends") for path in (SOURCE / part).rglob("*.py")):
        for scope, node in functions(ast.parse(path.read_text())):
            for each in _raised(node):
                words = [n.value for n in ast.walk(each) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                found.append(Place(f"{path.relative_to(SOURCE)}::{scope}", "".join(words)))
    return found


def _raised(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """List the errors that a function raises by itself, and not in one inside of it."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _is_ours(node.exc.func):
            yield node.exc
        stack.extend(ast.iter_child_nodes(node))


def _is_ours(raised: ast.expr) -> bool:
    name = raised.attr if isinstance(raised, ast.Attribute) else getattr(raised, "id", "")
    return name in ("refused", "_replaced") or (
        isinstance(kind := getattr(fxcomp.errors, name, None), type) and issubclass(kind, FxcompError)
    )


ELSEWHERE: dict[tuple[str, str], str] = {
    ("capture/backward_graph.py::_check_parameter", "Compile the model before it is sharded"): "",
    ("capture/faithful.py::explaining", "is given a PackedSequence"): (
        "frontends/test_advised.py::test_packed_sequences_are_refused_and_padded_ones_train_alike"
    ),
}


def covers(at: str, text: str, place: Place) -> bool:
    return at == place.at and (text in place.text or " " not in place.text)


def test_every_refusal_of_the_source_has_a_row_or_a_test():
    claims = [(row.at, row.text) for row in ROWS.values()] + list(ELSEWHERE)
    missing = [place for place in places() if not any(covers(*claim, place) for claim in claims)]
    assert not missing, "\n".join(f"{place.at}  {place.text[:90]!r}" for place in missing)


@pytest.mark.parametrize(("place", "test"), ELSEWHERE.items())
def test_a_refusal_that_is_tested_elsewhere_is_there(place: tuple[str, str], test: str):
    assert any(covers(*place, each) for each in places())
    file, _, name = test.partition("::")
    defined = [node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in defined


def test_at_least_sixty_refusals_are_followed():
    assert sum(row.follow is not None for row in ROWS.values()) >= 60
