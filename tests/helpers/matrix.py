"""Cells of the matrix of what may be combined in a training step, and a run of one beside eager DDP."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp.errors import FxcompError
from fxcomp.plan.strategy import Strategy
from helpers.gathered import gathered
from helpers.plans import plan_in_turns
from helpers.replicas import flat_parameters, replica_fingerprint

STEPS = {"dense": 3, "int8": 60, "two-shot int4": 60}
"""Optimizer steps: dense ones are compared after each, compressed ones at the end."""
PLANS = {
    "dense": "all_reduce@world",
    "int8": "compress(int8) > all_gather@world > decompress",
    "two-shot int4": "compress(int4) > all_to_all@world > decompress > compress(int4) > all_gather@world > decompress",
}
CLIPS: dict[str, dict[str, float]] = {"none": {}, "norm": {"max_grad_norm": 0.5}, "value": {"max_grad_value": 0.02}}
LOSS_BOUND = {"dense": 1e-3, "compressed": 1e-2}
"""Of the loss of eager DDP: dense where sums have another order, and compressed."""
MISSED_BOUND = {"fp32": 1e-5, "16 bits": 0.05, "signs": 0.1, "compressed": 0.2}
"""The largest distance from eager DDP's parameters, as a share of their way. Sums in another order differ by
roundings, of 16 bits by larger ones; an optimizer that takes signs may turn the smallest updates around."""
ROWS = 64
Batch = tuple[Tensor, Tensor]


class Lion(torch.optim.Optimizer):
    """A user's optimizer, made of tensor operators."""

    def __init__(self, parameters: Any, lr: float = 0.001) -> None:
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


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.005, foreach=False),
    "Lion": lambda model: Lion(model.parameters(), lr=0.002),
}
AUTOCAST = {"bf16 autocast": torch.bfloat16, "fp16 autocast, GradScaler": torch.float16}
PRECISIONS = ("fp32", *AUTOCAST, "bf16 parameters")


@dataclass(frozen=True)
class Cell:
    """A combination of options."""

    optimizer: str
    precision: str
    accumulate: int
    clip: str
    plan: str
    ranks: int

    def __str__(self) -> str:
        return "-".join(str(each) for each in asdict(self).values())

    @property
    def has_one_order(self) -> bool:
        """Return whether eager DDP and the step add up the same numbers in the same order and type."""
        return self.ranks == 2 and self.accumulate == 1 and self.clip != "norm"


def product(ranks: int) -> list[Cell]:
    """Return all cells of so many ranks."""
    return [Cell(*of, ranks) for of in itertools.product(OPTIMIZERS, PRECISIONS, (1, 3), CLIPS, PLANS)]


def pairs(ranks: int) -> list[Cell]:
    """Return a dozen cells in which every two choices meet."""
    optimizers, clips, plans = list(OPTIMIZERS), list(CLIPS), list(PLANS)
    return [
        Cell(optimizers[o], precision, (1, 3)[(o + p) % 2], clips[(o + p) % 3], plans[(o + 2 * p) % 3], ranks)
        for p, precision in enumerate(PRECISIONS)
        for o in range(3)
    ]


@dataclass(frozen=True)
class Found:
    """A rank's findings in a cell."""

    apart: float = 0.0
    """From eager DDP: the largest distance of a parameter over the steps."""
    missed: float = 0.0
    """The distance at the end, in the Euclidean norm, as a share of the way that eager DDP's parameters went."""
    loss: float = 0.0
    eager_loss: float = 0.0
    first_loss: float = 0.0
    fingerprint: str = ""
    refused: str = ""
    """The class of the error that names what may not be combined."""
    failed: str = ""


def verdict(cell: Cell, found: Sequence[Found]) -> str:
    """Return `passes`, `refused: ERROR`, or `fails: WHY`, from what all ranks have seen of a cell."""
    if refused := {each.refused for each in found if each.refused}:
        return f"refused: {', '.join(sorted(refused))}"
    if failed := {each.failed for each in found if each.failed}:
        return f"fails: {'; '.join(sorted(failed))}"
    if len({each.fingerprint for each in found}) > 1:
        return "fails: replicas differ"
    apart, off = found[0].apart, abs(found[0].loss / found[0].eager_loss - 1)
    if cell.plan == "dense" and cell.has_one_order and apart > 0:
        return f"fails: {apart:.1e} from eager"
    if not found[0].missed <= MISSED_BOUND[_kind(cell)]:
        return f"fails: parameters end {found[0].missed:.2%} of their way from eager's"
    bound = LOSS_BOUND["dense" if cell.plan == "dense" else "compressed"]
    return "passes" if off <= bound else f"fails: the loss is {off:.2%} off"


