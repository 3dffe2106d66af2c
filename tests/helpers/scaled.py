"""Train with a scale of the loss: single gradients that are not finite, and what eager PyTorch would do about them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxcomp

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""By parameter: what its gradient is multiplied by in fp16, in this order."""

HUGE = 60000.0
"""Nearly the largest value of fp16: a loss that is scaled by 2 makes it infinite."""


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**12, "growth_interval": 4, **options})


def with_faults(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take batches with faults: the loss is as it was, and so are gradients but for elements that have a fault."""

    def loss(model: nn.Module, batch: tuple[Any, Factors]) -> Tensor:
        inputs, faults = batch
        value = loss_fn(model, inputs)
        parameters = dict(getattr(model, "module", model).named_parameters())
        for name, (large, kept) in faults.items():
            term = ((parameters[name].half() * kept) * large).sum().float()
            value = value + (term - term.detach())
        return value

    return loss


def faults_of(model: nn.Module, names: Sequence[str], fault: tuple[str, int, str] | None = None) -> Factors:
    """No fault but one, at most: the parameter, the element, and what its gradient becomes there."""
    parameters = dict(model.named_parameters())
    found = {name: (torch.zeros(parameters[name].shape), torch.ones(parameters[name].shape)) for name in names}
    if fault is not None:
        name, element, kind = fault
        large, kept = found[name]
        large.view(-1)[element] = -HUGE if kind == "-inf" else HUGE
        kept.view(-1)[element] = float(kind != "nan")  # inf * 0
    return {name: (large.half(), kept.half()) for name, (large, kept) in found.items()}


class Eager:
    """Eager PyTorch with a scaler of its own, which goes on from another model's parameters at each step."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        groups: int = 1,
        backoff_factor: float = 0.5,
        **options: Any,
    ):
        self._wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
        self._loss = loss
        parameters = list(self._wrapped.parameters())
        self._optimizers = [torch.optim.SGD(parameters[k::groups], lr=0.0) for k in range(groups)]
        self._stepped = 0
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._count)
        self.scaler = scaler(backoff_factor=backoff_factor)
        self.mean = torch.zeros(0)
        """The gradient of the last step, flat, in fp64."""

    def _count(self, *_: Any) -> None:
        self._stepped += 1

    def skips(self, model: nn.Module, micro_batches: Sequence[Any]) -> bool:
        """Run a step of the model at the scale of now; tell if some optimizer is left out."""
        self._wrapped.module.load_state_dict(model.state_dict())
        self._stepped = 0
        for number, batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else self._wrapped.no_sync():
                self.scaler.scale(self._loss(self._wrapped, batch) / len(micro_batches)).backward()
        for optimizer in self._optimizers:
            self.scaler.unscale_(optimizer)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._wrapped.parameters()]
        self.mean = torch.cat([each.double().flatten() for each in gradients])
        for optimizer in self._optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        return self._stepped < len(self._optimizers)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))


def half_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


class Summing(torch.optim.Optimizer):
    """Plain SGD that adds up in fp64 what it is given: in parameters it is rounded."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["given"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["given"].add_(parameter.grad)
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Beside:
    """A compiled step beside eager PyTorch, which is put where the step is before each of them."""

    def __init__(self, step: fxcomp.CompiledStep, scaler: torch.amp.GradScaler, eager: Eager):
        """Keep books of what was applied and what is owed where the optimizers are `Summing`."""
        self.step, self.scaler, self._eager = step, scaler, eager
        self._model = step.training.model
        self._keeps_books = all(isinstance(each, Summing) for each in step.training.optimizers)
        self._due = torch.zeros(flat(self._model).numel(), dtype=torch.float64)
        self.wrong: list[str] = []
        """Differences from eager PyTorch, with their steps."""
        self.off = 0.0
        """Of the books, relative to all gradients; the most so far."""
        self.scales: set[float] = set()

    def run(self, batches: Sequence[Any], fault: Any = None) -> None:
        """Run a step of some micro-batches, of which one has a fault on some rank if one is given."""
        step, model = self.step, self._model
        before = self._states()
        skips, skipped, plan = self._eager.skips(model, batches), step.skipped_steps, step.plan
        for batch in batches:
            step(batch)
        self.scaler.update()
        was_skipped, after = step.skipped_steps > skipped, self._states()
        is_same = same_bits(before[:2], after[:2]) and (step.plan != plan or same_bits(before[2], after[2]))
        told = {
            "was it skipped": was_skipped == skips,
            "a fault is skipped": was_skipped or fault is None,
            "what a skipped step changes": not was_skipped or is_same,
            "what a step changes": was_skipped or not same_bits(before[0], after[0]),
            "the scale": self.scaler.get_scale() == self._eager.scaler.get_scale(),
            "replicas": is_same_everywhere(flat(model), float(was_skipped), self.scaler.get_scale()),
        }
        self.wrong += [f"step {step.steps - 1}: {what}, {fault}" for what, is_so in told.items() if not is_so]
        self.scales.add(self.scaler.get_scale())
        if self._keeps_books:
            self._balance(torch.zeros_like(self._due) if was_skipped else self._eager.mean)

    def load(self, scaler: dict[str, Any]) -> None:
        """Go on from a scaler's state, here and in eager PyTorch."""
        self.scaler.load_state_dict(scaler)
        self._eager.scaler.load_state_dict(scaler)

    def _states(self) -> list[Any]:
        optimizers = [each.state_dict() for each in self.step.training.optimizers]
        saved = self.step.state_dict()
        del saved["calendar"], saved["checksum"]  # a step that is left out has passed all the same
        return copy.deepcopy([self._model.state_dict(), optimizers, saved])

    def _balance(self, mean: Tensor) -> None:
        self._due += mean
        left, owners = owed(self.step), self.step.training.owners
        names = [name for name, _ in self._model.named_parameters()]
        both = torch.cat([left[name] for name in names])
        dist.all_reduce(both)
        both += torch.cat([owners[name].state["given"].flatten() for name in names])
        whole = float(self._due.norm())
        self.off = max(self.off, float((both - self._due).norm()) / whole if whole else 0.0)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def is_same_everywhere(*values: Tensor | float) -> bool:
    """Return whether values are the same on all ranks, to the bit; every rank calls it."""
    mine = torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in values]).view(torch.int64)
    first = mine.clone()
    dist.broadcast(first, 0)
    differ = torch.tensor(float(not torch.equal(first, mine)))
    dist.all_reduce(differ)
    return not bool(differ)


def same_bits(one: Any, other: Any) -> bool:
    """Compare states to the bit. The number of steps counts skipped ones, and that of looks those that were taken."""
    if isinstance(one, dict):
        kept = one.keys() - {"steps", "checksum"}
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in kept)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    return bool(one == other)


def owed(step: fxcomp.CompiledStep) -> dict[str, Tensor]:
    """Return this rank's part of the mean update that was left out so far, as its saved state has it, in fp64."""
    saved, sizes = step.state_dict(), {name: p.numel() for name, p in step.training.model.named_parameters()}
    found = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    for name, pieces in saved["residuals"].items():
        for piece in pieces:
            above, below = piece["weight"]
            part = found[name][piece["start"] : piece["start"] + piece["values"].numel()]
            part.add_(piece["values"].double(), alpha=above / below)
    for name, value in saved["owed"].items():
        found[name] += value.double() / dist.get_world_size()
    rate = saved["learning_rates"].get(0, 1.0)
    return {name: rate * value for name, value in found.items()}
