"""Train a small GPT twice, with plain DDP and with fxcomp, and show what the network cost each.

Two ranks on this machine, over loopback or over a shaped link (`--inter 300mbit`), learn the source of Python's
standard library. Both contestants, and a third that never communicates, take turns in the same processes, so that a
machine that drifts drifts for all. The third says what a step would cost without a network.
"""

# Much of torch has no types of its own:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from fxcomp.commands.demo.shaped_hosts import ShapedHosts, join, run_ranks, sent_by_this_host, why_not
from fxcomp.errors import FxcompError

if TYPE_CHECKING:  # the parent starts ranks and prints; it need not load torch
    import torch

    from fxcomp import CompiledStep
    from fxcomp.frontends.job import Job

    Step = Callable[[Any], torch.Tensor]

RANKS = 2
MODE = "balanced"
WARM_UP_STEPS = 2  # counted as training, not as time
BLOCK_STEPS = 2
LOSS_STEPS = 10  # the train loss is the mean of the last ones
MARK = "@demo "  # begins the lines that ranks print for the parent


@dataclass
class Contestant:
    """What one way of training did: seconds as the slowest rank sees them."""

    name: str
    step_s: list[float] = field(default_factory=list[float])
    wire_bytes: int = 0  # per step and host
    train_loss: float | None = None
    validation_loss: float | None = None
    exposed_ms: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3

    @property
    def steps_per_s(self) -> float:
        return 1e3 / self.median_ms


# What the user sees