def _kind(cell: Cell) -> str:
    if cell.plan != "dense":
        return "compressed"
    if cell.optimizer == "Lion":
        return "signs"
    return "fp32" if cell.precision == "fp32" else "16 bits"


def build(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    return model.to(torch.bfloat16) if precision == "bf16 parameters" else model


def batch_of(number: int, rank: int) -> Batch:
    """Classes that a linear layer can tell; a third is wrong at random, so that the loss ends at a floor."""
    draw = torch.Generator().manual_seed(1000 * rank + number)
    inputs = torch.randn(ROWS, 16, generator=draw)
    classes, others = inputs[:, :8].argmax(1), torch.randint(8, (ROWS,), generator=draw)
    return inputs, torch.where(torch.rand(ROWS, generator=draw) < 1 / 3, others, classes)


def loss_of(precision: str) -> Callable[[nn.Module, Batch], Tensor]:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].to(torch.bfloat16) if precision == "bf16 parameters" else batch[0]
        if precision not in AUTOCAST:
            return nn.functional.cross_entropy(model(inputs).float(), batch[1])
        with torch.autocast("cpu", AUTOCAST[precision]):
            return nn.functional.cross_entropy(model(inputs).float(), batch[1])

    return loss_fn


def scaler_of(precision: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision.startswith("fp16"))


def eager_step(
    wrapped: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    cell: Cell,
    batches: Sequence[Batch],
) -> None:
    loss_fn = loss_of(cell.precision)
    for place, batch in enumerate(batches):
        with wrapped.no_sync() if place < len(batches) - 1 else contextlib.nullcontext():
            scaler.scale(loss_fn(wrapped, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    if cell.clip == "norm":
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIPS["norm"]["max_grad_norm"], foreach=False)
    if cell.clip == "value":
        nn.utils.clip_grad_value_(wrapped.parameters(), CLIPS["value"]["max_grad_value"])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def train(cell: Cell) -> Found:
    """Train beside eager DDP on the same batches; losses at the end are of batches that nobody trained on."""
    rank, model = dist.get_rank(), build(cell.precision)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    eager, scaler, ours = OPTIMIZERS[cell.optimizer](wrapped), scaler_of(cell.precision), scaler_of(cell.precision)
    loss_fn = loss_of(cell.precision)
    plan = plan_in_turns(model, [Strategy.parse(PLANS[cell.plan])])
    step = fxcomp.compile_step(
        model,
        loss_fn,
        OPTIMIZERS[cell.optimizer](model),
        batch_of(0, rank),
        scaler=ours if ours.is_enabled() else None,
        accumulate=cell.accumulate,
        **gathered(plan=plan, verify="never", replan="off", race="off", **CLIPS[cell.clip]),
    )
    apart, start = 0.0, flat_parameters(model).double()
    with torch.no_grad():
        held_out = [batch_of(100_000 + k, 0) for k in range(8)]
        first_loss = sum(loss_fn(model, batch).item() for batch in held_out) / 8
    try:
        for number in range(STEPS[cell.plan]):
            batches = [batch_of(number * cell.accumulate + k, rank) for k in range(cell.accumulate)]
            for batch in batches:
                step(batch)
            if ours.is_enabled():
                ours.update()
            eager_step(wrapped, eager, scaler, cell, batches)
            apart = max(apart, (flat_parameters(model) - flat_parameters(wrapped)).abs().max().item())
        with torch.no_grad():
            losses = [sum(loss_fn(each, batch).item() for batch in held_out) / 8 for each in (model, wrapped.module)]
        ours_end, eager_end = flat_parameters(model).double(), flat_parameters(wrapped).double()
        missed = ((ours_end - eager_end).norm() / (eager_end - start).norm()).item()
        return Found(apart, missed, *losses, first_loss, replica_fingerprint(model))
    finally:
        step.close()


def train_all(cells: list[Cell]) -> list[Found]:
    """Train cell after cell in the processes of one job."""
    return [_attempt(cell) for cell in cells]


def _attempt(cell: Cell) -> Found:
    try:
        return train(cell)
    except FxcompError as error:
        return Found(refused=type(error).__name__)
    except Exception as error:
        return Found(failed=f"{type(error).__name__}: {error}"[:300])
