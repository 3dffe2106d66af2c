"""Let a link become slow while a job trains on it, and watch all ranks plan anew.

    python benchmarks/drift.py --before 1gbit --after 100mbit --json drift.json

One compiled step, `replan="auto"`, on shaped hosts. It trains until its costs have been compared once, the link changes
between two steps, and it trains on until the plan has changed and the race after that is over. The record says what a
step took before, on the slow link under the old plan, and under the new one; and how many steps it took to notice.
Step times are medians of the slowest rank's. Two to five minutes, by the rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, shape_this_host, why_not

MARK = "@drift "  # begins the line that rank 0 prints for the parent
LAYERS, WIDTH, ROWS = 6, 512, 128
LONGEST = 4  # comparisons on the slow link, after which nothing more is expected


def rank_main(arguments: argparse.Namespace) -> None:
    """Train through the change; rank 0 sends the record."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import fxcomp
    from fxcomp.step.race import LONGEST, WARM_STEPS

    join()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    shape_this_host(arguments.before)
    step = fxcomp.compile_step(
        model, loss, optimizer, batch(), compress=arguments.mode, checks=fxcomp.Checks(replan="auto")
    )
    judged = step.judged_every
    assert judged is not None, "replan='auto' compares"

    def train(steps: int) -> list[float]:
        """Step times in ms, the slowest rank's of each."""
        times = torch.zeros(steps)
        for k in range(steps):
            data = batch()
            start = time.perf_counter()
            step(data)
            times[k] = 1e3 * (time.perf_counter() - start)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    first = step.plan
    before = train(judged)
    plan, notes_before = step.plan, list(step.notes)
    dist.barrier()
    shape_this_host(arguments.after)
    dropped: list[float] = []
    for _ in range(LONGEST):
        dropped += train(judged)
        if step.plan != plan:
            break
    train(WARM_STEPS + LONGEST)  # a race at most
    after = train(arguments.steps)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.zeros_like(parameters) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, parameters)
    record = {
        "hosts": dist.get_world_size(), "before": arguments.before, "after": arguments.after, "mode": arguments.mode,
        "judged_every": judged, "before_ms": statistics.median(before), "dropped_ms": statistics.median(dropped),
        "after_ms": statistics.median(after), "noticed_after_steps": len(dropped),
        "replanned": step.plan != plan, "replanned_before_the_change": plan != first,
        "same_on_all_ranks": all(torch.equal(parameters, each) for each in everyone),
        "plan_before": str(plan), "plan_after": str(step.plan), "notes_before": notes_before,
        "notes": list(step.notes)[len(notes_before):],
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(MARK + json.dumps(record), flush=True)
    dist.destroy_process_group()


def main() -> int:
    arguments = parse()
    if arguments.rank:
        rank_main(arguments)
        return 0
    missing = why_not()
    if missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 2
    given = ["--before", arguments.before, "--after", arguments.after, "--mode", arguments.mode]
    given += ["--steps", str(arguments.steps), "--rank"]
    with ShapedHosts(arguments.hosts, arguments.before) as hosts:
        output = run_ranks([__file__, *given], hosts=hosts, timeout_s=arguments.timeout)[0]
    record = json.loads(next(line for line in output.splitlines() if line.startswith(MARK))[len(MARK) :])
    for name in ("before_ms", "dropped_ms", "after_ms"):
        print(f"{name:<12}{record[name]:10.1f}")
    print(f"noticed after {record['noticed_after_steps']} steps; same on all ranks: {record['same_on_all_ranks']}")
    print(*record["notes"], sep="\n")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--before", default="1gbit", help="the link's bandwidth at first")
    parser.add_argument("--after", default="100mbit", help="and after the change")
    parser.add_argument("--mode", default="balanced")
    parser.add_argument("--steps", type=int, default=40, help="under the new plan, after the race")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", help="write the record here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
