"""Time the checks before each step separately.

    python benchmarks/guards.py                            a table
    python benchmarks/guards.py --json FILE --rounds 9     a record: model, part, case, median_us, spread_us

Times are processor times.

    key      compare all values that tracing specialized
    find     the type of a batch, the key, and looking up the program
    digest   compare the parameter groups' numbers with the last step's, and add a digest to an all_reduce; only this
             rank's work, with a transport that sends nothing
    prelude  answer two questions that Python asked of the batch: is an id too large, is one below 0
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from records import Records, options, table
from torch import Tensor, nn

import fxcomp
from fxcomp.capture.batch_type import batch_type
from fxcomp.capture.step_guard import StepGuard
from fxcomp.capture.training import Training
from fxcomp.commands.demo.gpt import GPT
from fxcomp.runtime.buffers import Buffers
from fxcomp.runtime.local_gradients import LocalGradients
from fxcomp.runtime.transport import Launch
from fxcomp.step.alike import Alike
from fxcomp.step.programs import Programs

REPEATS = 20
"""Steps per round; their median counts."""

Ask = Callable[[], Any]
Change = Callable[[int], Any]
Cases = Mapping[tuple[str, str], tuple[Ask, Change]]
"""Timed function and preceding change, by part and case."""


class Block(nn.Module):
    """Nine parameters and some plain attributes, as in a language model's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, dropout=0.1)
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Dropout(0.1)
        self.scale, self.causal, self.name = 0.5, True, "block"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0] * self.scale
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "example GPT": GPT,
    "5,000 parameters": lambda: nn.Sequential(*(Block() for _ in range(556))),
}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def timed(ask: Ask, change: Change) -> float:
    """Return the median processor time of `ask` after a change, in µs."""
    taken: list[float] = []
    for i in range(REPEATS + 3):
        change(i)
        start = time.thread_time_ns()
        ask()
        taken.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(taken[3:])


def nothing(_: int) -> None:
    """Change nothing."""


def key_and_find(model: nn.Module) -> Cases:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard, group = StepGuard(Training.of(model, loss_fn, optimizer)), optimizer.param_groups[0]
    # Only the lookup is timed, so no program is made.
    made: Any = SimpleNamespace(captured=SimpleNamespace(guard=None, prelude=None))
    programs = Programs(guard, lambda _batch, _varying: made)
    ids = torch.zeros(8, 128, dtype=torch.long)

    def find() -> None:
        kind, leaves = batch_type((ids, ids))
        programs.find((ids, ids), kind, leaves, 0)

    find()
    return {
        ("find", "nothing changes"): (find, nothing),
        ("key", "nothing changes"): (guard.key, nothing),
        ("key", "the learning rate changes"): (guard.key, lambda i: group.update(lr=1e-3 / (i + 1))),
        ("key", "train() and eval() in turns"): (guard.key, lambda i: model.train(i % 2 == 0)),
    }


def digest(model: nn.Module) -> Cases:
    training = Training.of(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3))
    nobody: Any = SimpleNamespace()
    runtime: Any = SimpleNamespace(gradients=LocalGradients())
    alike, memory, step, rate = Alike(training, nobody), Buffers(), [0], [1e-3]
    program: Any = SimpleNamespace(carriers=frozenset({"all_reduce_0"}))
    transport: Any = SimpleNamespace(all_reduce=lambda *_: SimpleNamespace(wait=lambda: None))
    launch = Launch("all_reduce_0", "all_reduce", 1, "world", "sum", "main")
    bucket = memory.take("pack_0", 1 << 16, torch.float32, torch.device("cpu"))
    options = StepGuard(training).key().options

    def carry() -> None:
        step[0] += 1
        numbers = [{"lr": rate[0], "betas_0": 0.9, "betas_1": 0.999, "eps": 1e-8, "weight_decay": 0.01}]
        alike.begin(step[0], program, runtime, numbers, options)
        alike.rider.start(memory, launch, bucket, transport).work.wait()

    carry()
    return {
        ("digest", "nothing changes"): (carry, nothing),
        ("digest", "the learning rate changes"): (carry, lambda i: rate.__setitem__(0, 1e-3 / (i + 2))),
    }


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 4)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.max() >= 256:
            raise ValueError("an id is too large")
        if not torch.all(ids >= 0):
            raise ValueError("an id is below 0")
        return self.token(ids)


def prelude(_: nn.Module) -> Cases:
    model, ids = Checked(), torch.zeros(8, 128, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = fxcomp.compile_step(model, loss_fn, optimizer, ids, checks=fxcomp.Checks(verify="never"))
    program = step.in_force.program
    assert program is not None, "a step has a program"
    questions = program.captured.prelude
    assert questions is not None, "the loss asks of its batch"
    assert questions.other_answer([ids]) is None, "the batch gets the answers that it was captured with"
    return {("prelude", "nothing changes"): (lambda: questions.other_answer([ids]), nothing)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    gc.disable()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kept, rows = Records(arguments.json), list[tuple[object, ...]]()
    for name, build in MODELS.items():
        model = build()
        for part in (key_and_find, digest, prelude):
            for (what, case), (ask, change) in part(model).items():
                medians = [timed(ask, change) for _ in range(arguments.rounds)]
                model.train()
                median, low, high = statistics.median(medians), min(medians), max(medians)
                kept.add({
                    "model": name, "parameters": len(list(model.parameters())), "part": what, "case": case,
                    "median_us": round(median, 1), "spread_us": [round(low, 1), round(high, 1)],
                })  # fmt: skip
                rows.append((name, what, case, f"{median:,.0f} ({low:,.0f}–{high:,.0f})"))
    print(table("model | part | between steps | µs >", rows))


if __name__ == "__main__":
    main()
