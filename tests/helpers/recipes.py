"""The scripts in examples/recipes, as modules and under torchrun."""

from __future__ import annotations

import importlib.util
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
