"""Make a site of the pages: what mkdocs calls while it builds (mkdocs.yml).

Pages stay as a forge shows them. For the site, README and its neighbours become pages, decisions and commands get one,
entries `folder/*` of the navigation are filled in, and links to what is no page lead to the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from describe_commands import describe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

FRONT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site, by the file of the repository that has their text."""

DECISIONS, COMMANDS = "decisions/index.md", "reference/command_line.md"

ITEM = re.compile(r"( *)([-*]|\d+\.) +")
LINK = re.compile(r"(?P<start>\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?P<end>\))")
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the pages of folders in the navigation."""
    named = set(_paths(config.nav))
    config.nav = _filled(config.nav, named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is elsewhere."""
    for source, page in FRONT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, DECISIONS, content=decisions()))
    files.append(File.generated(config, COMMANDS, content=describe()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Lead links to pages of the site, or to the repository."""
    return indented(linked(markdown, page.file.src_uri, set(files.src_uris)))


def decisions() -> str:
    """List the decisions by their titles."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    lines = [f"- {page.name[:4]}: [{_title(page)}]({page.name})" for page in pages]
    return "\n".join(
        ["# Decisions", "", "Why things are as they are, in the order in which it was decided.", "", *lines]
    )


def linked(markdown: str, page: str, pages: set[str]) -> str:
    """Rewrite the links of a page, which are as a forge takes them; listings and code stay as they are."""
    sources = {site: source for source, site in FRONT.items()}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))

    def target(match: re.Match[str]) -> str:
        path = match["path"]
        if "://" in path or path.startswith("mailto:"):
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, path))
        found = FRONT.get(place, place.removeprefix("docs/"))
        for name in (found, f"{found}/index.md", f"{found}/README.md"):
            if (place in FRONT or place.startswith("docs/")) and name in pages:
                path = posixpath.relpath(name, posixpath.dirname(page) or ".")
                break
        else:
            if (ROOT / place).exists():
                path = f"{repository()}/{'tree' if (ROOT / place).is_dir() else 'blob'}/main/{place}"
        return f"{match['start']}{path}{match['anchor'] or ''}{match['end']}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(target, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(target, markdown[end:])])


def indented(markdown: str) -> str:
    """Indent what is in an item of a list by four spaces a level, as Python-Markdown wants it."""
    lines: list[str] = []
    widths: list[int] = []  # where the texts of the items begin that the line is in, from the outermost on
    is_code, is_after_blank, is_paragraph = False, True, False
    for line in markdown.splitlines():
        text = line.lstrip()
        space, item = len(line) - len(text), None if is_code else ITEM.match(line)
        while widths and text and not is_code and space < widths[-1] and (item or is_after_blank):
            widths.pop()
        if item and is_paragraph:
            lines.append("")  # else the item would be part of the paragraph before
        is_paragraph = bool(widths and text) and not item and (is_after_blank or is_paragraph)
        inside = widths[-1] if widths else 0
        lines.append(" " * (4 * len(widths) + max(0, space - inside)) + text if widths and text else line)
        if item and space - inside < 4:
            widths.append(item.end())
        is_code ^= text.startswith("```")
        is_after_blank = not text
    return "\n".join(lines) + "\n"


def repository() -> str:
    """The address of the repository."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def _paths(entries: Any) -> Iterator[str]:
    """List the pages that a navigation names."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        entries = list(entries.values())
    if isinstance(entries, list):
        for entry in entries:
            yield from _paths(entry)


def _filled(entries: Any, named: set[str]) -> Any:
    """Replace `folder/*` by the pages of the folder that are not named."""
    if isinstance(entries, dict):
        return {title: _filled(below, named) for title, below in entries.items()}
    if not isinstance(entries, list):
        return entries
    filled: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/*"):
            folder = entry.removesuffix("/*")
            names = sorted(os.listdir(ROOT / "docs" / folder))
            filled += [f"{folder}/{name}" for name in names if name.endswith(".md") and f"{folder}/{name}" not in named]
        else:
            filled.append(_filled(entry, named))
    return filled
