"""Write the last part of docs/how_fxcomp_decides.md: the certainty of a gain, and a race of plans.

The example's table has wrong compressor costs, which the race corrects. Step times are simulated from the right costs,
with noise of a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import fill

from decision_example import CLUSTER, COSTS, WORKLOAD

from fxcomp.cost.measured import CompressorCost
from fxcomp.cost.table import CostTable
from fxcomp.cost.timeline import simulate
from fxcomp.search.choose import Choice
from fxcomp.search.decision import Raced
from fxcomp.search.plan_tasks import plan_tasks
from fxcomp.search.runners import WORTH_FOLLOWING, WORTH_TRYING, Runner
from fxcomp.search.shared_draws import DRAWS, LEAST_GAIN, drawn_errors
from fxcomp.step.calendar import Calendar
from fxcomp.step.race import COUNTED, FAR, HEAT, LONGEST, MOST_AFTER_HEATS, MOST_LATER, OUT, TURN, Race

DEARER = 8.0
"""Compressor time on the machine, relative to the table."""

WIDTH = 120  # of a line of prose
_NOISE = 0.01  # relative standard deviation of a step's time
_BEGINS = 2  # steps

GATE = """
## Gains that are worth following

Costs have errors: here links {links}, compute {compute} and compressors {compressors} (standard deviations; the last
two are assumed). So the step is simulated in {draws} *draws*. Each draw multiplies these costs by random factors, the
same for all plans, so common errors cancel. A plan *wins* a draw if its step is at least {gain} shorter than dense.

"""

GATE_END = """
A plan that wins at least {trying} of the draws may race; dense and bf16 always may. Until the race is over, the job
follows the plan predicted best if it wins {following}, and otherwise the dense plan. Without a race
(`Checks(race="off")`, or `fxcomp explain`, which only predicts) this choice is final.

"""

RACE = """
## The race

In the running job, these plans (*runners*) take turns on all ranks. The first turn of each runner has {heat} steps.
Later turns have {turn} steps: one turn for each of the best {first} runners, then turns for the best {later}. A
runner drops out when its median step exceeds the best median by more than {out:.0f} standard errors of the
difference. A runner predicted to take more than {far:.0f} times as long as the best does not run. The race ends when
one runner is left, when the rest have {counted} counted steps, or after {longest} steps. The first step of a turn,
which allocates memory, and verified steps are not counted. A runner with few counted steps is compared by its
shortest step, because other load only lengthens steps.

Suppose that compressors take {dearer:.0f} times as long on this machine as in the table of prices:

"""

RACE_END = """
{sentence}

The cost of a race is the extra time of the losers' steps. `step.explain()` shows the race of your own job. When the
step time drifts, plans race again.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A timed turn of a race."""

    steps: tuple[int, ...]
    runner: Runner
    times_ms: tuple[float, ...]


def gate(choice: Choice) -> str:
    """Write the certainty of the gain."""
    compute, links, compressors = drawn_errors(COSTS.error, COSTS.compute_error)
    words = GATE.format(
        links=_percent(links),
        compute=_percent(compute),
        compressors=_percent(compressors),
        draws=DRAWS,
        gain=_percent(LEAST_GAIN),
    )
    rows = [
        f"| {runner.name} | {runner.step_us / 1e3:.2f} | {_percent(runner.wins)} | {runner.loss:.2g} |"
        for runner in choice.runners
    ]
    head = ["| plan | predicted step, ms | wins against dense | error |", "|---|--:|--:|--:|"]
    end = GATE_END.format(trying=_percent(WORTH_TRYING), following=_percent(WORTH_FOLLOWING))
    end += fill(f'The report states: "{choice.reason}."', WIDTH) + "\n"
    return words + "\n".join([*head, *rows]) + "\n" + end


def race(choice: Choice) -> str:
    """Write a race: each runner's prediction, first turn and result."""
    turns, raced = run_race(choice)
    words = RACE.format(
        dearer=DEARER,
        heat=HEAT,
        turn=TURN,
        first=MOST_AFTER_HEATS,
        later=MOST_LATER,
        counted=COUNTED,
        out=OUT,
        far=FAR,
        longest=LONGEST,
    )
    rows: list[str] = []
    for runner in raced.runners:
        mine = [turn for turn in turns if turn.runner.plan == runner.plan]
        first = ", ".join(f"{ms:.1f}" for ms in mine[0].times_ms) if mine else ""
        steps = sum(len(turn.steps) for turn in mine)
        median = "not timed" if runner.measured_ms is None else f"{runner.measured_ms:.1f}"
        rows.append(f"| {runner.name} | {runner.step_us / 1e3:.1f} | {first} | {steps} | {median} |")
    head = ["| runner | predicted, ms | first turn, ms | steps | median, ms |", "|---|--:|--:|--:|--:|"]
    sentence = str(raced)
    end = RACE_END.format(sentence=fill(f"{sentence[0].upper()}{sentence[1:]}", WIDTH))
    return words + "\n".join([*head, *rows]) + "\n" + end


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def run_race(choice: Choice) -> tuple[list[Turn], Raced]:
    """Race the runners of a choice on a machine with the right costs, from the chosen plan on."""
    runners = sorted(choice.runners, key=lambda runner: runner.plan != choice.plan)
    true_ms = [step_ms(runner, right_costs()) for runner in runners]
    noise = random.Random(0)
    contest = Race(runners, _BEGINS, Calendar().free_steps)
    turns: list[Turn] = []
    while contest.result is None:
        current, steps = contest.turn.number, contest.turn.steps
        times = tuple(true_ms[current] * (1 + _NOISE * noise.gauss(0, 1)) for _ in steps)
        turns.append(Turn(steps, runners[current], times))
        contest.end_turn(times)
    return turns, contest.result


def step_ms(runner: Runner, costs: CostTable) -> float:
    """Simulate a runner's step by these costs."""
    return simulate(plan_tasks(WORKLOAD, runner.plan, costs, CLUSTER), costs.processors).step_time_us / 1e3


def right_costs() -> CostTable:
    """Return the example's table with the true compressor costs."""
    dearer: Mapping[str, CompressorCost] = {key: _scaled(cost) for key, cost in COSTS.compressors.items()}
    return replace(COSTS, compressors=dearer)


def _scaled(cost: CompressorCost) -> CompressorCost:
    points = [
        replace(point, encode_us=DEARER * point.encode_us, decode_us=DEARER * point.decode_us) for point in cost.points
    ]
    return CompressorCost.of(*points)
