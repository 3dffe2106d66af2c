"""The site is built from the pages without a warning, asks nothing of other sites, and shows what a forge shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

import site_hooks
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in site_hooks.FRONT), *sorted(ROOT.glob("docs/**/*.md"))]
SHOWN = {"li", "ol", "ul", "pre", "code", "table", "tr", "h1", "h2", "h3", "h4", "blockquote", "em", "strong"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "built"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def place_of(page: Path) -> str:
    """The folder of the site in which a page is."""
    name = str(page.relative_to(ROOT))
    return re.sub(
        r"(^|/)(index|README)$", "", site_hooks.FRONT.get(name, name.removeprefix("docs/")).removesuffix(".md")
    )


class Elements(HTMLParser):
    """Counts elements, and lists what a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts, self.loaded, self._depth = Counter[str](), list[str](), 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "pre"
        if tag in SHOWN and not (tag == "code" and self._depth):
            self.counts[tag] += 1
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "link") and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded += [value for name in ("src", "href", "srcset") if (value := given.get(name))]

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "pre"


def outside(site: Path) -> Iterator[str]:
    """List what pages and stylesheets load from elsewhere, each with its place."""
    for page in site.rglob("*.html"):
        yield from (f"{page.name}: {url}" for url in Elements(page.read_text()).loaded if re.match("(https?:)?//", url))
    for sheet in site.rglob("*.css"):
        found = re.findall(r"""(?:url\(|@import)\s*['"]?((?:https?:)?//[^'")\s]+)""", sheet.read_text())
        yield from (f"{sheet.name}: {url}" for url in found)


@pytest.mark.slow
def test_every_page_is_in_the_navigation_and_built(site: Path):
    home = (site / "index.html").read_text()
    for page in PAGES:
        place = place_of(page)
        assert (site / place / "index.html").is_file(), page
        assert f'href="{place}/" class="md-nav__link' in home or not place, page


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path):
    assert list(outside(site)) == []


def test_what_is_loaded_from_elsewhere_is_found(tmp_path: Path):
    loads = '<script src="https://a.b/c.js"></script><link rel="stylesheet" href="//a.b/c.css"><img src="http://a.b/c">'
    (tmp_path / "page.html").write_text(f'{loads}<a href="https://a.b">a link</a><img src="here.svg">')
    (tmp_path / "sheet.css").write_text("@import 'https://a.b/d.css'; a {background: url(https://a.b/e.woff)}")
    assert len(list(outside(tmp_path))) == 5


@pytest.mark.slow
def test_words_of_pages_are_found(site: Path):
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {f"{place_of(page)}/".lstrip("/") for page in PAGES} <= places


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if ":::" not in page.read_text()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_has_the_lists_tables_and_listings_that_a_forge_shows(page: Path, site: Path):
    forge = MarkdownIt("commonmark").enable("table").render(page.read_text())
    html = (site / place_of(page) / "index.html").read_text()
    article = html[html.index("<article") : html.index("</article>")]
    assert Elements(article).counts == Elements(forge).counts


def test_links_lead_to_pages_or_to_the_repository():
    def linked(text: str, page: str) -> str:
        return site_hooks.linked(text, page, {"costs.md", "benchmarks/README.md", "decisions/index.md", "index.md"})

    home = site_hooks.repository()
    assert linked("[a](docs/costs.md#b)", "index.md") == "[a](costs.md#b)"
    assert linked("[a](../../README.md)", "benchmarks/README.md") == "[a](../index.md)"
    assert (
        linked("[a](docs/decisions) [b](LICENSE)", "index.md")
        == f"[a](decisions/index.md) [b]({home}/blob/main/LICENSE)"
    )
    assert linked("[a](../fxcomp/graph)", "costs.md") == f"[a]({home}/tree/main/fxcomp/graph)"
    assert linked("[a](https://b.c) [d](gone.md)", "costs.md") == "[a](https://b.c) [d](gone.md)"
    assert linked("`[a](../README.md)`\n```\n[a](../README.md)\n```", "costs.md").count("](../README.md)") == 2


def test_items_are_indented_by_four_spaces_a_level():
    text = "- a\n  b\n  - c\n\n  d\n- e\n\nf\n\n    code\n"
    assert site_hooks.indented(text) == "- a\n    b\n    - c\n\n    d\n\n- e\n\nf\n\n    code\n"
