"""One rank of a search: train as the search asks, on all ranks alike. `run.py` starts it as a module of its own."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fxcomp.capture.optimizer import all_optimizers
from fxcomp.cluster.cluster import Cluster
from fxcomp.commands.bisect.partly_dense import compressed_names, partly_dense
from fxcomp.commands.bisect.search import Search
from fxcomp.commands.demo.launch_ranks import join
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadJob, BadState, FxcompError
from fxcomp.frontends.compile_step import compile_step
from fxcomp.frontends.job import Job, load_job
from fxcomp.options import UNCHECKED
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan

MARK = "@bisect "
"""Begins the lines that rank 0 prints for the process that started it."""

_END = 4
"""The loss of a training is the mean over the last of so many parts of its steps."""


@dataclass(frozen=True, slots=True)
class Request:
    """The trainings that ranks are to make."""

    job: str
    plan: Plan
    cluster: Cluster
    feedback: ErrorFeedback
    steps: int
    seeds: int
    checkpoint: str | None

    def to_json(self) -> dict[str, Any]:
        data = {"plan": self.plan.to_json(), "cluster": self.cluster.to_json(), "feedback": asdict(self.feedback)}
        plain = {"job": self.job, "steps": self.steps, "seeds": self.seeds, "checkpoint": self.checkpoint}
        return {**plain, **data}

    @classmethod
    def from_json(cls, data: Any) -> Request:
        plan, cluster = Plan.from_json(data["plan"]), Cluster.from_json(data["cluster"])
        feedback = ErrorFeedback(**data["feedback"])
        return cls(data["job"], plan, cluster, feedback, data["steps"], data["seeds"], data["checkpoint"])


def main(path: str) -> int:
    """Search with all ranks, which see the same losses and so decide the same; rank 0 tells the parent."""
    request = Request.from_json(json.loads(Path(path).read_text()))
    join()
    is_first = dist.get_rank() == 0
    names = compressed_names(request.plan)

    def train(compressed: Collection[str], seed: int) -> float:
        return _trained(request, [name for name in names if name not in compressed], seed)

    def tell(note: str) -> None:
        if is_first:
            print(MARK + json.dumps({"note": note}), flush=True)

    try:
        found = Search(names, train, request.seeds, tell).run()
    except FxcompError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    if is_first:
        print(MARK + json.dumps({"found": found.to_json()}), flush=True)
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # untyped
    dist.destroy_process_group()
    return 0


def _trained(request: Request, dense: Collection[str], seed: int) -> float:
    """Train from the beginning, or from the checkpoint; return the loss at the end, the mean over ranks."""
    random.seed(seed)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]  # untyped
    job = load_job(request.job)
    if request.checkpoint is not None:
        _restore(job, request.checkpoint)
    rank, first = dist.get_rank(), seed * request.steps
    step = compile_step(
        job.model,
        job.loss_fn,
        job.optimizer,
        job.batch_at(first, rank),
        compress=Compress(plan=partly_dense(request.plan, dense), feedback=request.feedback),
        cluster=request.cluster,
        costs=CostTable(),
        max_grad_norm=job.max_grad_norm,
        max_grad_value=job.max_grad_value,
        checks=UNCHECKED,
    )
    with step:
        losses = [_loss(step(job.batch_at(first + number, rank))) for number in range(request.steps)]
    last = losses[-max(1, request.steps // _END) :]
    mean = torch.tensor(sum(last) / len(last), dtype=torch.float64)
    dist.all_reduce(mean)  # pyright: ignore[reportUnknownMemberType]  # untyped
    loss = mean.item() / dist.get_world_size()
    if not dense or math.isfinite(loss) or len(dense) < len(compressed_names(request.plan)):
        return loss
    raise BadJob(
        f"the loss of {request.job!r} is not finite after {request.steps} steps without any compression"
        f" (seed {seed}), so nothing can be compared with it.\n  Mend the job, or use fewer --steps."
    )


def _loss(result: Any) -> float:
    """Read the loss of a step, which may come with more."""
    return float(cast("tuple[Any, ...]", result)[0] if isinstance(result, tuple) else result)


def _restore(job: Job, path: str) -> None:
    """Load the model, and the optimizer if it is there. Raises BadState."""
    try:
        saved = cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
        has_both = {"model", "optimizer"} <= saved.keys()
        job.model.load_state_dict(saved["model"] if has_both else saved)
        if has_both:
            (optimizer,) = all_optimizers(job.optimizer)
            optimizer.load_state_dict(saved["optimizer"])
    except Exception as error:
        raise BadState(
            f"--checkpoint {path} does not fit the job: {str(error).strip()}\n"
            '  Save model.state_dict(), or {"model": model.state_dict(), "optimizer": optimizer.state_dict()}.'
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
