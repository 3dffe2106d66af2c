"""Train the small tasks of tasks.py with momenta exchanged, under several optimizers, and compare with dense training.

    python benchmarks/moved_tasks.py --names dense --rates 4e-3,8e-3,1.6e-2 --tasks charlm --optimizers adamw
    python benchmarks/moved_tasks.py --seeds 0,1,2 --json moved_tasks.json
    python benchmarks/moved_tasks.py --short --json short.json                     40 short runs over seeds
    python benchmarks/moved_tasks.py --tasks charlm --optimizers adamw --names cmax16 --watch 10

All train through `compile_step`, on ranks of this machine, at the best of the rates that dense training was tried at
(`RATES`), along a cosine. Warm-up is a fifth of the steps in int4. A record has the loss over all that there is to
learn. A run has *diverged* when that is not finite, or no better than the start. With `--watch N` it has every N steps
the mean of (m / d)^2, over all parameters and of each: how far a step's update is from what the frozen second moment
says.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from exchange_point import sent_bytes, train_on_ranks
from fixed_plans import at_momentum
from records import options
from shaped import Teller, ends_well, join
from tasks import TASKS, Batch, Task, make_task
from torch import Tensor, nn

import fxcomp
from fxcomp.plan.compress import WARM_SHARE

SHORT_STEPS = 100
SHORT_RUNS = 40


class Lion(torch.optim.Optimizer):
    """The sign of a mean that leans to the gradient (Chen et al. 2023)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                towards = state["mean"] * 0.9 + parameter.grad * 0.1
                parameter.add_(towards.sign(), alpha=-group["lr"])
                state["mean"].mul_(0.99).add_(parameter.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "lion": Lion,
}
RATES = {
    "charlm": {"adamw": 8e-3, "sgd": 0.3, "nesterov": 0.3, "lion": 2e-3},
    "images": {"adamw": 3e-3, "sgd": 0.04, "nesterov": 0.04, "lion": 1e-3},
    "logreg": {"adamw": 0.02, "sgd": 0.6, "nesterov": 0.6, "lion": 3e-3},
}
"""By task and optimizer: dense training's best of those tried."""

CODES = {"cmax16": "cmax(16)", "cmax8": "cmax(8)", "sign": "sign(65536)", "int8": "int8"}


class Shaped(nn.Module):
    """A task's parameters in their shapes, and its loss of a batch."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        assert task.objective is not None, "the tasks of TASKS have batches"
        parts = zip(task.start.split(task.segments), task.shapes, strict=True)
        self.values = nn.ParameterList(nn.Parameter(part.view(shape).clone()) for part, shape in parts)
        self.objective = task.objective

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.objective(list(self.values), x, y)

    def flat(self) -> Tensor:
        return torch.cat([value.detach().flatten() for value in self.values])


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch)


def compressed(name: str, steps: int) -> Any:
    """The `compress=` of a contestant."""
    return "dense" if name == "dense" else at_momentum(CODES[name], fxcomp.Warmup(int4_steps=steps // WARM_SHARE))


def updates_squared(optimizer: torch.optim.Optimizer) -> list[float]:
    """Measure the mean of (m / d)^2 of each parameter, where d is what Adam divides its mean by."""
    found: list[float] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            correction = 1 - group["betas"][1] ** float(state["step"])
            divisor = (state["exp_avg_sq"] / correction).sqrt() + group["eps"]
            found.append((state["exp_avg"] / divisor).square().mean().item())
    return found


@dataclass(frozen=True)
class Cell:
    task: str
    optimizer: str
    name: str
    seed: int
    rate: float


def train(arguments: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    """Train once; returns the record."""
    task = make_task(cell.task, cell.seed, dist.get_world_size())
    steps = arguments.steps or task.steps
    batch_at = cast(Callable[[int, int], Batch], task.batch_at)
    rank, model = dist.get_rank(), Shaped(task)
    update = OPTIMIZERS[cell.optimizer](model.parameters(), lr=cell.rate)
    falling = torch.optim.lr_scheduler.LambdaLR(update, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    step = fxcomp.compile_step(
        model,
        loss_fn,
        update,
        batch_at(0, rank),
        compress=compressed(cell.name, steps),
        checks=fxcomp.Checks(verify="never", race="off", replan="off"),
        costs=fxcomp.CostTable(),
    )
    sent, watched = 0.0, list[dict[str, Any]]()
    for i in range(steps):
        loss = step(batch_at(i % task.steps, rank))
        falling.step()
        sent += sent_bytes(dict(step.payload_bytes), dist.get_world_size())
        after = i + 1 - steps // WARM_SHARE
        if arguments.watch and after >= 0 and (after == 1 or after % arguments.watch == 0):
            watched.append({"step": i + 1, "loss": float(loss), "squares": updates_squared(update)})
    step.close()
    loss, start = task.loss(model.flat()), task.loss(task.start)
    dense = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * sum(task.segments) * steps
    return {
        **asdict(cell),
        "steps": steps,
        "loss": loss if math.isfinite(loss) else None,
        "diverged": not loss < start,
        "fewer": dense / sent,
        **({"watched": watched} if watched else {}),
    }


def planned(arguments: argparse.Namespace) -> Iterator[Cell]:
    tasks, optimizers = arguments.tasks.split(","), arguments.optimizers.split(",")
    pairs = [(task, optimizer) for optimizer in optimizers for task in tasks]
    if arguments.short:
        for seed in range(SHORT_RUNS):
            task, optimizer = pairs[seed % len(pairs)]
            yield from (Cell(task, optimizer, name, seed, RATES[task][optimizer]) for name in ("dense", "cmax16"))
        return
    for task, optimizer in pairs:
        for rate in map(float, arguments.rates.split(",")) if arguments.rates else (RATES[task][optimizer],):
            for seed in map(int, arguments.seeds.split(",")):
                yield from (Cell(task, optimizer, name, seed, rate) for name in arguments.names.split(","))


def on_rank(arguments: argparse.Namespace) -> None:
    join()
    torch.set_num_threads(1)
    tell = Teller()
    for cell in planned(arguments):
        tell.send(train(arguments, cell))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--names", default="dense,cmax16,cmax8,sign")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rates", help="learning rates to try (default: the best known)")
    parser.add_argument("--steps", type=int, help="fewer or more than the task has, whose batches then come again")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_RUNS} runs of {SHORT_STEPS} steps")
    parser.add_argument("--watch", type=int, default=0, metavar="N", help="of AdamW: watch m / d every N steps")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps = SHORT_STEPS
    train_on_ranks(__file__, arguments, on_rank)


if __name__ == "__main__":
    sys.exit(ends_well(main))
