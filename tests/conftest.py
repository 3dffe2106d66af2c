"""Keep golden texts, which are read as carefully as code, and order and select tests."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from helpers.machine import keep_costs_of_memory_and_compressors

# The same examples in every run of the same tests: a failure on one machine is a failure on all.
hypothesis.settings.register_profile("fxcomp", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("fxcomp")

os.environ.pop("COLUMNS", None)  # reports are as wide as where nobody says how wide

GOLDEN = Path(__file__).parent / "golden"

WEEKLY = [Path(__file__).parent / name for name in ("benchmarks", "recipes")]
"""Folders that run with --slow, or where they are named: make test leaves them out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts again; then read the diff")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path not in WEEKLY or config.getoption("--slow"):
        return None
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in asked) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Workers steal tests from each other's ends. What a file shares is then made twice, so the dear ones come first.
    items.sort(key=lambda item: not starts_ranks(item))
    if not config.getoption("--slow"):
        seen: Counter[str] = Counter()
        for item in items:
            name = item.nodeid.partition("[")[0]
            one_in = item.get_closest_marker("one_in")
            if one_in is not None and seen[name] % one_in.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: make test-all"))


def starts_ranks(item: pytest.Item) -> bool:
    """Return whether a test lies in a file that starts ranks, which many of its tests may share."""
    return any(hasattr(getattr(item, "module", None), name) for name in ("run_ranks", "try_ranks", "run_alone"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("bucket_gradients/two_buckets.txt", text)` compares a text with the kept one."""

    def compare(name: str, text: str) -> None:
        path, text = GOLDEN / name, text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run pytest --update-golden, and read what it writes"
        assert text == path.read_text()

    return compare


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Cost tables and emitted sources of tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        keep_costs_of_memory_and_compressors()
        yield
