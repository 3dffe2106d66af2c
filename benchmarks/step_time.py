"""Measure training steps over shaped networks: fxcomp, DDP with and without its hooks, and no network at all.

    python benchmarks/step_time.py --hosts 2 --inter 100mbit,300mbit,1gbit,10gbit --json step_time.json

All contestants live in the same rank processes and take turns in short blocks, in another order each round, so that a
machine that drifts drifts for all. A step takes as long as its slowest rank. Plain DDP takes two turns a round; how far
the two differ is the A/A spread, the error bar of everything else. The JSON file holds one record for each contestant
and bandwidth; tables and verdicts are printed, and written to `--report`.

Four bandwidths take about fifteen minutes, and longer with `--loss-steps`, which trains every contestant from the same
seed at full speed to compare what they learned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from baselines import BASELINES, FREE, FXCOMP, Contestant, make_contestant

from fxcomp.cluster.link import parse_gb_per_s
from fxcomp.commands.demo.launch_ranks import join, run_ranks
from fxcomp.commands.demo.shaped_hosts import ShapedHosts, sent_by_this_host, shape_this_host, why_not
from fxcomp.errors import FxcompError
from fxcomp.frontends.job import Job, load_job

EXAMPLE_GPT = Path(__file__).parent.parent / "examples" / "gpt.py"
NAMES = (*BASELINES, *FXCOMP, *FREE)
TWICE = "ddp_fp32"  # measured against itself
WARM_UP_STEPS = 3  # DDP lays its buckets out anew after the first, PowerSGD starts with the third
HELD_OUT_BATCHES = 8
ENOUGH_BLOCKS = 20
MARGIN = 1.02  # "never slower" allows this factor, plus the A/A spread
LARGEST_SPREAD = 0.10  # no verdict above
RESAMPLES = 2000
UNSHAPED = "loopback"
MARK = "@step_time "  # begins the lines that ranks print for the parent


@dataclass
class Turns:
    """What one contestant did at one bandwidth. A block holds the times of its steps, in ms."""

    name: str
    blocks: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)  # the second turn in each round, for TWICE
    wire_bytes: float = 0.0  # sent by a host in a step
    predicted_ms: float | None = None
    predicted_free_ms: float | None = None
    final_loss: float | None = None

    @property
    def pairs(self) -> list[list[float]]:
        """All steps of each round."""
        return [a + b for a, b in zip(self.blocks, self.again, strict=True)] if self.again else self.blocks

    @property
    def median_ms(self) -> float:
        return statistics.median(flat(self.pairs))


# What each rank does


def rank_main(arguments: argparse.Namespace) -> None:
    """Measure all bandwidths; rank 0 sends a line of JSON to the parent for each."""
    import torch.distributed as dist

    join()
    rank = dist.get_rank()
    say_note = Reporter(rank)
    names = arguments.names

    def make(name: str, plan: object = None) -> Contestant:
        say_note(f"preparing {name}")
        return make_contestant(name, load_job(arguments.model), plan=plan)

    batches = load_job(arguments.model)
    lasting = {name: make(name) for name in names if name not in FXCOMP}
    run_each(lasting.values(), batches, rank, WARM_UP_STEPS)
    losses: dict[str, float] = {}  # by name and plan: equal plans learn the same
    for inter in arguments.inter:
        set_rate(inter)
        say_note.prefix = f"{inter}: "
        # What fxcomp measures and plans belongs to this link.
        compiled = {name: make(name) for name in names if name in FXCOMP}
        run_each(compiled.values(), batches, rank, WARM_UP_STEPS)
        contestants = [(lasting | compiled)[name] for name in names]
        turns = take_turns(contestants, arguments, batches, rank, say_note)
        set_rate(UNSHAPED)
        for turn, contestant in zip(turns, contestants, strict=True):
            if arguments.loss_steps and contestant.is_synchronised:
                key = f"{contestant.name} {contestant.plan}"
                if key not in losses:
                    fresh = make(contestant.name, contestant.plan)
                    losses[key] = final_loss(fresh, arguments.loss_steps, batches, rank, say_note)
                turn.final_loss = losses[key]
        say_note.send({"inter": inter, "turns": [asdict(turn) for turn in turns]})
    dist.destroy_process_group()


class Reporter:
    """Tell the parent, from rank 0."""

    def __init__(self, rank: int) -> None:
        self.is_silent = rank != 0
        self.prefix = ""

    def __call__(self, note: str) -> None:
        self.send({"note": self.prefix + note})

    def send(self, content: object) -> None:
        if not self.is_silent:
            print(MARK + json.dumps(content), flush=True)


def take_turns(
    contestants: Sequence[Contestant], arguments: argparse.Namespace, batches: Job, rank: int, say_note: Reporter
) -> list[Turns]:
    """Run blocks of all contestants, round after round."""
    turns = {
        c.name: Turns(c.name, predicted_ms=c.predicted_ms, predicted_free_ms=c.predicted_free_ms) for c in contestants
    }
    round_s = run_each(contestants, batches, rank, 1)
    steps, blocks = choose_lengths(round_s, arguments)
    say_note(f"{blocks} rounds, blocks of {steps} steps, about {blocks * steps * round_s:.0f} s")
    sent: dict[str, list[float]] = {c.name: [] for c in contestants}
    for turn_round in range(blocks):
        order = [(c, False) for c in contestants] + [(c, True) for c in contestants if c.name == TWICE]
        random.Random(turn_round).shuffle(order)
        for contestant, is_second in order:
            times, bytes_per_step = run_block(contestant, steps, batches, rank, arguments.hosts)
            (turns[contestant.name].again if is_second else turns[contestant.name].blocks).append(times)
            sent[contestant.name].append(bytes_per_step)
        say_note(f"round {turn_round + 1} of {blocks}")
    for name, turn in turns.items():
        turn.wire_bytes = statistics.mean(sent[name])
    return list(turns.values())


def choose_lengths(round_s: float, arguments: argparse.Namespace) -> tuple[int, int]:
    """How many steps a block and how many rounds fit into the time for one bandwidth."""
    budget_s = arguments.minutes * 60 / len(arguments.inter)
    steps = arguments.steps_per_block or min(max(int(budget_s / (ENOUGH_BLOCKS * round_s)), 1), 5)
    blocks = arguments.blocks or min(max(int(budget_s / (steps * round_s)), 12), 40)
    return agree(steps), agree(blocks)


def run_block(contestant: Contestant, steps: int, batches: Job, rank: int, hosts: int) -> tuple[list[float], float]:
    """Time some steps. Return the slowest rank's time of each, in ms, and the bytes that a host sent in a step."""
    import torch
    import torch.distributed as dist

    times: list[float] = []
    dist.barrier()
    before = sent_by_this_host(os.environ["GLOO_SOCKET_IFNAME"])
    for _ in range(steps):
        batch = batches.batch_at(contestant.next_step(), rank)
        if not contestant.is_synchronised:
            dist.barrier()
        start = time.perf_counter()
        contestant.step(batch)
        times.append((time.perf_counter() - start) * 1e3)
    sent = sent_by_this_host(os.environ["GLOO_SOCKET_IFNAME"]) - before
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    total = torch.tensor(sent if os.environ["LOCAL_RANK"] == "0" else 0)
    dist.all_reduce(total)
    return slowest.tolist(), total.item() / steps / hosts


