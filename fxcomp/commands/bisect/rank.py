"""One rank of a search: train as the search asks, on all ranks alike. `run.py` starts it as a module of its own.

    the seed                       the model, where the job makes it by random numbers; the same on all ranks
    steps from seed · steps on     the batches that next_batch draws by step and rank
    the seed and the rank          random numbers while it trains: masks, batches from the default generator

Two trainings of a seed begin with the same parameters and see the same batches. This is checked: state in a module
that the job imports lives on from one training to the next.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fxcomp.capture.optimizer import all_optimizers
from fxcomp.capture.structures import flatten
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
"""Begins what rank 0 prints for the process that started it, which may stand after something of the job."""

FOUND = "found.json"
"""The file beside the request into which rank 0 writes what was found."""

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
    least: float

    def to_json(self) -> dict[str, Any]:
        data = {"plan": self.plan.to_json(), "cluster": self.cluster.to_json(), "feedback": asdict(self.feedback)}
        plain = {"job": self.job, "steps": self.steps, "seeds": self.seeds, "checkpoint": self.checkpoint}
        return {**plain, **data, "least": self.least}

    @classmethod
    def from_json(cls, data: Any) -> Request:
        plan, cluster = Plan.from_json(data["plan"]), Cluster.from_json(data["cluster"])
        feedback = ErrorFeedback(**data["feedback"])
        plain = [data[name] for name in ("steps", "seeds", "checkpoint", "least")]
        return cls(data["job"], plan, cluster, feedback, *plain)


def main(path: str) -> int:
    """Search with all ranks, which see the same losses and so decide the same; rank 0 tells the parent."""
    request = Request.from_json(json.loads(Path(path).read_text()))
    join()
    is_first = dist.get_rank() == 0
    trainings = Trainings(request)

    def tell(note: str) -> None:
        if is_first:
            print(MARK + note, flush=True)

    try:
        found = Search(trainings.names, trainings.train, request.seeds, tell, least=request.least).run()
    except FxcompError as error:
        print(error, file=sys.stderr, flush=True)
        dist.destroy_process_group()  # with threads that are left, the process would abort
        return 2
    if is_first:
        Path(path).with_name(FOUND).write_text(json.dumps(found.to_json()))
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # untyped
    dist.destroy_process_group()
    return 0


class Trainings:
    """Trainings of a request, and how those of each seed began."""

    def __init__(self, request: Request) -> None:
        self.names = compressed_names(request.plan)
        self._request, self._rank, self._world_size = request, dist.get_rank(), dist.get_world_size()
        self._seen: dict[tuple[str, int], str] = {}

    def train(self, compressed: Collection[str], seed: int) -> float:
        """Train from the beginning, or from the checkpoint; return the loss at the end, the mean over ranks."""
        request, rank, first = self._request, self._rank, seed * self._request.steps
        _seed(seed)
        job = load_job(request.job)
        if request.checkpoint is not None:
            _restore(job, request.checkpoint)
        self._check_same("parameters", seed, job.model.state_dict().values())
        plan = partly_dense(request.plan, [name for name in self.names if name not in compressed])
        step = compile_step(
            job.model,
            job.loss_fn,
            job.optimizer,
            job.batch_at(first, rank),
            compress=Compress(plan=plan, feedback=request.feedback),
            cluster=request.cluster,
            costs=CostTable(),
            max_grad_norm=job.max_grad_norm,
            max_grad_value=job.max_grad_value,
            scaler=job.scaler,
            checks=UNCHECKED,
        )
        _seed(seed * self._world_size + rank)
        losses: list[float] = []
        batches: list[Any] = []
        with step:
            for number in range(request.steps):
                batch = job.batch_at(first + number, rank)
                if number in (0, request.steps - 1):
                    batches += [_digest(flatten(batch)[0])]
                losses += [_loss(step(batch))]
                if job.scaler is not None:
                    job.scaler.update()
        self._check_same("batches", seed, batches)
        last = losses[-max(1, request.steps // _END) :]
        loss = self._sum(sum(last) / len(last)) / self._world_size
        if compressed or math.isfinite(loss):
            return loss
        raise BadJob(
            f"the loss of {request.job!r} is not finite after {request.steps} steps without any compression"
            f" (seed {seed}), so nothing can be compared with it.\n  Mend the job, or use fewer --steps."
        )

    def _check_same(self, what: str, seed: int, values: Iterable[Any]) -> None:
        """Raise BadJob on all ranks if on one an earlier training of the seed had others."""
        digest = _digest(values)
        if self._sum(float(self._seen.setdefault((what, seed), digest) != digest)):
            raise BadJob(
                f"two trainings of {self._request.job!r} from seed {seed} differ in their {what}, so their losses"
                " cannot be compared: something lives on from one training to the next.\n"
                "  Make model, optimizer and what next_batch draws from inside of the job's function, or in its file,"
                " which runs again for each training; what it imports does not."
            )

    def _sum(self, value: float) -> float:
        """Sum up over ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)  # pyright: ignore[reportUnknownMemberType]  # untyped
        return total.item()


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)  # pyright: ignore[reportUnknownMemberType]  # untyped
    if "numpy" in sys.modules:
        cast("Any", sys.modules["numpy"]).random.seed(number)


def _digest(values: Iterable[Any]) -> str:
    """Hash tensors by their bytes, and plain values by what they print."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif not isinstance(value, bool | int | float | str | bytes | None):
            value = type(value).__name__  # what it prints may hold an address
        digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return digest.hexdigest()


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
