"""A job begins dense: its first steps train and are timed, and all ranks choose a plan by them at the same step."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy
from helpers.ranks import run_ranks
from helpers.replicas import replica_fingerprint
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fxcomp
from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.plan.plan import Plan
from fxcomp.planning.timed_steps import TimedStep, Way
from fxcomp.site import Site
from fxcomp.step import first_steps
from fxcomp.step.calendar import Calendar, Use
from fxcomp.step.first_steps import LONG_US, MOST_TRIES, WAYS, FirstSteps
from fxcomp.step.observer import StepUnderWay

# On virtual steps


class Alone:
    """A site of one rank, or of ranks whose numbers are told."""

    device = torch.device("cpu")

    def __init__(self, others: Sequence[float] = ()) -> None:
        self.others = list(others)
        """The numbers that the other rank brings to each agreement, in order; as this one where nothing is told."""

    def gather_numbers(self, _: str, mine: Sequence[float]) -> list[list[float]]:
        return [list(mine), [self.others.pop(0)] if self.others else list(mine)]


class Ran(TimedStep):
    """A step that took what is told."""

    def __init__(self, way: Way, us: float | None) -> None:
        self.way, self._took = way, us

    @property
    def us(self) -> float | None:
        return self._took


def virtual(
    monkeypatch: pytest.MonkeyPatch, site: Alone, us: float = 1e3, unlike: Sequence[int] = ()
) -> tuple[FirstSteps, list[tuple[int, Way]]]:
    """Run steps until the plan is chosen; return what was timed, by the step's number."""
    calendar, ran = Calendar(verified=fxcomp.Checks().verified), list[tuple[int, Way]]()
    first = FirstSteps(cast_site(site), calendar.free_steps)
    monkeypatch.setattr(first_steps, "TimedStep", lambda _, __, way: Ran(way, us))
    monkeypatch.setattr(first_steps, "around_us", lambda *_: 7.0)
    for number in range(100):
        calendar.timed = first.numbers
        if calendar.use_of(number) is Use.TIME:
            step = StepUnderWay(number, Use.TIME, Force(), None, number not in unlike)
            first.before(step)
            if step.run is not None:
                ran.append((number, step.run.__self__.way))
        if first.between(number + 1):
            return first, ran
    raise AssertionError("no plan after 100 steps")


class Force:
    program = runtime = None


def cast_site(site: Any) -> Site:
    return site


def test_steps_are_timed_in_turns_beside_those_that_are_verified(monkeypatch: pytest.MonkeyPatch):
    first, ran = virtual(monkeypatch, Alone())
    assert [number for number, _ in ran] == [0, 1, 3, 4, 6, 7, 8, 9]
    assert [way for _, way in ran] == list(WAYS)
    assert [step.way for step in first.steps] == list(WAYS[1:]), "the first one allocates"


@pytest.mark.parametrize("others", [[], [2 * LONG_US]])
def test_of_long_steps_three_are_timed_whichever_rank_takes_long(monkeypatch: pytest.MonkeyPatch, others: list[float]):
    first, ran = virtual(monkeypatch, Alone(others), us=1e3 if others else 2 * LONG_US)
    assert [way for _, way in ran] == [Way.OVERLAPPED, Way.HELD, Way.ONE_BY_ONE]
    assert {Way.OVERLAPPED, Way.HELD} <= {step.way for step in first.steps}, "the first one is all there is"


def test_more_steps_are_timed_where_batches_were_unlike_the_first_on_any_rank(monkeypatch: pytest.MonkeyPatch):
    assert len(virtual(monkeypatch, Alone(), unlike=[1, 4, 7])[1]) > len(WAYS)
    assert len(virtual(monkeypatch, Alone(), unlike=[9])[1]) > len(WAYS), "no step ran operator by operator"
    first, ran = virtual(monkeypatch, Alone([0.0, 0.0]))
    assert len(ran) == 2 * len(WAYS), "another rank lacks some"
    assert first.are_enough


