"""The scripts in examples/recipes, as modules and under torchrun."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "examples" / "recipes"


def loaded(name: str) -> ModuleType:
    """Import a recipe again, as nobody has changed it."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), RECIPES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def under_torchrun(script: str | Path, *arguments: object, ranks: int = 2, tries: int = 3) -> str:
    """Run a script, a file or its text, under torchrun; return what it prints. Fails with it if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(script, str):
            path = Path(folder) / "main.py"
            path.write_text(script)
        else:
            path = script
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        places = os.pathsep.join(map(str, (ROOT, RECIPES)))
        environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
        for _ in range(tries):
            ran = subprocess.run(
                [*command, str(path), *map(str, arguments)],
                capture_output=True, text=True, timeout=300, env=environment,
            )  # fmt: skip
            if "EADDRINUSE" not in ran.stderr:  # another test took the port that torchrun had found free
                break
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr
