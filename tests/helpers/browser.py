"""Open a page in a headless Chromium, and see what it asks for, what it complains about, and how it looks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), "")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000"),
    *("--enable-logging=stderr", "--v=0"),
)

_LOOK = """<script>
const box = each => each.getBoundingClientRect(), shown = each => box(each).width > 0;
const marks = [...document.querySelectorAll("svg text")].filter(shown);
const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
const found = {wide: document.documentElement.scrollWidth - window.innerWidth, outside: [], over: []};
const sides = box(document.body);
marks.forEach((mark, k) => {
  if (!mark.closest(".scroll") && box(mark).right > sides.right + 1) found.outside.push(mark.textContent);
  marks.slice(k + 1).forEach(other => {
    if (mark.closest("svg") === other.closest("svg") && over(box(mark), box(other)))
      found.over.push([mark.textContent, other.textContent]);
  });
});
//more
document.body.dataset.found = encodeURIComponent(JSON.stringify(found));
</script></body>"""


@dataclass(frozen=True)
class Visit:
    """A page that was opened, with what came of it."""

    dom: str
    console: list[str]
    """Lines that its script, or the browser about it, wrote to the console."""
    asked: list[str]
    """The paths that were asked for."""


def visit(page: str, folder: Path, *options: str, width: int = 1200, height: int = 900) -> Visit:
    """Open a page and return what its script made of it."""
    with _served(page) as (address, asked):
        done = _chromium(folder, *options, f"--window-size={width},{height}", "--dump-dom", address)
    console = re.findall(r"CONSOLE.*?\] (.*)", done.stderr)
    return Visit(done.stdout, console, list(asked))


def laid_out(page: str, folder: Path, *options: str, width: int, more: str = "") -> dict[str, Any]:
    """Open a page that must neither complain nor ask for more; say what of it lies over something or outside.

    `more` is a script that adds to `found`.
    """
    seen = visit(page.replace("</body>", _LOOK.replace("//more", more)), folder, *options, width=width)
    assert seen.console == [], "the browser complains"
    assert seen.asked == ["/report.html"], "the page asks for more than itself"
    found = re.search(r'data-found="([^"]*)"', seen.dom)
    assert found is not None, "the script that looks has not run to its end"
    return json.loads(unquote(found[1]))


def _chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@contextmanager
def _served(page: str) -> Iterator[tuple[str, list[str]]]:
    """Serve one page on this machine, and list what is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/report.html" else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode() if self.path == "/report.html" else b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/report.html", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
