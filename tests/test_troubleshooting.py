"""Each error has a line in the page of troubles, and each warning its beginning."""

import inspect
import re
from pathlib import Path

import pytest

from fxcomp import errors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
NAMES = sorted(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.FxcompError) and kind is not errors.FxcompError
)
BEGINNINGS = [
    each.removeprefix("... ")
    for line in PAGE.split("## Warnings")[1].splitlines()
    if line.startswith("| *")
    for each in re.findall(r"\*([^*]+)\*", line.split("|")[1])
]


def test_every_error_and_none_that_does_not_exist_is_in_the_page():
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", PAGE))
    assert [name for name in NAMES if name not in named] == []
    others = {name for name in named - set(NAMES) if not hasattr(__import__("fxcomp"), name)}
    assert others == set()


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_every_warning_in_the_page_is_one_of_ours(beginning: str):
    sources = "".join(path.read_text() for path in (ROOT / "fxcomp").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    pattern = ".*".join(re.escape(part.strip(" :")) for part in beginning.split("..."))
    assert re.search(pattern, joined), beginning