def run_each(contestants: Iterable[Contestant], batches: Job, rank: int, steps: int) -> float:
    """Run each contestant for some steps, TWICE twice, and return the seconds they took."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for contestant in contestants:
        for _ in range(steps * (2 if contestant.name == TWICE else 1)):
            contestant.step(batches.batch_at(contestant.next_step(), rank))
    return time.perf_counter() - start


def final_loss(contestant: Contestant, steps: int, batches: Job, rank: int, say_note: Reporter) -> float:
    """Train afresh and return the loss on batches that nobody trained on, the mean over ranks."""
    import torch
    import torch.distributed as dist

    for step in range(steps):
        contestant.step(batches.batch_at(step, rank))
        if (step + 1) % 10 == 0:
            say_note(f"training {contestant.name}: step {step + 1} of {steps}")
    contestant.model.eval()
    with torch.no_grad():
        held_out = [batches.batch_at(1_000_000 + index, rank) for index in range(HELD_OUT_BATCHES)]
        mean = torch.stack([batches.loss_fn(contestant.model, batch) for batch in held_out]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def set_rate(inter: str) -> None:
    """Shape all hosts anew, between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0" and os.environ["GLOO_SOCKET_IFNAME"] != "lo":
        shape_this_host(None if inter == UNSHAPED else inter)
    dist.barrier()


def agree(number: int) -> int:
    """Take rank 0's number."""
    import torch
    import torch.distributed as dist

    box = torch.tensor(number)
    dist.broadcast(box, src=0)
    return int(box.item())


