"""Let plans race over shaped hosts, and compare what stays with DDP and with each runner's prediction.

    python benchmarks/race.py --hosts 2,4 --inter 100mbit,300mbit,1gbit,10gbit --json race.json --report race.md
    python benchmarks/race.py --quick          the mlp on two hosts over 300 Mbit/s, few steps

For each model, bandwidth and number of hosts one job is compiled as users do, and trained until its race is over. The
record has the runners in their predicted and their measured order, the winner, and what racing cost, in ms and as a
share of the first thousand steps. `compile_s` is what compiling took with a race, `programs_s` the part that emitted
the runners' programs. Then the winner and DDP take turns, in blocks of a few steps: `after_ms` and `ddp_ms` are the
medians of the slowest rank's steps. All ranks' parameters are compared at the end.

Thirty-two races take about an hour and a half, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, shape_this_host, why_not
from fxcomp.errors import FxcompError

MARK = "@race "  # begins the lines that rank 0 prints for the parent
MODELS = ("gpt", "resnet", "mlp", "many")
MORE_STEPS = 200  # within which every race ends, verified steps and warm-up included
BLOCK = 4  # steps of a turn beside DDP, of which the first does not count


def rank_main(arguments: argparse.Namespace) -> None:
    """Race every model over every bandwidth; rank 0 tells the parent."""
    import torch.distributed as dist

    join()
    for inter in arguments.inter:
        dist.barrier()
        shape_this_host(inter)
        for model in arguments.models:
            record = raced(model, inter, arguments)
            if dist.get_rank() == 0:
                print(MARK + json.dumps(record), flush=True)
        dist.barrier()
        shape_this_host(None)
    dist.destroy_process_group()


def raced(model: str, inter: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compile a job, train it until its race is over, and let the winner and DDP take turns."""
    import torch.distributed as dist
    from baselines import make_contestant
    from models import MODELS as JOBS

    import fxcomp
    from fxcomp.step.plan_in_force import PlanInForce

    emitting = [0.0]
    line_up = PlanInForce.line_up

    def timed(force: PlanInForce, *given: Any) -> None:
        begin = time.perf_counter()
        line_up(force, *given)
        emitting[0] += time.perf_counter() - begin

    job = JOBS[model]()
    begin = time.perf_counter()
    with patch.object(PlanInForce, "line_up", timed):
        step = fxcomp.compile_step(
            job.model, job.loss_fn, job.optimizer, job.batch, max_grad_norm=job.max_grad_norm, compress=arguments.mode
        )
    compile_s = time.perf_counter() - begin
    choice = step.in_force.decision.choice
    assert choice is not None, "a plan was chosen"
    rank, count = dist.get_rank(), 0
    while step.raced is None and count < MORE_STEPS:
        step(job.batch_at(count, rank))
        count += 1
    ddp = make_contestant("ddp_fp32", JOBS[model]())
    after, beside = list[float](), list[float]()
    for _ in range(arguments.rounds):
        after += block(step, job, rank, count)
        beside += block(ddp.step, job, rank, count)
        count += BLOCK
    record = {
        "hosts": dist.get_world_size(),
        "inter": inter,
        "model": model,
        "mode": arguments.mode,
        "predicted": choice.plan.digest,
        "runners": [
            {"name": each.name, "predicted_ms": each.step_us / 1e3, "wins": each.wins} for each in choice.runners
        ],
        "race": step.raced.to_json() if step.raced else None,
        "compile_s": compile_s,
        "programs_s": emitting[0],
        "after_ms": statistics.median(after),
        "ddp_ms": statistics.median(beside),
        "same_on_all_ranks": is_same(job.model),
        "notes": step.notes,
    }
    step.close()
    return record


def block(step: Any, job: Any, rank: int, first: int) -> list[float]:
    """The slowest rank's time of each step of a block but the first, in ms."""
    import torch
    import torch.distributed as dist

    times: list[float] = []
    for number in range(first, first + BLOCK):
        batch = job.batch_at(number, rank)
        begin = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - begin))
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()[1:]


def is_same(model: Any) -> bool:
    """Tell whether all ranks have the same parameters, to the bit."""
    import torch
    import torch.distributed as dist
    from torch import nn

    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(torch.equal(least, most))


# The page


