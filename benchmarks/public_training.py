"""Train a family of a public library eagerly and by a frontend of fxcomp on one rank, and compare the results.

    train("bert", rank=0, ranks=2, way=Way("torch.compile", steps=20))  ->  Record

A dense plan must equal eager PyTorch bit for bit. Under a compressed plan ranks must be bitwise equal, and final losses
are recorded.
"""

from __future__ import annotations

import copy
import logging
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from public_families import LARGEST, Family, loss_of, small
from torch import Tensor, nn

import fxcomp
from fxcomp.errors import FxcompError

Frontend = Literal["compile_step", "torch.compile", "ddp_hook"]
FRONTENDS: tuple[Frontend, ...] = ("compile_step", "torch.compile", "ddp_hook")
STEPS = 3
HOOK_STEPS = 10
"""A hook follows its plan from step 7 on."""

ROUNDING = 1e-6
RESULTS = ("identical", "rounded", "compressed", "refused", "wrong", "foreign", "hung", "untried")
MEANINGS = {
    "identical": "every bit equals eager PyTorch's",
    "rounded": "tensors are within 1e-6 of their largest element; the library computes differently while it is traced",
    "compressed": "under a compressed plan, all ranks are bit-identical",
    "refused": "fxcomp raises an error that names the obstacle",
    "wrong": "some number differs",
    "foreign": "an exception of another library",
    "hung": "the benchmark's time limit has passed",
    "untried": "eager PyTorch does not train it as it was configured here",
}


@dataclass(frozen=True)
class Way:
    frontend: Frontend = "compile_step"
    plan: str = "dense"
    steps: int = 0
    """0 selects a few steps, enough for a hook to follow its plan."""
    checkpoints: bool = False
    """Use the library's activation checkpointing if the family supports it."""

    @property
    def taken(self) -> int:
        return self.steps or (HOOK_STEPS if self.frontend == "ddp_hook" else STEPS)


COMPILED = Way()


@dataclass(frozen=True)
class Record:
    family: str
    ranks: int
    result: str
    frontend: str = "compile_step"
    plan: str = "dense"
    steps: int = 0
    task: str = ""
    detail: str = ""
    where: str = ""
    parameters: int = 0
    nodes: int = 0
    capture_s: float = 0.0
    seconds: float = 0.0
    eager_loss: float = 0.0
    """Last loss in eager training."""
    loss: float = 0.0


def train(name: str, rank: int, ranks: int, way: Way = COMPILED) -> Record:
    record = Record(name, ranks, "untried", way.frontend, way.plan, way.taken)
    try:
        family = small(name)
        record = replace(record, task=family.task)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in family.build().parameters())
        record = replace(record, parameters=parameters)
        if parameters > LARGEST:
            return replace(record, detail="it does not become small by the rules for all")
        model = _model(family, way)
        batches = [family.batch(model, 100 * rank + i) for i in range(way.taken)]
        expected = run_eagerly(copy.deepcopy(model), batches, rank, ranks)
    except Exception as error:
        return replace(record, detail=said(error), where=line_of(error))
    start = time.perf_counter()
    try:
        found, about = _RUNS[way.frontend](model, batches, rank, ranks, way.plan)
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # torch.compile wraps exceptions
        result = "refused" if isinstance(error, FxcompError) else "foreign"
        return replace(record, result=result, detail=said(error), where=line_of(error.__cause__ or error))
    record = replace(record, **{"capture_s": round(time.perf_counter() - start, 1), **about})
    last = f"loss {way.taken - 1}"
    record = replace(record, eager_loss=float(expected[last]), loss=float(found[last]))
    if way.frontend == "torch.compile":  # buffers are per rank there
        expected, found = ({k: v for k, v in some.items() if not k.startswith("buffer ")} for some in (expected, found))
    return _judged(record, expected, found) if way.plan == "dense" else _judged_between_ranks(record, found)


def _model(family: Family, way: Way) -> nn.Module:
    _seed(0)
    model: Any = family.build()
    if way.checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _judged(record: Record, expected: dict[str, Any], found: dict[str, Any]) -> Record:
    difference, share = first_difference(expected, found)
    result = "identical" if not difference else "rounded" if share <= ROUNDING else "wrong"
    return replace(record, result=result, detail=difference)


