"""Run one rank of step_time.py: build contestants and time them in turns.

Ranks of one checkout are a *group* that trains together. To compare two checkouts, hosts run ranks of both. The groups
take turns: one works while the others wait on the store.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from baselines import FREE, FXCOMP, Contestant, make_contestant
from fixed_plans import FIXED
from shaped import UNSHAPED, Teller, set_rate, slowest
from step_time_verdicts import BEFORE, ENOUGH_BLOCKS, TWICE, Turns

from fxcomp.commands.demo.launch_ranks import exit_with_parent
from fxcomp.commands.demo.shaped_hosts import sent_by_this_host
from fxcomp.frontends.job import Job, load_job
from fxcomp.plan.plan import Plan

WARM_UP_STEPS = 3  # DDP rebuilds buckets after step 1, PowerSGD starts at step 3
# Compiled steps are verified at steps 2, 5 and 10, then rarely, which a long job hardly notices. Hooks have a plan
# after step 6.
VERIFIED_STEPS = 11
HELD_OUT_BATCHES = 8
COMPILED = (*FXCOMP, *FIXED, "free_emitted")
FOR_EVER = timedelta(days=7)  # the parent ends all ranks when one fails

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    model: str
    inter: list[str]
    names: list[str]
    hosts: int
    ranks_here: int
    """Ranks per group and host."""
    checkouts: list[str]
    """Checkouts by group. The first is this one, whose group measures everything except the others' compiled steps."""
    minutes: float
    blocks: int | None
    steps_per_block: int | None
    loss_steps: int


class Groups:
    def __init__(self, mine: int, count: int, store: dist.Store) -> None:
        self.mine = mine
        self.count = count
        self._store = store
        self._calls = 0

    def in_turn(self, group: int, do: Callable[[], Result]) -> Result | None:
        """Run `do` in one group while the others wait; return None in the others."""
        key = self._next_key()
        if group != self.mine:
            self._store.wait([key], FOR_EVER)
            return None
        result = do()
        dist.barrier()
        if dist.get_rank() == 0:
            self._store.set(key, "done")
        return result

    def gather(self, value: object) -> list[Any]:
        """Gather values of each group's rank 0; the result is equal on every rank."""
        key = self._next_key()
        if dist.get_rank() == 0:
            self._store.set(f"{key} {self.mine}", json.dumps(value))
        return [json.loads(self._store.get(f"{key} {group}")) for group in range(self.count)]

    def _next_key(self) -> str:
        self._calls += 1
        return f"call {self._calls}"


def join(group: int, groups: int) -> Groups:
    """Join this group's process group and the store of all groups; exit with the parent."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = group == 0 and rank == 0
    store = dist.TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=FOR_EVER)
    own = dist.PrefixStore(f"group {group}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
    return Groups(group, groups, dist.PrefixStore("all groups", store))


@dataclass
class Rank:
    """This rank's settings, number, groups, batches and channel to the parent."""

    settings: Settings
    number: int
    groups: Groups
    batches: Job
    say: Teller

    @property
    def suffix(self) -> str:
        return BEFORE if self.groups.mine else ""

    def make(self, name: str, plan: object = None) -> Contestant:
        self.say(f"preparing {name}{self.suffix}")
        plan = FIXED[name]() if name in FIXED else plan
        return make_contestant(name, load_job(self.settings.model), plan=plan)

    def prepare(self, names: Iterable[str]) -> dict[str, Contestant]:
        """Build contestants and warm them up; return them by measured name."""
        made = {name + self.suffix: self.make(name) for name in names}
        for contestant in made.values():
            self.run_each([contestant], VERIFIED_STEPS if contestant.name in COMPILED else WARM_UP_STEPS)
            while contestant.is_racing:
                self.run_each([contestant], 1)
            contestant.settle()
        return made

    def run_each(self, contestants: Iterable[Contestant], steps: int) -> float:
        """Run each contestant for `steps` steps, and TWICE for twice as many; return seconds."""
        dist.barrier()
        start = time.perf_counter()
        for contestant in contestants:
            for _ in range(steps * (2 if contestant.name == TWICE else 1)):
                contestant.step(self.batches.batch_at(contestant.next_step(), self.number))
        return time.perf_counter() - start


def run(settings: Settings, group: int) -> None:
    """Measure all bandwidths; rank 0 sends a line of JSON per bandwidth."""
    groups = join(group, len(settings.checkouts))
    number = dist.get_rank()
    rank = Rank(settings, number, groups, load_job(settings.model), Teller())
    names = [name for name in settings.names if name in FXCOMP or group == 0]
    lasting = everywhere(groups, lambda: rank.prepare(name for name in names if name not in FXCOMP))
    losses: dict[str, float] = {}  # by name and plan, as equal plans have equal losses
    for inter in settings.inter:
        groups.in_turn(0, lambda: set_rate(inter))  # noqa: B023  # it is called here
        rank.say.prefix = f"{inter}: "
        # Costs and plans of fxcomp depend on the link.
        compiled = everywhere(groups, lambda: rank.prepare(name for name in names if name in FXCOMP))
        contestants = {name: (lasting | compiled)[name] for name in (name + rank.suffix for name in names)}
        turns = take_turns(rank, contestants)
        groups.in_turn(0, lambda: set_rate(UNSHAPED))
        if settings.loss_steps:
            groups.in_turn(0, lambda: train_all(rank, contestants, turns, losses))  # noqa: B023
        found = groups.gather([asdict(turn) for turn in turns.values()])
        if group == 0:
            rank.say.send({"inter": inter, "turns": [turn for of_group in found for turn in of_group]})
    dist.destroy_process_group()