def test_where_no_batch_is_like_the_first_the_plan_is_chosen_all_the_same(monkeypatch: pytest.MonkeyPatch):
    first, ran = virtual(monkeypatch, Alone(), unlike=range(1, 100))
    assert len(ran) == 1
    assert not first.are_enough
    assert first.numbers[-1] > MOST_TRIES * len(WAYS)


# On ranks


def batches(rank: int, count: int = 24) -> list[Any]:
    return [JOBS["mlp"].batch(k, rank) for k in range(count)]


def losses_of_ddp() -> list[float]:
    model = DistributedDataParallel(JOBS["mlp"].build())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    found: list[float] = []
    for batch in batches(dist.get_rank()):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def begun() -> dict[str, Any]:
    forget()
    model = JOBS["mlp"].build()
    step = fxcomp.compile_step(
        model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), batches(dist.get_rank())[0], compress="balanced"
    )
    said, is_dense = step.explain(), step.plan.is_dense
    with pytest.raises(fxcomp.errors.CannotReplan, match=r"there is no plan yet.*\n.*Plan again after step 10"):
        step.replan()
    chosen_at, losses, plans = None, list[float](), list[str]()
    for number, batch in enumerate(batches(dist.get_rank())):
        losses.append(float(step(batch)))
        plans.append(step.plan.digest)
        if chosen_at is None and not step.in_force.decision.is_provisional:
            chosen_at = number + 1
    whole: list[Tensor] = [p.detach().clone() for p in model.parameters()]
    found = {
        "said": said,
        "is_dense": is_dense,
        "chosen_at": chosen_at,
        "losses": losses,
        "plans": plans,
        "bits": [p.numpy().tobytes() for p in whole],
        "sources": [cost.source for cost in step.costs.compute.values()],
        "verified": step.metrics()["step"],
        "ddp": losses_of_ddp(),
    }
    step.close()
    return found


def test_all_ranks_begin_dense_as_ddp_trains_and_choose_at_the_same_step():
    found = run_ranks(2, begun)
    for each in found:
        assert each["is_dense"]
        assert "dense until step 10: the first steps are timed" in " ".join(each["said"].split())
        assert each["chosen_at"] == 10
        assert each["losses"][:11] == pytest.approx(each["ddp"][:11], rel=1e-6)
        assert all("measured in the emitted step" in source for source in each["sources"])
    assert found[0]["plans"] == found[1]["plans"]
    assert found[0]["bits"] == found[1]["bits"]


def mean_as_a_share(model: torch.nn.Module, batch: Any) -> fxcomp.WeightedLoss:
    return fxcomp.WeightedLoss(cross_entropy(model, batch) * len(batch[1]), torch.tensor(len(batch[1])))


KINDS: dict[str, dict[str, Any]] = {
    "weighted": {"loss_fn": mean_as_a_share},
    "skipping": {"skip_nonfinite": True},
    "clipped values": {"max_grad_value": 0.1},
    "weighted, skipping": {"loss_fn": mean_as_a_share, "skip_nonfinite": True, "max_grad_norm": 1.0},
    "accumulating": {"loss_fn": mean_as_a_share, "accumulate": 2},
}


def begun_of_a_kind(kind: str) -> tuple[bool, list[str]]:
    forget()
    model = JOBS["conv"].build()
    drawn = [JOBS["conv"].batch(number, dist.get_rank()) for number in range(26)]
    given = {"loss_fn": cross_entropy, **KINDS[kind]}
    step = fxcomp.compile_step(
        model, optimizer=OPTIMIZERS["sgd"](model.parameters()), example_batch=drawn[0], compress="balanced", **given
    )
    for batch in drawn:
        step(batch)
    is_chosen = not step.in_force.decision.is_provisional
    step.close()
    return is_chosen, [str(replica_fingerprint(model))]


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_of_every_kind_choose_a_plan_by_their_first_steps(kind: str):
    found = run_ranks(2, begun_of_a_kind, kind)
    assert all(is_chosen for is_chosen, _ in found)
    assert found[0] == found[1]


