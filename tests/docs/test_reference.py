"""The reference has an entry and an example that runs for every public name, and describes every argument."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from describe_commands import describe
from helpers.ranks import run_alone

import fxcomp
from fxcomp.__main__ import make_parser

griffe = pytest.importorskip("griffe")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
ENTRY = re.compile(r"^::: (\S+)\n((?: +.*\n)*)", re.MULTILINE)
MISSING = [name for name in ("lightning", "transformers") if importlib.util.find_spec(name) is None]
"""Optional libraries, whose examples run where they are installed."""
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def entries() -> dict[str, list[str]]:
    """The members that pages show of each name that has an entry."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for name, options in ENTRY.findall(page.read_text()):
            found[name] = (yaml.safe_load(options) or {}).get("options", {}).get("members", []) if options else []
    return found


ENTRIES = entries()
HIDE_CONSTRUCTORS = {
    name
    for page in PAGES
    for name, options in ENTRY.findall(page.read_text())
    if "merge_init_into_class: false" in options
}
LOADED = griffe.load("fxcomp", search_paths=[str(ROOT)], resolve_aliases=True)


def found(name: str) -> Any:
    """The source that griffe has read of a name, as mkdocstrings shows it."""
    here = LOADED[name.removeprefix("fxcomp.")]
    return here.final_target if here.is_alias else here


def names_in(text: str) -> set[str]:
    """Words with which code in backticks begins, or that stand in it before a comma or an equals sign."""
    return set(re.findall(r"(?<!`)`(\w+)", text)) | set(re.findall(r"(\w+)=", text))


def undescribed(name: str) -> Iterator[str]:
    """Name an entry's parameters, fields and members that no docstring describes."""
    entry = found(name)
    text = entry.docstring.value if entry.docstring else ""
    if not text:
        yield name
    if entry.is_function:
        yield from (f"{name}({each.name})" for each in entry.parameters if each.name not in names_in(text))
    if not entry.is_class:
        return
    cls = getattr(fxcomp, name.removeprefix("fxcomp."), None)
    if dataclasses.is_dataclass(cls):
        shown = [each.name for each in dataclasses.fields(cls) if each.init]
        described = {member for member in shown if entry[member].docstring} | names_in(text)
        yield from (f"{name}({each})" for each in shown if each not in described)
    elif constructor := shown_constructor(name):
        described = names_in(text + (constructor.docstring.value if constructor.docstring else ""))
        arguments = [each.name for each in constructor.parameters if each.name != "self"]
        yield from (f"{name}({each})" for each in arguments if each not in described)
    for member in ENTRIES[name]:
        yield from undescribed_member(name, member, text)


def shown_constructor(name: str) -> Any:
    """The `__init__` that a page shows with a class, if it has one of its own."""
    init = found(name).members.get("__init__")
    if name in HIDE_CONSTRUCTORS or init is None or not init.is_function:
        return None
    return init


def undescribed_member(name: str, member: str, of_class: str) -> Iterator[str]:
    here = found(name).all_members[member]
    here = here.final_target if here.is_alias else here
    text = here.docstring.value if here.docstring else ""
    if not text:
        yield f"{name}.{member}"
    if here.is_function:
        words = names_in(text) | names_in(of_class)
        yield from (
            f"{name}.{member}({each.name})"
            for each in here.parameters
            if each.name not in ("self", "cls") and each.name not in words
        )


def test_every_public_name_has_an_entry_and_an_example():
    public = {f"fxcomp.{name}" for name in fxcomp.__all__}
    assert public - ENTRIES.keys() == set()
    text = "\n".join(code for page in PAGES for code in PYTHON.findall(page.read_text()))
    assert {name for name in public if not re.search(rf"\b{re.escape(name)}\b", text)} == set()


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "fxcomp.errors"])
def test_every_argument_and_field_is_described(name: str):
    assert list(undescribed(name)) == []


def test_constructors_are_looked_at():
    """Their libraries need not be installed."""
    for name, wanted in (("lightning.FxcompStrategy", "options"), ("trainer.FxcompCallback", "trainer")):
        constructor = shown_constructor(f"fxcomp.frontends.{name}")
        assert wanted in [each.name for each in constructor.parameters]


def test_an_argument_without_a_description_is_found():
    assert names_in("`path` and `rank=` of ``code``, in `f(x, y=2)`: `max_grad_norm` clips") == {
        *("path", "rank", "f", "y", "max_grad_norm"),
    }


def test_every_error_has_a_docstring_and_there_are_at_most_15_kinds():
    from fxcomp import errors

    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    assert 1 < len(classes) <= 15 + 1, "besides FxcompError"
    assert [each.__name__ for each in classes if not each.__doc__] == []


def run(code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, "examples", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path):
    blocks = PYTHON.findall(page.read_text())
    code = "\n".join(block for block in blocks if not any(f"from {name}" in block for name in MISSING))
    assert code, page
    run_alone(run, code, str(tmp_path))


def test_the_page_of_the_command_line_has_every_command_and_option():
    page = describe()
    [commands] = [action for action in make_parser()._actions if action.dest == "command"]
    for name, parser in commands.choices.items():
        section = page[page.index(f"## fxcomp {name}\n") :].partition("\n## ")[0]
        options = {word for action in parser._actions for word in action.option_strings} - {"-h", "--help"}
        assert {option for option in options if f"`{option}" not in section} == set()
        assert parser.description is None