# What the numbers say


def records(model: str, hosts: int, inter: str, turns: Sequence[Turns]) -> list[dict[str, object]]:
    spread = aa_spread(turns)
    return [
        {
            "model": model,
            "hosts": hosts,
            "inter": inter,
            "name": turn.name,
            "measured_ms": quantiles(flat(turn.pairs)),
            "predicted_ms": turn.predicted_ms,
            "final_loss": turn.final_loss,
            "wire_bytes": round(turn.wire_bytes),
            "aa_spread": spread,
        }
        for turn in with_one_free(turns)
    ]


def with_one_free(turns: Sequence[Turns]) -> list[Turns]:
    """`free` is the faster of the steps without a network, under that one name."""
    free = [turn for turn in turns if turn.name in FREE]
    if not free:
        return list(turns)
    fastest = min(free, key=lambda turn: turn.median_ms)
    return [*(turn for turn in turns if turn.name not in FREE), replace(fastest, name=FREE[0])]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p10, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {"median": statistics.median(ordered), "p10": p10, "p90": p90, "n": len(ordered)}


def aa_spread(turns: Sequence[Turns]) -> float | None:
    """How far the same thing, measured twice, is from itself: |a / b − 1| of the medians."""
    for turn in turns:
        if turn.again:
            return abs(statistics.median(flat(turn.blocks)) / statistics.median(flat(turn.again)) - 1)
    return None


