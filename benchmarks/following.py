"""Train jobs whose gradients change: measure each step's error under a plan that follows them and under one that stays.

    python benchmarks/following.py --json following.json

Four ranks of one machine train a small network by plain SGD, so what was applied is the difference of parameters over
the learning rate, and the error of every step is known without asking the step:

    v      = a rank's gradient + what it owes           error of a gradient = |applied - mean v|² / |mean v|²
    error of a step = sum of squares · error / sum of squares,  squares = the ranks' mean |gradient|²

    rate     the learning rate falls to a twentieth: noise is all that is left of the gradients
    layers   the large layers are frozen, and thawed again

`follows` is a step with an error budget; `stays` is the same until its first change, and keeps that plan. Ranks are
compared to the bit at every hundredth step, and what is owed before and behind every change of plan.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from fxcomp.commands.demo.launch_ranks import join, run_ranks

MARK = "@following "
RANKS = 4
WIDTH, DEPTH = 256, 4
RATE = 0.1


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    from torch import distributed as dist

    join()
    torch.set_num_threads(1)
    for job in arguments.jobs:
        for follows in (True, False):
            record = trained(job, follows, arguments)
            if dist.get_rank() == 0:
                print(MARK + json.dumps(record), flush=True)
    dist.destroy_process_group()


def trained(job: str, follows: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return what each step lost, and took."""
    import torch
    from torch import Tensor, nn
    from torch import distributed as dist

    import fxcomp
    from fxcomp.cluster.cluster import Cluster
    from fxcomp.cost.table import CostTable
    from fxcomp.runtime.runtime import Runtime
    from fxcomp.step.adaptation import Adaptation
    from fxcomp.step.plan_in_force import PlanInForce

    changes_at, again_at = arguments.steps // 3, 2 * arguments.steps // 3
    rank = dist.get_rank()
    truth = torch.randn(64, 16, generator=torch.Generator().manual_seed(7))

    class Network(nn.Module):
        """Layers whose gradients a mask may hold back."""

        def __init__(self) -> None:
            super().__init__()
            sizes = [64, *[WIDTH] * DEPTH, 16]
            self.layers = nn.ModuleList(nn.Linear(*each) for each in itertools.pairwise(sizes))

        def forward(self, inputs: Tensor, thawed: Tensor) -> Tensor:
            value = inputs
            for number, layer in enumerate(self.layers):
                is_large = 0 < number < DEPTH
                weight = thawed * layer.weight + (1 - thawed) * layer.weight.detach() if is_large else layer.weight
                value = nn.functional.linear(value, weight, layer.bias)
                value = torch.tanh(value) if number < DEPTH else value
            return value

    def loss_of(model: Network, batch: Any) -> Tensor:
        inputs, targets, thawed = batch
        return nn.functional.mse_loss(model(inputs, thawed), targets)

    def batch_at(number: int) -> Any:
        draw = torch.Generator().manual_seed(100_000 * rank + number)
        inputs = torch.randn(32, 64, generator=draw)
        targets = torch.tanh(inputs @ truth) + 0.1 * torch.randn(32, 16, generator=draw)
        is_frozen = job == "layers" and changes_at <= number < again_at
        return inputs, targets, torch.tensor(0.0 if is_frozen else 1.0)

    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    where = Cluster.parse("4x1, inter 100mbit@50us, intra 100gbit")
    step = fxcomp.compile_step(
        model,
        loss_of,
        optimizer,
        batch_at(0),
        cluster=where,
        costs=CostTable(),
        compress=fxcomp.Compress(within=float(arguments.budget), measured=True),
        checks=fxcomp.Checks(verify="never", race="off", replan="off"),
    )
    names = dict(model.named_parameters())
    gradients: dict[str, Tensor] = {}
    owed_apart: list[float] = []
    see, switch, act = Runtime.see, PlanInForce.switch, Adaptation.act

    def seen(self: Runtime, parameters: Any, values: Any, starts: Any = (), *factor: Any) -> None:
        see(self, parameters, values, starts, *factor)
        for name, value, start in zip(parameters, values, starts or [0] * len(values), strict=True):
            flat = gradients.setdefault(name, torch.zeros(names[name].numel()))
            flat[start : start + value.numel()] = value.flatten()

    def owed(force: PlanInForce) -> dict[str, Tensor]:
        found = force.state.owed_here(force.inputs.sizes, RANKS)
        return {name: found.get(name, torch.zeros(parameter.numel())) for name, parameter in names.items()}

    def switched(self: PlanInForce, *given: Any) -> None:
        before = owed(self)
        switch(self, *given)
        after = owed(self)
        for name in names:
            both = torch.stack([before[name], after[name]])
            dist.all_reduce(both)
            owed_apart.append(float((both[0] - both[1]).norm() / (both[0].norm() + 1e-30)))

    def acted(self: Adaptation, number: int) -> None:
        if follows or not self.moves:
            act(self, number)

    Runtime.see, PlanInForce.switch, Adaptation.act = seen, switched, acted
    errors, times, loss, is_same = list[float](), list[float](), 0.0, True
    try:
        for number in range(arguments.steps):
            if job == "rate" and number == changes_at:
                for group in optimizer.param_groups:
                    group["lr"] = RATE / 20
            rate = optimizer.param_groups[0]["lr"]
            before, due = {name: each.detach().clone() for name, each in names.items()}, owed(step.in_force)
            begun = time.perf_counter()
            loss = float(step(batch_at(number)))
            times.append(1e3 * (time.perf_counter() - begun))
            errors.append(_error(names, before, gradients, due, rate))
            if number % 100 == 99:
                whole = torch.cat([each.detach().flatten() for each in names.values()])
                first = whole.clone()
                dist.broadcast(first, 0)
                is_same &= bool(torch.equal(first, whole))
    finally:
        Runtime.see, PlanInForce.switch, Adaptation.act = see, switch, act
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    record = {
        "job": job, "follows": follows, "budget": arguments.budget, "steps": arguments.steps, "loss": loss,
        "errors": [round(error, 5) for error in errors], "ms": [round(ms, 3) for ms in slowest.tolist()],
        "moves": [[move.step, str(move)] for move in step.moves], "same_bits": is_same,
        "owed_apart": max(owed_apart, default=0.0), "looks": step.errors.looks if step.errors else 0,
    }  # fmt: skip
    step.close()
    return record


