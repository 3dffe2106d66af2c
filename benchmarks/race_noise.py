"""Simulate races on a disturbed machine, and count those that end on a slower plan than the best.

    python benchmarks/race_noise.py --races 2000

Each race has three to five runners whose true steps differ by up to 10, 50 or 200 %; predictions are up to 18 % off.
Steps vary by 4 % upwards. With some probability a step begins a disturbance: one to six steps take 1.5 to 4 times as
long. Printed is how much slower than the best the winners are, and what racing cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import NamedTuple

from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.search.runners import Runner
from fxcomp.step.race import Race

DISTURBED = (0.0, 0.02, 0.08)
"""The share of steps at which a disturbance begins."""

NOISE = 0.04
OFF = (0.85, 1.18)
"""Predicted over true steps."""


class Ended(NamedTuple):
    behind: float
    """The winner's true step over the best runner's, minus 1."""
    cost: float
    """The share of the first thousand steps."""


def raced(seed: int, disturbed: float) -> Ended:
    """Let a random field race."""
    draw = random.Random(seed)
    true_ms = [10 * (1 + draw.random() * draw.choice((0.1, 0.5, 2.0))) for _ in range(draw.randint(3, 5))]
    predicted_ms = [ms * draw.uniform(*OFF) for ms in true_ms]
    order = sorted(range(len(true_ms)), key=predicted_ms.__getitem__)
    race = Race([runner(k, predicted_ms[k]) for k in order], 0, lambda _: False)
    factors: dict[int, float] = {}
    while race.result is None:
        times: list[float] = []
        for step in race.timed_steps:
            if step not in factors:
                factors[step] = 1 + NOISE * abs(draw.gauss(0, 1))
                if draw.random() < disturbed:
                    factors |= {step + k: draw.uniform(1.5, 4.0) for k in range(draw.randint(1, 6))}
            times.append(true_ms[order[race.current]] * factors[step])
        race.end_turn(times)
    return Ended(true_ms[order[race.result.winner]] / min(true_ms) - 1, race.result.share)


def runner(number: int, predicted_ms: float) -> Runner:
    name = f"runner {number}"
    return Runner(name, Plan((Bucket((name,), (1,), DENSE),)), 1e3 * predicted_ms, 0.5, 1e-4 * number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate races on a machine that is disturbed.")
    parser.add_argument("--races", type=int, default=2000)
    races = parser.parse_args().races
    print("| disturbances begin at | more than 2 % behind | more than 10 % | mean loss | racing cost: mean | most |")
    print("|---|--:|--:|--:|--:|--:|")
    for disturbed in DISTURBED:
        ended = [raced(seed, disturbed) for seed in range(races)]
        behind, costs = [each.behind for each in ended], [each.cost for each in ended]
        shares = [sum(one > most for one in behind) / races for most in (0.02, 0.10)]
        cells = (disturbed, *shares, statistics.mean(behind), statistics.mean(costs), max(costs))
        print("| " + " | ".join(f"{cell:.2%}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