def forget() -> None:
    """Let the next job time its own steps; what compressors cost on this machine stays known."""
    shutil.rmtree(compat.cache_directory() / "jobs", ignore_errors=True)
    dist.barrier()


def trained_on(step: Any, numbers: range) -> None:
    for number in numbers:
        step(JOBS["mlp"].batch(number, dist.get_rank()))


def resumed(plan: str, knows: bool) -> tuple[str, str, bool, list[bool]]:
    """Save in a job of a plan, and load in one that has none yet, or has chosen; train both on."""
    models = [JOBS["mlp"].build() for _ in range(2)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    steps: list[Any] = []
    for model, optimizer, compress in zip(models, optimizers, (plan, "balanced"), strict=True):
        if not knows:
            forget()
        batch = JOBS["mlp"].batch(0, dist.get_rank())
        steps.append(fxcomp.compile_step(model, cross_entropy, optimizer, batch, compress=compress))
        if not steps[1:]:
            trained_on(steps[0], range(5))
    for kind in (models, optimizers, steps):
        kind[1].load_state_dict(copy.deepcopy(kind[0].state_dict()))
    digests = [step.plan.digest for step in steps]
    for step in steps:
        trained_on(step, range(5, 9))
    is_racing = steps[1].is_racing
    same = [torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True)]
    for step in steps:
        step.close()
    return digests[0], digests[1], is_racing, same


@pytest.mark.parametrize("knows", [False, True], ids=["first job", "second job"])
@pytest.mark.parametrize("plan", ["int8", "dense"])
def test_a_job_that_has_not_begun_goes_on_with_the_saved_plan_bit_for_bit(plan: str, knows: bool):
    for saved, followed, is_racing, same in run_ranks(2, resumed, plan, knows):
        assert saved == followed
        assert not is_racing
        assert all(same)


def test_a_job_goes_on_choosing_where_the_saved_one_had_not_settled():
    for _, _, is_racing, same in run_ranks(2, resumed, "balanced", False):
        assert is_racing
        assert all(same)


def unlike_the_first() -> tuple[int, bool, list[str]]:
    """Train on batches of other rows than the first one; return after how many steps there is a plan."""
    forget()
    model, rank = JOBS["mlp"].build(), dist.get_rank()
    optimizer, small = OPTIMIZERS["sgd"](model.parameters()), JOBS["mlp"].batch(0, rank)
    step = fxcomp.compile_step(model, cross_entropy, optimizer, small)
    larger = [torch.cat([value, value]) for value in small]
    steps = 0
    while step.in_force.decision.is_provisional:
        step(small if rank == 0 else tuple(larger))
        steps += 1
    found = steps, step.is_racing, sorted({cost.source for cost in step.costs.compute.values()})
    step.close()
    return found


def test_a_plan_is_chosen_by_links_and_the_machine_where_a_rank_never_had_a_batch_like_the_first():
    alone, other = run_ranks(2, unlike_the_first)
    assert alone == other
    steps, _, sources = alone
    assert len(WAYS) * (MOST_TRIES + 1) <= steps < 60
    assert sources == [], "nothing of the step was measured"


def decides() -> dict[str, bool]:
    forget()
    asked: dict[str, dict[str, Any]] = {
        "a mode": {},
        "costs": {"costs": fxcomp.CostTable()},
        "no race": {"checks": fxcomp.Checks(race="off")},
        "a plan": {"compress": "int8"},
        "a warm-up": {"compress": fxcomp.Compress(within="balanced", warmup=fxcomp.Warmup(dense_steps=3))},
        "a place of the mean": {"compress": fxcomp.Compress(within="aggressive", steps=1000)},
    }
    found: dict[str, bool] = {}
    for name, options in asked.items():
        model = JOBS["mlp"].build()
        optimizer, batch = OPTIMIZERS["adamw"](model.parameters()), JOBS["mlp"].batch(0, dist.get_rank())
        step = fxcomp.compile_step(model, cross_entropy, optimizer, batch, **options)
        found[name] = not step.in_force.decision.is_provisional
        step.close()
    return found