def _error(names: Any, before: Any, gradients: Any, due: Any, rate: float) -> float:
    """The error of one step; every rank calls it."""
    import torch
    from torch import distributed as dist

    lost = whole = 0.0
    for name, parameter in names.items():
        value = gradients[name] + due[name]
        sums = torch.cat([value, gradients[name].square().sum()[None]])
        dist.all_reduce(sums)
        mean, squares = sums[:-1] / RANKS, float(sums[-1]) / RANKS
        applied = (before[name] - parameter.detach()).flatten() / rate
        size = float(mean.square().sum())
        whole += squares
        lost += squares * (float((applied - mean).square().sum()) / size if size else 0.0)
    return lost / whole if whole else 0.0


def said(record: dict[str, Any]) -> str:
    """Write down a third of the job at a time: mean error, and the share of steps above the budget by a tenth."""
    third = record["steps"] // 3
    budget = float(record["budget"])
    parts = [record["errors"][k * third : (k + 1) * third] for k in range(3)]
    cells = (
        f"{statistics.fmean(part):.3f} ({max(part):.3f}, {sum(e > budget for e in part) / len(part):.0%})"
        for part in parts
    )
    return " | ".join(cells)


def main() -> int:
    arguments = parse()
    if arguments.rank:
        rank_main(arguments)
        return 0
    given = ["--jobs", *arguments.jobs, "--steps", str(arguments.steps), "--budget", arguments.budget, "--rank"]
    output = run_ranks([__file__, *given], ranks_per_host=RANKS, timeout_s=arguments.timeout)[0]
    records = [json.loads(line[len(MARK) :]) for line in output.splitlines() if line.startswith(MARK)]
    print("Mean error of each third of the steps (the largest, the share of steps above the budget)\n")
    print("| job | plan | first | second | third | changes | same bits | owed apart |")
    print("|---|---|---|---|---|---:|---|---:|")
    for record in records:
        plan = "follows" if record["follows"] else "stays"
        facts = f"{len(record['moves'])} | {record['same_bits']} | {record['owed_apart']:.1g}"
        print(f"| {record['job']} | {plan} | {said(record)} | {facts} |")
        for move in record["moves"]:
            print(f"    {move[1]}", file=sys.stderr)
    if arguments.json:
        data = {"date": time.strftime("%Y-%m-%d"), "records": records}
        Path(arguments.json).write_text(json.dumps(data) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["rate", "layers"])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--budget", default="0.3", help="a relative squared error")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--json", help="write the records here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