def run_demo(*, inter: str | None = None, steps: int = 40, as_json: bool = False) -> int:
    """Run the demo and print what it found. Returns the exit status."""
    missing = why_not() if inter is not None else None
    if missing is not None:
        print(f"{missing}\n  Running over loopback instead, where the network costs little.", file=sys.stderr)
        inter = None
    where = f"a link of {inter}" if inter else "loopback"
    _progress(f"Two ranks train a 14 M parameter GPT on Python's standard library, over {where}.")
    result: list[Contestant] = []

    def hear(_rank: int, line: str) -> None:
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            _progress(content["note"])
        else:
            result.extend(Contestant(**entry) for entry in content["contestants"])

    command = ["-m", "fxcomp.commands.demo.run", "--rank-worker", "--steps", str(steps)]
    previous = signal.signal(signal.SIGTERM, _leave)  # so that ranks and hosts are removed on the way out
    try:
        if inter is None:
            run_ranks(command, ranks_per_host=RANKS, timeout_s=3600, on_line=hear)
        else:
            with ShapedHosts(RANKS, inter) as hosts:
                run_ranks(command, hosts=hosts, timeout_s=3600, on_line=hear)
    except KeyboardInterrupt:
        _progress("")
        print("Stopped; the ranks have ended.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    _progress("")
    if as_json:
        print(
            json.dumps({"inter": inter, "steps": steps, "contestants": [_summary(each) for each in result]}, indent=2)
        )
    else:
        print(describe(result, where))
    return 0


def describe(contestants: list[Contestant], where: str) -> str:
    """Write the comparison as a table, with a sentence that says who won."""
    named = {each.name: each for each in contestants}
    free = named["free"]
    rows = [("", "steps/s", "exposed ms/step", "MB on the wire/step", "train loss", "validation loss")]
    for each in contestants:
        rows.append(
            (
                each.name,
                f"{each.steps_per_s:.2f}",
                "–" if each is free else f"{exposed_ms(each, free):.0f}",
                "–" if each is free else f"{each.wire_bytes / 1e6:.2f}",
                _loss_text(each.train_loss),
                _loss_text(each.validation_loss),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"GPT, 2 ranks, {where}", *lines, "", verdict(named)])


def verdict(named: dict[str, Contestant]) -> str:
    """Say in a sentence whether fxcomp helped, and how much of the network's cost came back."""
    ddp, fxcomp, free = named["ddp"], named["fxcomp"], named["free"]
    ratio = ddp.median_ms / fxcomp.median_ms
    cost = ddp.median_ms - free.median_ms
    if abs(ratio - 1) < 0.03:
        text = "fxcomp and DDP are as fast as each other here: the network costs too little to win anything."
    elif ratio > 1:
        text = f"fxcomp makes a step {ratio:.2f} times as fast as DDP."
    else:
        text = f"fxcomp is slower than DDP here, by {1 / ratio - 1:.0%}."
    if cost > 0.03 * ddp.median_ms:
        text += f" It recovers {(ddp.median_ms - fxcomp.median_ms) / cost:.0%} of what the network costs DDP."
    if ddp.validation_loss is not None and fxcomp.validation_loss is not None:
        text += f" The validation losses differ by {fxcomp.validation_loss - ddp.validation_loss:+.3f}."
    return text


def exposed_ms(contestant: Contestant, free: Contestant) -> float:
    """How long a step stands still for the network: as the runtime measured it, or what it takes longer than free."""
    if contestant.exposed_ms is not None:
        return contestant.exposed_ms
    return max(contestant.median_ms - free.median_ms, 0.0)


def _summary(contestant: Contestant) -> dict[str, object]:
    return {"median_ms": contestant.median_ms, "steps_per_s": contestant.steps_per_s, **asdict(contestant)}


def _loss_text(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


def _progress(note: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{note}", end="", file=sys.stderr, flush=True)


def _leave(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


# What each rank does


def rank_main(steps: int) -> None:
    """Train all contestants in turns; rank 0 tells the parent."""
    import torch
    import torch.distributed as dist

    from fxcomp.commands.demo.gpt import gpt_job, training_text, validation_loss

    join()
    rank = dist.get_rank()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    jobs = {name: gpt_job() for name in ("ddp", "fxcomp", "free")}
    _tell(rank, note="fxcomp measures the link and plans")
    compiled = _compile(jobs["fxcomp"])
    take: dict[str, Step] = {
        "ddp": _eager_step(jobs["ddp"], is_parallel=True),
        "fxcomp": compiled,
        "free": _eager_step(jobs["free"], is_parallel=False),
    }
    contestants = {name: Contestant(name) for name in take}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in take}
    sent = dict.fromkeys(take, 0)
    total = WARM_UP_STEPS + steps
    for first in range(0, total, BLOCK_STEPS):
        order = list(take)
        random.Random(first).shuffle(order)
        for name in order:
            dist.barrier()
            before = sent_by_this_host(interface)
            for step in range(first, min(first + BLOCK_STEPS, total)):
                _tell(rank, note=f"step {step + 1} of {total}: {name}")
                batch = jobs[name].batch_at(step, rank)
                if name == "free":
                    dist.barrier()  # nothing in its step makes the ranks wait for each other
                start = time.perf_counter()
                losses[name].append(take[name](batch))
                contestants[name].step_s.append(time.perf_counter() - start)
            sent[name] += sent_by_this_host(interface) - before
    _tell(rank, note="validating")
    for name, each in contestants.items():
        slowest = torch.tensor(each.step_s[WARM_UP_STEPS:])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        each.step_s = cast("list[float]", slowest.tolist())
        each.wire_bytes = sent[name] // total // (RANKS if interface == "lo" else 1)  # on loopback all ranks send
        if name != "free":  # its ranks have drifted apart, so it has no loss to speak of
            recent = torch.stack([loss.detach() for loss in losses[name][-LOSS_STEPS:]]).mean()
            dist.all_reduce(recent)
            each.train_loss = recent.item() / dist.get_world_size()
            each.validation_loss = validation_loss(jobs[name].model, training_text())
    contestants["fxcomp"].exposed_ms = compiled.exposed_ms
    _tell(rank, contestants=[asdict(each) for each in contestants.values()])
    dist.destroy_process_group()


def _eager_step(job: Job, *, is_parallel: bool) -> Step:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = DistributedDataParallel(job.model) if is_parallel else job.model

    def step(batch: Any) -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss_fn(model, batch)
        loss.backward()
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(job.model.parameters(), job.max_grad_norm)
        job.optimizer.step()
        return loss

    return step


def _compile(job: Job) -> CompiledStep:
    import fxcomp

    return fxcomp.compile_step(
        job.model, job.loss_fn, job.optimizer, job.batch, mode=MODE, max_grad_norm=job.max_grad_norm
    )


def _tell(rank: int, **content: object) -> None:
    if rank == 0:
        print(MARK + json.dumps(content), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fxcomp.commands.demo.run", description="Train a small GPT with and without fxcomp."
    )
    parser.add_argument("--inter", help="the bandwidth between two hosts, like 300mbit; needs root")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_worker:
        rank_main(arguments.steps)
        return 0
    try:
        return run_demo(inter=arguments.inter, steps=arguments.steps, as_json=arguments.json)
    except FxcompError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
