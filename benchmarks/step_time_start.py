"""Begin a rank of step_time.py: choose the checkout whose package and baselines it runs.

The first ranks of a host belong to the first checkout, the next ones to the second. Everything else in this folder is
the first checkout's in both, and imports little of the package: what it imports must be in the other checkout too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path


def enter_group(environment: MutableMapping[str, str], groups: int, ranks_here: int) -> int:
    """Number this rank within its group, as a launcher of that group alone would. Return the group."""
    rank, local = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    host = rank // (groups * ranks_here)
    environment["RANK"] = str(host * ranks_here + local % ranks_here)
    environment["LOCAL_RANK"] = str(local % ranks_here)
    environment["WORLD_SIZE"] = str(int(environment["WORLD_SIZE"]) // groups)
    return local // ranks_here


def use_checkout(path: Path) -> None:
    """Import the package and the baselines from another checkout, and keep its measurements apart from ours."""
    sys.path.insert(1, str(path))
    os.environ["PYTHONPATH"] = str(path)
    os.environ["XDG_CACHE_HOME"] = str(path / "build" / "cache")
    spec = importlib.util.spec_from_file_location("baselines", path / "benchmarks" / "baselines.py")
    assert spec is not None, "a path to a Python file has a loader"
    assert spec.loader is not None, "a path to a Python file has a loader"
    baselines = sys.modules["baselines"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(baselines)


def main() -> None:
    settings = json.loads(sys.argv[1])
    checkouts: list[str] = settings["checkouts"]
    group = enter_group(os.environ, len(checkouts), settings["ranks_here"])
    if group:
        use_checkout(Path(checkouts[group]))
    from step_time_ranks import Settings, run

    run(Settings(**settings), group)


if __name__ == "__main__":
    main()
