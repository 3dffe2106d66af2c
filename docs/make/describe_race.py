"""Write the last part of docs/how_fxcomp_decides.md: whether a gain is worth following, and a race of plans.

Wrong costs are planted in the example's table, so that the clock has something to correct. Step times are simulated
from the right costs, with a little noise of fixed seed.
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
from fxcomp.step.race import BUDGET, COUNTED, HEAT, LONGEST, OUT, TURN, Race

DEARER = 8.0
"""So much longer compressors take in truth than in the table."""

WIDTH = 120  # of a line of prose
_NOISE = 0.01  # relative standard deviation of a step's time
_BEGINS = 2  # steps

GATE = """
## A gain that is worth following

Every cost is off by something: here links by {links}, compute by {compute} and compressors by {compressors} (standard
deviations; the last two are assumed). Errors common to all plans cancel: a slow link delays dense too. So the step is
simulated in {draws} *draws*. In each, compute, each link and each compressor take longer or shorter by a random factor,
the same factor for every plan. A plan *wins* a draw if its step is at least {gain} shorter than dense in that draw.

"""

GATE_END = """
A plan that wins {trying} of the draws may race; dense and bf16 always may. The plan predicted best is followed if it
wins {following}, otherwise dense is. That holds until the race is over, or for good where nothing races
(`Checks(race="off")`, and `fxcomp explain`, which only predicts).

"""

RACE = """
## The race

In the running job these plans take turns, and the measured best stays. All ranks take the same turns: first a heat of
{heat} steps for every runner, then {turn} steps for each that may still win. The race ends when one is left, when
those that are left have {counted} counted steps, and after {longest} steps in any case. A runner is out when its
median is longer than the best by more than {out:.0f} standard errors of the difference. The first step of a turn does
not count, because it allocates; verified steps do not count either. A disturbed machine makes steps longer, never
shorter. So a runner with few counted steps is judged by its shortest one, and a runner that was predicted near the
best and loses its heat runs another at the end.

Suppose that the table came from another machine, and compressors take {dearer:.0f} times as long here:

"""

RACE_END = """
{sentence}

A race costs the time by which the losers' steps are longer than the winner's. Turns that would bring it above
{budget:.0f} steps of the winner are cut or left out. Each runner has residuals of its own; in the end they go out under
the plan that stays. `step.explain()` shows the race of your own job. When steps drift, plans race again.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a race, as it was timed."""

    steps: tuple[int, ...]
    runner: Runner
    times_ms: tuple[float, ...]


def gate(choice: Choice) -> str:
    """Write how sure the gain is."""
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
    end += fill(f'The report puts it like this: "{choice.reason}."', WIDTH) + "\n"
    return words + "\n".join([*head, *rows]) + "\n" + end


def race(choice: Choice) -> str:
    """Write a race turn by turn."""
    turns, raced = run_race(choice)
    words = RACE.format(dearer=DEARER, heat=HEAT, turn=TURN, counted=COUNTED, out=OUT, longest=LONGEST)
    rows = [
        f"| {turn.steps[0]} to {turn.steps[-1]} | {turn.runner.name} | {turn.runner.step_us / 1e3:.1f} "
        f"| {', '.join(f'{ms:.1f}' for ms in turn.times_ms)} |"
        for turn in turns
    ]
    head = ["| steps | runner | predicted, ms | measured, ms |", "|---|---|--:|---|"]
    sentence = str(raced)
    end = RACE_END.format(sentence=fill(f"{sentence[0].upper()}{sentence[1:]}", WIDTH), budget=BUDGET)
    return words + "\n".join([*head, *rows]) + "\n" + end


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def run_race(choice: Choice) -> tuple[list[Turn], Raced]:
    """Let the runners of a choice race on the machine whose costs are right; the chosen plan begins."""
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
    """Make the table that the example's should be: compressors are dearer."""
    dearer: Mapping[str, CompressorCost] = {key: _scaled(cost) for key, cost in COSTS.compressors.items()}
    return replace(COSTS, compressors=dearer)


def _scaled(cost: CompressorCost) -> CompressorCost:
    points = [
        replace(point, encode_us=DEARER * point.encode_us, decode_us=DEARER * point.decode_us) for point in cost.points
    ]
    return CompressorCost.of(*points)
