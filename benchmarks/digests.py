"""Time, alone, the comparison of the optimizers' numbers between ranks that the host does in every step.

    python benchmarks/digests.py                a table
    python benchmarks/digests.py --json FILE    records: model, parameters, groups, case, carrier, median_us, spread_us

Nothing is sent: a collective ends at once. What is timed is all that a step does for the comparison and would not do
without it: look for changed numbers, write the digest behind a bucket or a payload, and judge what comes back. It is
time of the processor, not of the clock. `steady`: no number has changed. `schedule`: the learning rate is another one
in each step. The last rows are a verified step's checksums of all parameters and of the optimizer's state.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from guards import Block, training_of
from torch import nn

from fxcomp.capture.optimizer import live_numbers
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Training
from fxcomp.commands.demo.gpt import GPT
from fxcomp.runtime.buffers import Buffers
from fxcomp.runtime.flight import Launch
from fxcomp.runtime.transport import NullTransport
from fxcomp.state.checksums import checksums
from fxcomp.step.alike import Alike

CPU = torch.device("cpu")

CARRIERS = {
    "a dense bucket": (Launch("all_reduce_0", "all_reduce", 1, "world", "sum", "main"), torch.float32, 1 << 20),
    "a payload of 32 kB": (Launch("all_gather_0", "all_gather", 1, "world", "sum", "main"), torch.uint8, 1 << 15),
}


def in_us(work: Callable[[], Any], repeats: int) -> tuple[float, list[float]]:
    taken: list[float] = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        taken.append(1e6 * (time.thread_time() - start))
    taken.sort()
    return statistics.median(taken), [taken[len(taken) // 10], taken[-len(taken) // 10]]


def a_step(training: Training, carrier: str, change: Callable[[], None]) -> Callable[[], float]:
    """One step's share: the time between changes, minus that of the same collective without a rider."""
    launch, dtype, elements = CARRIERS[carrier]
    buffers, transport = Buffers(), NullTransport()
    value = buffers.take("value", elements, dtype, CPU)
    program = cast("Any", SimpleNamespace(carriers=frozenset({launch.name})))
    runtime = cast("Any", SimpleNamespace(rider=None, updates=False))
    alike, guard = Alike(training, cast("Any", None)), StepGuard(training)
    read = [guard.key().options for _ in range(2)]  # equal, and read anew in each step

    def step() -> float:
        change()
        numbers, options = [live_numbers(group) for group in training.groups], read[0]
        read.reverse()
        start = time.thread_time()
        alike.begin(0, program, runtime, numbers, options)
        alike.rider.start(buffers, launch, value, transport).finish()
        with_it = time.thread_time()
        launch.start(value, transport, buffers.take).finish()
        return 1e6 * (2 * with_it - start - time.thread_time())

    return step


def measure(name: str, model: nn.Module, repeats: int) -> list[dict[str, Any]]:
    training = training_of(model)
    group, calls = training.optimizers[0].param_groups[0], iter(range(1, 1 << 30))
    cases = {"steady": lambda: None, "schedule": lambda: group.update(lr=1e-3 / next(calls))}
    records: list[dict[str, Any]] = []
    facts = {"model": name, "parameters": sum(1 for _ in model.parameters()), "groups": len(training.groups)}
    for case, change in cases.items():
        for carrier in CARRIERS:
            step = a_step(training, carrier, change)
            taken = sorted(step() for _ in range(repeats))
            spread = [taken[len(taken) // 10], taken[-len(taken) // 10]]
            records.append(
                {**facts, "case": case, "carrier": carrier, "median_us": statistics.median(taken), "spread_us": spread}
            )
    owned = training.owned
    tensors = [t for owner in owned for t in (owner.parameter, *owner.state.values()) if isinstance(t, torch.Tensor)]
    median, spread = in_us(lambda: checksums(tensors), max(5, repeats // 20))
    records.append({**facts, "case": "verified", "carrier": "the flags", "median_us": median, "spread_us": spread})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write records into a file")
    parser.add_argument("--repeats", type=int, default=400)
    arguments = parser.parse_args()
    gc.disable()
    torch.set_num_threads(1)
    models = {"example GPT": GPT(), "5,000 parameters": nn.Sequential(*(Block() for _ in range(556)))}
    records = [each for name, model in models.items() for each in measure(name, model, arguments.repeats)]
    for each in records:
        print(
            f"{each['model']:17} {each['parameters']:5} parameters  {each['case']:9} {each['carrier']:19}"
            f" {each['median_us']:9.1f} µs  ({each['spread_us'][0]:.1f} to {each['spread_us'][1]:.1f})"
        )
    if arguments.json is not None:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
        arguments.json.write_text(json.dumps({**facts, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