def row(record: dict[str, Any]) -> list[str]:
    """A race as a line of the table."""
    race = record["race"]
    if race is None:
        return [str(record["hosts"]), record["inter"], record["model"], "", "no race", "", "", "", "", ""]
    ran = [each for each in race["runners"] if each["measured_ms"] is not None]
    left_out = [each["name"] for each in race["runners"] if each["measured_ms"] is None]
    predicted = " < ".join(
        f"{each['name']} {each['predicted_ms']:.3g}"
        for each in sorted(race["runners"], key=lambda x: x["predicted_ms"])
    )
    measured = " < ".join(
        f"{each['name']} {each['measured_ms']:.3g}" for each in sorted(ran, key=lambda x: x["measured_ms"])
    )
    return [
        str(record["hosts"]),
        record["inter"],
        record["model"],
        predicted,
        measured + (f"; not run: {', '.join(left_out)}" if left_out else ""),
        race["winner"],
        f"{race['last_step'] - race['first_step']}",
        f"{race['cost_ms']:.0f} ms, {race['share_of_1000_steps']:.2%}",
        f"{record['after_ms'] / record['ddp_ms']:.3f}",
        "yes" if record["same_on_all_ranks"] else "NO",
    ]


HEAD = ("hosts", "link", "model", "predicted order, ms", "measured order, ms", "stays", "steps", "racing cost",
        "after the race / DDP", "ranks equal")  # fmt: skip


def table(records: Sequence[dict[str, Any]]) -> str:
    """All races as Markdown, with a line that sums them up."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(row(record)) + " |" for record in records]
    known = [record for record in records if record["race"] is not None]
    first = [r for r in known if r["race"]["runners"][0]["name"] == r["race"]["winner"]]
    costs = [r["race"]["share_of_1000_steps"] for r in known]
    slower = [r for r in records if r["after_ms"] > 1.02 * r["ddp_ms"]]
    summary = "No plan raced."
    if known:
        summary = (
            f"{len(known)} races: the predicted plan stays in {len(first)}; racing cost {statistics.median(costs):.2%}"
            f" of the first thousand steps in the median and {max(costs):.2%} at most; {len(slower)} of"
            f" {len(records)} jobs are more than 2 % slower than DDP after it."
        )
    return "\n".join([*lines, "", summary, ""])


# The parent


def main() -> int:
    arguments = parse()
    if arguments.rank:
        rank_main(arguments)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and hosts are removed on the way out
    missing = why_not()
    if missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 2
    records: list[dict[str, Any]] = []

    def hear(_rank: int, line: str) -> None:
        if line.startswith(MARK):
            records.append(json.loads(line.removeprefix(MARK)))
            print(" | ".join(row(records[-1])), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(records, indent=1) + "\n")
            if arguments.report:
                arguments.report.write_text(table(records))

    given = ["--inter", ",".join(arguments.inter), "--models", ",".join(arguments.models), "--mode", arguments.mode]
    given += ["--rounds", str(arguments.rounds), "--rank"]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for count in arguments.hosts:
        with ShapedHosts(count) as hosts:
            run_ranks([__file__, *given], hosts=hosts, timeout_s=arguments.timeout, on_line=hear)
    print(table(records))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Let plans race over shaped hosts.")
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts, one rank each (default 2,4)")
    parser.add_argument("--inter", default="100mbit,300mbit,1gbit,10gbit", help="bandwidths between hosts")
    parser.add_argument("--models", default=",".join(MODELS), help="of benchmarks/models.py")
    parser.add_argument("--mode", default="balanced")
    parser.add_argument("--rounds", type=int, default=10, help=f"blocks of {BLOCK} steps beside DDP (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table here, as Markdown")
    parser.add_argument("--timeout", type=float, default=4 * 3600.0, help="seconds for each number of hosts")
    parser.add_argument("--quick", action="store_true", help="one race of the mlp, to see that it works")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hosts, arguments.inter, arguments.models, arguments.rounds = "2", "300mbit", "mlp", 2
    arguments.hosts = [int(count) for count in arguments.hosts.split(",")]
    arguments.inter, arguments.models = arguments.inter.split(","), arguments.models.split(",")
    for model in arguments.models:
        if model not in MODELS:
            parser.error(f"unknown model {model!r}, choose from {', '.join(MODELS)}")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FxcompError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
