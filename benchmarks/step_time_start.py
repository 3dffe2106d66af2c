"""Start a rank of step_time.py with the package and baselines of its checkout.

A host's first ranks belong to the first checkout, the next ranks to the second. All other files of this folder come
from the first checkout. They may only import parts of the package that the other checkout has, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path


def enter_group(environment: MutableMapping[str, str], groups: int, ranks_here: int) -> int:
    """Renumber this rank as in a launch of its group alone; return the group."""
    rank, local = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    host = rank // (groups * ranks_here)
    environment["RANK"] = str(host * ranks_here + local % ranks_here)
    environment["LOCAL_RANK"] = str(local % ranks_here)
    environment["WORLD_SIZE"] = str(int(environment["WORLD_SIZE"]) // groups)
    return local // ranks_here


def use_checkout(path: Path) -> None:
    """Import the package and baselines from another checkout, with a separate cache."""
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