def analyse(inter: str, turns: Sequence[Turns]) -> str:
    """Write the table of one bandwidth, and the verdicts, as Markdown."""
    by_name = {turn.name: turn for turn in turns}
    spread = aa_spread(turns)
    lines = [f"## {inter}", "", "| name | median ms | p10–p90 | predicted | recovered | MB on the wire | loss |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for turn in turns:
        span = quantiles(flat(turn.pairs))
        cells = (
            turn.name,
            f"{span['median']:.0f}",
            f"{span['p10']:.0f}–{span['p90']:.0f}",
            "–" if turn.predicted_ms is None else f"{turn.predicted_ms:.0f}",
            "–" if (share := recovered(turn, by_name)) is None else f"{share:.0%}",
            f"{turn.wire_bytes / 1e6:.2f}",
            "–" if turn.final_loss is None else f"{turn.final_loss:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"A/A spread {spread:.1%}." if spread is not None else "No A/A measurement."]
    lines += [verdict(turn, by_name, spread) for turn in turns if turn.name in FXCOMP]
    lines += [prediction_line(turn, by_name) for turn in turns if turn.predicted_ms is not None]
    return "\n".join(lines) + "\n"


def recovered(turn: Turns, by_name: dict[str, Turns]) -> float | None:
    """The share of what the network costs plain DDP that this contestant gets back."""
    free = [by_name[name].median_ms for name in FREE if name in by_name]
    if turn.name in FREE or TWICE not in by_name or not free:
        return None
    plain = by_name[TWICE].median_ms
    return (plain - turn.median_ms) / (plain - min(free)) if plain > min(free) else None


def verdict(turn: Turns, by_name: dict[str, Turns], spread: float | None) -> str:
    """Compare with the best alternative: chosen on odd rounds, compared on even ones."""
    rivals = [by_name[name] for name in BASELINES if name in by_name]
    if not rivals or len(turn.blocks) < 2:
        return f"- {turn.name}: nothing to compare with."
    best = min(rivals, key=lambda rival: statistics.median(flat(rival.pairs[0::2])))
    mine, theirs = turn.pairs[1::2], best.pairs[1::2]
    low, high = bootstrap_ratio(mine, theirs)
    ratio = statistics.median(flat(mine)) / statistics.median(flat(theirs))
    text = f"- {turn.name} / {best.name} = {ratio:.3f}, 95 % interval {low:.3f}–{high:.3f} ({len(mine)} pairs): "
    if spread is None or spread > LARGEST_SPREAD:
        return text + "no verdict, the A/A spread is too large or unknown."
    if len(turn.blocks) < ENOUGH_BLOCKS:
        text += f"provisional, {len(turn.blocks)} rounds of {ENOUGH_BLOCKS}; "
    holds = low < MARGIN + spread
    return text + ("never slower: holds." if holds else "SLOWER than the best alternative.")


def bootstrap_ratio(mine: Sequence[list[float]], theirs: Sequence[list[float]]) -> tuple[float, float]:
    """The 95 % interval of the ratio of medians, when rounds are drawn again with replacement."""
    generator = random.Random(0)
    ratios: list[float] = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(range(len(mine)), k=len(mine))
        numerator = statistics.median(flat([mine[i] for i in drawn]))
        ratios.append(numerator / statistics.median(flat([theirs[i] for i in drawn])))
    ratios.sort()
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]


def prediction_line(turn: Turns, by_name: dict[str, Turns]) -> str:
    """The error of the prediction, raw and after scaling by how fast the machine was just now."""
    assert turn.predicted_ms is not None, "asked only for contestants with a prediction"
    text = f"- {turn.name}: prediction off by {turn.predicted_ms / turn.median_ms - 1:+.1%}"
    free = [by_name[name].median_ms for name in FREE if name in by_name]
    if not free or not turn.predicted_free_ms:
        return text + "."
    scaled = turn.predicted_ms * min(free) / turn.predicted_free_ms
    return text + f", {scaled / turn.median_ms - 1:+.1%} scaled to this run's free step."


def flat(blocks: Sequence[list[float]]) -> list[float]:
    return [step for block in blocks for step in block]


# The parent


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and hosts are removed on the way out
    try:
        contest(arguments)
    except FxcompError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def contest(arguments: argparse.Namespace) -> None:
    """Start the ranks, and write what they report as it comes."""
    found: list[dict[str, object]] = []
    sections: list[str] = []
    model = Path(arguments.model.rpartition(":")[0] or arguments.model).stem
    load_job(arguments.model)  # here too, so that a mistake in it is told before ranks start

    def hear(_rank: int, line: str) -> None:
        if not line.startswith(MARK):
            return
        content = json.loads(line.removeprefix(MARK))
        if "note" in content:
            show_progress(content["note"])
            return
        turns = [Turns(**turn) for turn in content["turns"]]
        found.extend(records(model, arguments.hosts, content["inter"], turns))
        sections.append(analyse(content["inter"], turns))
        show_progress("")
        print(sections[-1], flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        if arguments.report:
            title = f"# Step time: {model}, {arguments.hosts} hosts of {arguments.ranks_per_host}\n\n"
            arguments.report.write_text(title + "\n".join(sections))

    command = [str(Path(__file__).resolve()), *sys.argv[1:]]
    if arguments.inter == [UNSHAPED]:
        run_ranks(command, ranks_per_host=arguments.hosts * arguments.ranks_per_host, timeout_s=math.inf, on_line=hear)
        return
    missing = why_not()
    if missing is not None:
        sys.exit(f"{missing}\n  Without shaping: --inter {UNSHAPED}")
    with ShapedHosts(arguments.hosts) as hosts:
        run_ranks(command, hosts=hosts, ranks_per_host=arguments.ranks_per_host, timeout_s=math.inf, on_line=hear)


def show_progress(note: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{note}", end="", file=sys.stderr, flush=True)
    elif note and not note.partition("round ")[2]:
        print(note, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure training steps over shaped networks.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--inter", default="100mbit,300mbit,1gbit,10gbit", help=f"bandwidths between hosts, or {UNSHAPED}"
    )
    parser.add_argument("--model", default=f"{EXAMPLE_GPT}:job", metavar="FILE:FUNCTION")
    parser.add_argument("--names", default=",".join(NAMES), help="which contestants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write tables and verdicts here, as Markdown")
    parser.add_argument("--minutes", type=float, default=15.0, help="for measuring, over all bandwidths (default 15)")
    parser.add_argument("--blocks", type=int, help="rounds at each bandwidth, instead of what fits the time")
    parser.add_argument("--steps-per-block", type=int)
    parser.add_argument("--loss-steps", type=int, default=0, help="train so many steps for the final loss (default 0)")
    parser.add_argument("--quick", action="store_true", help="four rounds of one step, to see that it works")
    arguments = parser.parse_args()
    arguments.inter = arguments.inter.split(",")
    arguments.names = arguments.names.split(",")
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}, choose from {', '.join(NAMES)}")
    for inter in arguments.inter:
        if inter == UNSHAPED and len(arguments.inter) > 1:
            parser.error(f"{UNSHAPED} cannot be mixed with shaped bandwidths")
        if inter != UNSHAPED:
            try:
                parse_gb_per_s(inter)
            except FxcompError as error:
                parser.error(str(error))
    if arguments.quick:
        arguments.blocks, arguments.steps_per_block, arguments.loss_steps = 4, 1, 0
    return arguments


if __name__ == "__main__":
    main()
