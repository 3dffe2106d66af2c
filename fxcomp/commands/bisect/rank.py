"""Run the search of `fxcomp bisect` on ranks of this machine.

    determined by                  data
    the seed                       initial model, the same on all ranks
    the step and the rank          batches of next_batch; a seed's first step number is seed · steps
    the seed and the rank          random numbers in training: masks, batches from the default generator

All trainings of a seed must start from the same parameters and see the same batches.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fxcomp import status_line
from fxcomp.capture.optimizer import all_optimizers
from fxcomp.capture.structures import flatten
from fxcomp.cluster.cluster import Cluster
from fxcomp.commands.bisect.mend import compressed_names, partly_dense
from fxcomp.commands.bisect.search import SearchFindings, most_trainings, search
from fxcomp.commands.demo.launch_ranks import join, of_module, run_ranks
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption, BadState, FxcompError, PeerFailed
from fxcomp.frontends.compile_step import compile_step
from fxcomp.frontends.job import Job, compile_arguments, load_job
from fxcomp.options import UNCHECKED
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.plan import Plan
from fxcomp.report.document import count

_MARK = "@bisect "
"""Prefix of lines for the parent process."""

_FOUND = "found"
"""File of rank 0's result, next to the request."""

_END = 4
"""The loss of a training is the mean over the last 1/_END of its steps."""


@dataclass(frozen=True, slots=True)
class Trainings:
    """Settings of all trainings of a search."""

    job: str
    plan: Plan
    cluster: Cluster
    feedback: ErrorFeedback
    steps: int
    seeds: int
    checkpoint: str | None
    least: float
    _seen: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str], init=False)
    """Digests of initial parameters and of batches, by kind and seed."""

    @property
    def names(self) -> list[str]:
        return compressed_names(self.plan)

    def train(self, compressed: Collection[str], seed: int) -> float:
        """Train from scratch or from the checkpoint; return the final loss, averaged over ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        note = f"{len(compressed)} of {len(self.names)} tensors compressed, seed {seed + 1} of {self.seeds}"
        print(_MARK + note, flush=True)
        _seed(seed)
        job = load_job(self.job)
        if self.checkpoint is not None:
            _restore(job, self.checkpoint)
        self._check_same("parameters", seed, job.model.state_dict().values())
        plan = partly_dense(self.plan, [name for name in self.names if name not in compressed])
        steps = range(seed * self.steps, (seed + 1) * self.steps)
        step = compile_step(
            **compile_arguments(replace(job, batch=job.batch_at(steps[0], rank))),
            compress=Compress(plan=plan, feedback=self.feedback),
            cluster=self.cluster,
            costs=CostTable(),
            checks=UNCHECKED,
        )
        _seed(seed * ranks + rank)
        losses: list[float] = []
        batches: list[Any] = []
        with step:
            for number in steps:
                batch = job.batch_at(number, rank)
                if number in (steps[0], steps[-1]):
                    batches += [_digest(flatten(batch)[0])]
                result = step(batch)
                losses += [float(cast("tuple[Any, ...]", result)[0] if isinstance(result, tuple) else result)]
                if job.scaler is not None:
                    job.scaler.update()
        self._check_same("batches", seed, batches)
        last = losses[-max(1, len(steps) // _END) :]
        loss = _sum(sum(last) / len(last)) / ranks
        if compressed or math.isfinite(loss):
            return loss
        raise BadOption(
            f"the loss of {self.job!r} is not finite after {self.steps} steps without any compression"
            f" (seed {seed}), so nothing can be compared with it.\n  Mend the job, or use fewer --steps."
        )

    def _check_same(self, what: str, seed: int, values: Iterable[Any]) -> None:
        """Raise BadOption on all ranks if an earlier training of the seed had other values on any rank."""
        digest = _digest(values)
        if _sum(float(self._seen.setdefault((what, seed), digest) != digest)):
            raise BadOption(
                f"two trainings of {self.job!r} from seed {seed} differ in their {what}, so their losses"
                " cannot be compared: some state is kept from one training to the next.\n"
                "  Make model, optimizer and the source of next_batch inside the job's function, or in its file,"
                " which runs again for each training; modules that it imports do not."
            )


def search_on_ranks(trainings: Trainings) -> SearchFindings:
    """Search on ranks, and show the progress. Raises PeerFailed if the ranks end without a result."""
    began: list[float] = []

    def hear(rank: int, line: str) -> None:
        _, mark, note = line.partition(_MARK)
        if rank > 0 or not mark:
            return
        began.append(time.monotonic())
        if len(began) == 2:
            _tell_length(trainings, began[1] - began[0])
        status_line.show(f"training: {note}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request"
        path.write_bytes(pickle.dumps(trainings))
        command = of_module(__name__, str(path))
        run_ranks(command, ranks_per_host=trainings.cluster.world_size, timeout_s=math.inf, on_line=hear)
        try:
            return pickle.loads(path.with_name(_FOUND).read_bytes())
        except FileNotFoundError:
            raise PeerFailed(
                f"the ranks have ended before the search did, without an error: {trainings.job!r} ends its process.\n"
                "  Let nothing that it trains with call sys.exit or os._exit."
            ) from None


def _tell_length(trainings: Trainings, training_s: float) -> None:
    one, more = most_trainings(len(trainings.names), trainings.seeds)
    minutes = count(max(1, round(one * training_s / 60)), "minute")
    status_line.clear()
    text = f"At most {one} trainings, about {minutes}, if one tensor is guilty; {more} more for each further one."
    print(text, file=sys.stderr, flush=True)


def main(path: Path) -> int:
    """Run the search on this rank. All ranks get the same losses and result; rank 0 writes the result."""
    trainings: Trainings = pickle.loads(path.read_bytes())
    join()
    try:
        found = search(trainings.names, trainings.train, trainings.seeds, trainings.least)
    except FxcompError as error:
        print(error, file=sys.stderr, flush=True)
        dist.destroy_process_group()  # otherwise its threads would abort the process
        return 2
    if dist.get_rank() == 0:
        path.with_name(_FOUND).write_bytes(pickle.dumps(found))
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]  # untyped
    dist.destroy_process_group()
    return 0


def _sum(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)  # pyright: ignore[reportUnknownMemberType]  # untyped
    return total.item()


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)  # pyright: ignore[reportUnknownMemberType]  # untyped
    if "numpy" in sys.modules:
        cast("Any", sys.modules["numpy"]).random.seed(number)


def _digest(values: Iterable[Any]) -> str:
    """Hash tensors by their bytes, plain values by their repr, and other objects by their class name."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif not isinstance(value, bool | int | float | str | bytes | None):
            value = type(value).__name__  # its repr may contain an address
        digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return digest.hexdigest()


def _restore(job: Job, path: str) -> None:
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
    sys.exit(main(Path(sys.argv[1])))
