"""What looking for changes before every step costs, beside the guard of an earlier commit, measured in turns.

    python benchmarks/guards.py                     a table
    python benchmarks/guards.py --json FILE         records: model, parameters, modules, case, guard, median_us, spread

Times are of the processor, not of the clock. `steady`: nothing has changed. `schedule`: the learning rate is another
object at every step. `toggled`: train() and eval() in turns, which both guards know already. The earlier guard is read
from git and looks at much less.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Training
from fxcomp.commands.demo.gpt import GPT

BEFORE = "22a9f62"
HERE = Path(__file__).parent


def guard_of(commit: str) -> ModuleType:
    """The guards of an earlier commit, as a module of their own."""
    text = subprocess.run(
        ["git", "show", f"{commit}:fxcomp/capture/step_guard.py"], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout
    path = Path(tempfile.mkdtemp()) / f"guards_{commit}.py"
    path.write_text(text)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "a file has a spec"
    assert spec.loader is not None, "and a loader"
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(nn.Module):
    """Eleven parameters and some plain attributes, as blocks of language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, dropout=0.1)
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Dropout(0.1)
        self.scale, self.causal, self.name = 0.5, True, "block"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x)[0] * self.scale
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def training_of(model: nn.Module) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training.of(model, loss_fn, optimizer)


def timed(ask: Callable[[], Any], change: Callable[[int], None], repeats: int, known: dict[Any, int]) -> list[float]:
    """What asking and finding the answer takes, in µs, after a change each."""
    taken: list[float] = []
    for i in range(repeats):
        change(i)
        start = time.thread_time()
        known.setdefault(ask(), 0)
        taken.append(1e6 * (time.thread_time() - start))
    return taken


def measure(name: str, model: nn.Module, rounds: int, repeats: int) -> list[dict[str, Any]]:
    training = training_of(model)
    group = training.optimizers[0].param_groups[0]
    old = guard_of(BEFORE).StepGuard(model, training.optimizers[0], training.owned)
    new = StepGuard(training)

    def ask_old() -> Any:
        old.check_identity()
        return old.key()

    cases: dict[str, Callable[[int], None]] = {
        "steady": lambda _: None,
        "schedule": lambda i: group.update(lr=1e-3 / (i + 1)),
        "toggled": lambda i: model.train(i % 2 == 0) and None,
    }
    records: list[dict[str, Any]] = []
    for case, change in cases.items():
        taken: dict[str, list[float]] = {"before": [], "now": []}
        known: dict[str, dict[Any, int]] = {"before": {}, "now": {}}
        for _ in range(rounds):
            for which, ask in (("before", ask_old), ("now", new.key)):
                timed(ask, change, 2, known[which])
                taken[which].append(statistics.median(timed(ask, change, repeats, known[which])))
        model.train()
        for which, medians in taken.items():
            records.append(
                {
                    "model": name,
                    "parameters": sum(1 for _ in model.parameters()),
                    "modules": sum(1 for _ in model.modules()),
                    "case": case,
                    "guard": which,
                    "median_us": statistics.median(medians),
                    "spread_us": [min(medians), max(medians)],
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write records into a file")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    gc.disable()
    torch.manual_seed(0)
    models = {
        "example GPT": GPT(),
        "150 parameters": nn.Sequential(*(Block() for _ in range(17))),
        "5,000 parameters": nn.Sequential(*(Block() for _ in range(556))),
    }
    records: list[dict[str, Any]] = []
    for name, model in models.items():
        found = measure(name, model, arguments.rounds, 20)
        records += found
        for before, now in zip(found[::2], found[1::2], strict=True):
            print(
                f"{name:18} {before['parameters']:5} parameters {before['modules']:5} modules  {before['case']:9}"
                f" before {before['median_us']:8.0f} µs   now {now['median_us']:8.0f} µs"
            )
    if arguments.json is not None:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
        arguments.json.write_text(json.dumps({**facts, "before": BEFORE, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
