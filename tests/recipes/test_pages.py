"""The lines that the pages of recipes show are lines of the recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.recipes import RECIPES, ROOT

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
SCRIPTS = {path.name: path.read_text() for path in sorted(RECIPES.iterdir()) if path.is_file()}
BLOCK = re.compile(r"^```(?:python|bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines(text: str) -> set[str]:
    """The lines, without their remarks, which two spaces set off."""
    return {line.partition("  # ")[0].strip() for line in map(str.strip, text.splitlines())} - {"", "..."}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_is_of_the_recipe_that_is_named_before_it(page: Path):
    text = page.read_text()
    for block in BLOCK.finditer(text):
        named = re.findall(r"examples/recipes/([\w.]+)", text[: block.start()])
        assert named, f"no recipe is named before {block[1]!r}"
        assert lines(block[1]) - lines(SCRIPTS[named[-1]]) == set()


def test_every_recipe_is_named_in_a_page():
    told = "".join(page.read_text() for page in (*PAGES, ROOT / "docs" / "recipes.md"))
    assert [name for name in SCRIPTS if f"`{name}`" not in told and f"recipes/{name}" not in told] == []