def test_what_needs_no_timed_step_or_lasts_for_the_whole_job_is_decided_at_once():
    for found in run_ranks(2, decides):
        assert found == {name: name not in ("a mode", "a warm-up") for name in found}


SLOW = Cluster(2, 1, intra=Link(5.0, 5.0), inter=Link(50.0, 0.001))
WARM = fxcomp.Compress(within="lossy", warmup=fxcomp.Warmup(dense_steps=2, int8_steps=3, int4_steps=2))


def warmed_up() -> tuple[int, list[int], list[set[str]], list[str], list[list[int]]]:
    """Train from a dense begin through a warm-up; another job resumes in the middle of it."""
    forget()

    def compiled() -> tuple[Any, Any]:
        model = JOBS["mlp"].build()
        optimizer, batch = OPTIMIZERS["sgd"](model.parameters()), JOBS["mlp"].batch(0, dist.get_rank())
        return model, fxcomp.compile_step(model, cross_entropy, optimizer, batch, compress=WARM, cluster=SLOW)

    model, step = compiled()
    prints, stages, begins, chosen = list[str](), list[set[str]](), list[int](), 0
    saved: Any = None
    while len(prints) < 30:
        step(JOBS["mlp"].batch(len(prints), dist.get_rank()))
        prints.append(replica_fingerprint(model))
        if not chosen and not step.in_force.decision.is_provisional:
            chosen, begins = step.steps, list(step.in_force.calendar.warm_from)
            stages = [kinds_of(plan) for plan in step.in_force.plans]
        if step.steps == chosen + 3:
            saved = copy.deepcopy((model.state_dict(), step.state_dict()))
    found = list[list[int]]()
    for forgets in (False, True):
        if forgets:
            forget()
        other, again = compiled()
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        while again.in_force.decision.is_provisional:
            again(JOBS["mlp"].batch(again.steps, dist.get_rank()))
            prints.append(replica_fingerprint(other))
        found.append(list(again.in_force.calendar.warm_from))
        again.close()
    step.close()
    return chosen, begins, stages, prints, found


def kinds_of(plan: Plan) -> set[str]:
    return {type(c).__name__ for bucket in plan.buckets for c in bucket.strategy.compressors}


def test_a_warm_up_begins_with_the_chosen_plan():
    one, other = run_ranks(2, warmed_up)
    assert one == other
    chosen, begins, stages, _, resumed = one
    assert begins == [chosen, chosen + 2, chosen + 5, chosen + 7]
    dense, int8, int4, plan = stages
    assert not dense
    assert "Int8" in int8
    assert "Int4" in int4
    assert plan - {"BF16"}
    assert resumed == [begins, begins], "a warm-up is neither repeated nor cut"


def job_of(compress: str) -> Any:
    model = JOBS["mlp"].build()
    optimizer, batch = OPTIMIZERS["sgd"](model.parameters()), JOBS["mlp"].batch(0, dist.get_rank())
    return fxcomp.compile_step(model, cross_entropy, optimizer, batch, compress=compress)


def stopped_apart() -> tuple[str, str]:
    """Load a state where one rank has counted a step that the other has not."""
    saving = job_of("int8")
    saved = saving.state_dict()
    forget()
    step = job_of("balanced")
    before = step.plan.digest
    step.steps = dist.get_rank()
    step.load_state_dict(saved)
    found = before, step.plan.digest
    saving.close()
    step.close()
    return found


def test_a_saved_plan_is_followed_on_all_ranks_or_on_none():
    for before, after in run_ranks(2, stopped_apart):
        assert before == after


def saved_by_two() -> dict[str, Any]:
    step = job_of("int8")
    step(JOBS["mlp"].batch(0, dist.get_rank()))
    saved = step.state_dict()
    step.close()
    return saved


def test_one_rank_does_not_follow_the_plan_of_several():
    states = run_ranks(2, saved_by_two)
    model = JOBS["mlp"].build()
    step = fxcomp.compile_step(model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), JOBS["mlp"].batch(0))
    step.load_state_dict(states)
    assert step.plan.buckets == ()