def _judged_between_ranks(record: Record, found: Mapping[str, Any]) -> Record:
    """Compare parameters and states with rank 0's; every rank calls it."""
    mine = {name: value for name, value in found.items() if name.startswith(("parameter ", "state "))}
    rank_0s: dict[str, Any] = {}
    for name, value in mine.items():
        rank_0s[name] = value.clone()
        if record.ranks > 1:
            dist.broadcast(rank_0s[name], 0)
    difference, _ = first_difference(rank_0s, mine)
    return replace(record, result="wrong" if difference else "compressed", detail=difference)


# Frontends; each returns everything that a step changes, and notes for the record


def _with_compile_step(
    model: nn.Module, batches: Sequence[Any], rank: int, _ranks: int, plan: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    optimizer = _optimizer(model)
    start = time.perf_counter()
    step = fxcomp.compile_step(model, loss_of, optimizer, batches[0], compress=plan)
    about: dict[str, Any] = {"capture_s": round(time.perf_counter() - start, 1)}
    _seed(rank)
    losses = [step(batch) for batch in batches]
    program = step.in_force.program
    about["nodes"] = len(program.captured.graph.graph.nodes) if program is not None else 0
    return everything(model, optimizer, losses), about


def _with_torch_compile(
    model: nn.Module, batches: Sequence[Any], rank: int, _ranks: int, plan: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    logger: Any = logging.Logger  # the library adds methods; a warning would break the graph for any backend
    torch._dynamo.config.ignore_logging_functions |= {logger.warning, logger.warning_once, logger.info}
    net: Any = fxcomp.compile_model(model, plan, fullgraph=True)
    return _loop(net, model, batches, rank), {}


def _with_hook(
    model: nn.Module, batches: Sequence[Any], rank: int, ranks: int, plan: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    hook = fxcomp.ddp_hook(compress=plan)
    found = run_eagerly(model, batches, rank, ranks, hook)
    assert hook.plan is not None, "the hook follows a plan by now"
    return found, {}


_RUNS: Mapping[str, Callable[..., tuple[dict[str, Any], dict[str, Any]]]] = {
    "compile_step": _with_compile_step,
    "torch.compile": _with_torch_compile,
    "ddp_hook": _with_hook,
}


def run_eagerly(model: nn.Module, batches: Sequence[Any], rank: int, ranks: int, hook: Any = None) -> dict[str, Any]:
    # Some families leave parameters out of the loss.
    net: Any = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
    if hook is not None:
        net.register_comm_hook(None, hook)
    return _loop(net, model, batches, rank, with_rank_0s_buffers=ranks > 1)


def _loop(
    net: Any, model: nn.Module, batches: Sequence[Any], rank: int, *, with_rank_0s_buffers: bool = False
) -> dict[str, Any]:
    optimizer = _optimizer(model)
    _seed(rank)
    losses: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if with_rank_0s_buffers:  # DDP broadcasts them before the next step, a compiled step at the end of this one
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    return everything(model, optimizer, losses)


# Comparison


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    found |= {f"buffer {name}": value for name, value in model.named_buffers()}
    found["random numbers"] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach()
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        # Eager AdamW has no state for a parameter without gradients.
        found |= {f"state {name}.{key}": value for key, value in state.items() if state["step"] > 0}
    return found


def first_difference(expected: dict[str, Any], found: dict[str, Any]) -> tuple[str, float]:
    """Return the first name with a bitwise difference, and the largest difference as a share of its tensor."""
    texts: list[str] = []
    largest = 0.0
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            return f"{name} is there only {'in fxcomp' if one is None else 'in eager PyTorch'}", float("inf")
        if torch.equal(one, other) or (one.isnan() & other.isnan() | (one == other)).all():
            continue
        off = (one.double() - other.double()).abs().max().item()
        texts.append(f"{name} is off by {off:.3g}")
        share = off / max(one.double().abs().max().item(), 1e-30)
        largest = max(largest, share if share == share else float("inf"))
    return (f"{texts[0]}, and {len(texts) - 1} more differ" if texts else ""), largest


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _seed(seed: int) -> None:
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def line_of(error: BaseException) -> str:
    """Return the innermost line outside torch and fxcomp."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not any(part in frame.filename for part in ("/torch/", "/fxcomp/", "<", "/benchmarks/")):
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"
    return ""