def everywhere(groups: Groups, do: Callable[[], Result]) -> Result:
    """Run `do` in each group in turn."""
    results = [groups.in_turn(group, do) for group in range(groups.count)]
    return next(result for result in results if result is not None)


def take_turns(rank: Rank, contestants: dict[str, Contestant]) -> dict[str, Turns]:
    """Time blocks of all contestants round by round; return this group's turns."""
    groups = rank.groups
    turns = {
        name: Turns(
            name,
            predicted_ms=c.predicted_ms,
            predicted_free_ms=c.predicted_free_ms,
            race=c.race,
            plan=c.plan.to_json() if isinstance(c.plan, Plan) else None,
        )
        for name, c in contestants.items()
    }
    round_s = sum(groups.gather(everywhere(groups, lambda: rank.run_each(contestants.values(), 1))))
    steps, blocks = groups.gather(choose_lengths(round_s, rank.settings))[0]
    rank.say(f"{blocks} rounds, blocks of {steps} steps, about {blocks * steps * round_s:.0f} s")
    sent: dict[str, list[float]] = {name: [] for name in contestants}
    entries = [(group, name) for group, names in enumerate(groups.gather(list(contestants))) for name in names]
    for turn_round in range(blocks):
        order = [(*entry, False) for entry in entries] + [(*entry, True) for entry in entries if entry[1] == TWICE]
        random.Random(turn_round).shuffle(order)
        for group, name, is_second in order:
            block = groups.in_turn(group, lambda: run_block(rank, contestants[name], steps))  # noqa: B023
            if block is not None:
                times, bytes_per_step = block
                (turns[name].again if is_second else turns[name].blocks).append(times)
                sent[name].append(bytes_per_step)
        rank.say(f"round {turn_round + 1} of {blocks}")
    for name, turn in turns.items():
        turn.wire_bytes = statistics.mean(sent[name])
    return turns


def choose_lengths(round_s: float, settings: Settings) -> tuple[int, int]:
    """Return steps per block and rounds that fit the time for one bandwidth."""
    budget_s = settings.minutes * 60 / len(settings.inter)
    steps = settings.steps_per_block or min(max(int(budget_s / (ENOUGH_BLOCKS * round_s)), 1), 5)
    blocks = settings.blocks or min(max(int(budget_s / (steps * round_s)), 12), 40)
    return steps, blocks


def run_block(rank: Rank, contestant: Contestant, steps: int) -> tuple[list[float], float]:
    """Time steps; return the slowest rank's ms for each step, and bytes sent per host and step."""
    times: list[float] = []
    dist.barrier()
    before = sent_by_this_host(os.environ["GLOO_SOCKET_IFNAME"])
    for _ in range(steps):
        batch = rank.batches.batch_at(contestant.next_step(), rank.number)
        if not contestant.is_synchronised:
            dist.barrier()
        start = time.perf_counter()
        contestant.step(batch)
        times.append((time.perf_counter() - start) * 1e3)
    sent = sent_by_this_host(os.environ["GLOO_SOCKET_IFNAME"]) - before
    total = torch.tensor(sent if os.environ["LOCAL_RANK"] == "0" else 0)
    dist.all_reduce(total)
    return slowest(times), total.item() / steps / rank.settings.hosts


def train_all(rank: Rank, contestants: dict[str, Contestant], turns: dict[str, Turns], known: dict[str, float]) -> None:
    """Record each contestant's loss after training from the start; `known` caches losses by name and plan."""
    for name, contestant in contestants.items():
        if contestant.name in FREE:
            continue
        key = f"{name} {contestant.plan}"
        if key not in known:
            known[key] = final_loss(rank, rank.make(name, contestant.plan))
        turns[name].final_loss = known[key]


def final_loss(rank: Rank, contestant: Contestant) -> float:
    """Train, and return the mean loss over ranks on held-out batches."""
    steps = rank.settings.loss_steps
    for step in range(steps):
        contestant.step(rank.batches.batch_at(step, rank.number))
        if (step + 1) % 10 == 0:
            rank.say(f"training {contestant.name}: step {step + 1} of {steps}")
    contestant.model.eval()
    with torch.no_grad():
        held_out = [rank.batches.batch_at(1_000_000 + index, rank.number) for index in range(HELD_OUT_BATCHES)]
        mean = torch.stack([rank.batches.loss_fn(contestant.model, batch) for batch in held_out]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
