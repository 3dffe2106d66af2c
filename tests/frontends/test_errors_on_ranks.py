"""A mistake on one of several ranks is met with an error on all of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.edits import rerun_with, scale_gradient
from helpers.gathered import gathered
from helpers.jobs import JOBS, cross_entropy, mlp
from helpers.ranks import run_ranks, try_ranks
from torch import Tensor, nn

import fxcomp
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE
from fxcomp.step.compiled_step import CompiledStep

Scenario = Callable[[Path], Any]


def compile_here(model: nn.Module, optimizer: Any = None, loss: Any = cross_entropy, **options: Any) -> CompiledStep:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    batch = JOBS["mlp"].batch(0, dist.get_rank())
    given = gathered(plan="dense", verify=1) | gathered(**options)
    return fxcomp.compile_step(model, loss, optimizer, batch, **given)


def is_odd() -> bool:
    return dist.get_rank() == 1


def raising_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
    raise KeyError("labels")


def models_of_other_width(_: Path) -> None:
    compile_here(nn.Sequential(nn.Linear(20, 31 if is_odd() else 30), nn.ReLU(), nn.Linear(31 if is_odd() else 30, 10)))


def models_of_other_depth(_: Path) -> None:
    compile_here(nn.Sequential(nn.Linear(20, 10), *([nn.Linear(10, 10)] if is_odd() else [])))


def models_frozen_elsewhere(_: Path) -> None:
    model = mlp()
    model[0].bias.requires_grad_(not is_odd())
    compile_here(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


def other_learning_rates(_: Path) -> None:
    model = mlp()
    compile_here(model, torch.optim.SGD(model.parameters(), lr=0.2 if is_odd() else 0.1))


def other_optimizers(_: Path) -> None:
    model = mlp()
    compile_here(model, (torch.optim.AdamW if is_odd() else torch.optim.SGD)(model.parameters(), lr=0.1))


def other_clipping(_: Path) -> None:
    compile_here(mlp(), max_grad_norm=1.0 if is_odd() else None)


def no_loss_on_one(_: Path) -> None:
    compile_here(mlp(), loss=None if is_odd() else cross_entropy)


def hook_scaled_on_one(_: Path) -> None:
    scaler = torch.amp.GradScaler("cpu") if is_odd() else None
    model = nn.parallel.DistributedDataParallel(mlp())
    model.register_comm_hook(None, fxcomp.ddp_hook(scaler=scaler, compress="int8"))
    cross_entropy(model, JOBS["mlp"].batch(0, dist.get_rank())).backward()


def capture_fails_on_one(_: Path) -> None:
    compile_here(mlp(), loss=raising_loss if is_odd() else cross_entropy)


def plan_for_another_model(_: Path) -> None:
    compile_here(mlp(), plan=Plan((Bucket(("head.weight",), (7,), DENSE),)))


def plan_missing(_: Path) -> None:
    compile_here(mlp(), plan="nowhere/plan.json")


def plan_corrupt(folder: Path) -> None:
    path = folder / f"plan_{dist.get_rank()}.json"
    path.write_text("{ not a plan")
    compile_here(mlp(), plan=path)


def plan_misspelt(_: Path) -> None:
    compile_here(mlp(), plan="topkk(0.01)")


def plan_misspelt_on_one(_: Path) -> None:
    compile_here(mlp(), plan="nope" if is_odd() else "int8")


def no_micro_batches_on_one(_: Path) -> None:
    compile_here(mlp(), accumulate=0 if is_odd() else 1)


def plans_differ(_: Path) -> None:
    compile_here(mlp(), plan="topk(0.1)" if is_odd() else "topk(0.01)")


def plan_given_to_one(_: Path) -> None:
    compile_here(mlp(), plan=None if is_odd() else "int8")


def saved_plans_differ(folder: Path) -> None:
    plan = compile_here(mlp(), plan="int8").plan
    if is_odd():
        plan.with_strategies([DENSE] * len(plan.buckets)).save(folder / "odd.json")
    compile_here(mlp(), plan=folder / "odd.json" if is_odd() else plan)


def plan_saved_on_rank_0(folder: Path) -> None:
    path = folder / f"of_rank_{dist.get_rank()}.json"
    plan = compile_here(mlp(), plan="int8").plan
    if not is_odd():
        plan.save(path)
    assert compile_here(mlp(), plan=path).plan == plan


def other_warm_up(_: Path) -> None:
    compile_here(mlp(), warmup=fxcomp.Warmup(dense_steps=3 if is_odd() else 2))


def other_costs(_: Path) -> None:
    compile_here(mlp(), costs=fxcomp.CostTable(launch_us=2.0 if is_odd() else 1.0))


def other_links(_: Path) -> None:
    compile_here(mlp(), cluster=Cluster.parse(f"2x1, inter {10 if is_odd() else 1}gbit@30us, intra 100gbit"))


def links_that_are_written_alike(_: Path) -> None:
    link = Link(alpha_us=30.0, gb_per_s=1.0 + 1e-9 * is_odd())
    assert str(link) == str(Link(alpha_us=30.0, gb_per_s=1.0))
    compile_here(mlp(), cluster=Cluster(2, 1, intra=link, inter=link))


def cluster_of_another_size(_: Path) -> None:
    compile_here(mlp(), cluster=Cluster(3, 1, intra=Link(5.0, 5.0), inter=Link(25.0, 1.0)))


def wrong_on_all(_: Path) -> None:
    step = compile_here(mlp())
    rerun_with(step, lambda gm: scale_gradient(gm, "0.bias", 1.01))
    step(JOBS["mlp"].batch(0, dist.get_rank()))


def wrong_on_one(_: Path) -> None:
    step = compile_here(mlp())
    if is_odd():
        rerun_with(step, lambda gm: scale_gradient(gm, "0.bias", 1.01))
    step(JOBS["mlp"].batch(0, dist.get_rank()))


def one_state_on_all_ranks(_: Path) -> None:
    step = compile_here(mlp(), plan="int4")
    states: list[Any] = [None, None]
    dist.all_gather_object(states, step.state_dict())
    step.load_state_dict(states[0])


def state_of_another_model(_: Path) -> None:
    big, small = mlp(), nn.Linear(20, 10)
    compile_here(small, plan="int4").load_state_dict(compile_here(big, plan="int4").state_dict())


def works(_: Path) -> None:
    compile_here(mlp())(JOBS["mlp"].batch(0, dist.get_rank()))


SCENARIOS: dict[Scenario, tuple[str, str]] = {
    models_of_other_width: (
        "ReplicasDiffer ReplicasDiffer",
        r"rank 1 and rank 0 bring different steps: the shape of '0.(bias|weight)' is .*31",
    ),
    models_of_other_depth: (
        "ReplicasDiffer ReplicasDiffer",
        r"'1.(bias|weight)'.*on rank 1 and 'missing' on rank 0.*Build the same model",
    ),
    models_frozen_elsewhere: (
        "ReplicasDiffer ReplicasDiffer",
        r"a gradient of '0.bias' is 'missing' on rank 1|requires_grad of '0.bias' is False",
    ),
    other_learning_rates: (
        "ReplicasDiffer ReplicasDiffer",
        "lr of parameter group 0 is 0.2 on rank 1 and 0.1 on rank 0",
    ),
    other_optimizers: ("ReplicasDiffer ReplicasDiffer", "different steps"),
    other_clipping: ("ReplicasDiffer ReplicasDiffer", "max_grad_norm is 1.0 on rank 1 and None on rank 0"),
    no_loss_on_one: ("PeerFailed BadOption", "loss_fn is called with the model and a batch; it is a NoneType"),
    hook_scaled_on_one: ("ReplicasDiffer ReplicasDiffer", "a scaler is True on rank 1 and False on rank 0"),
    capture_fails_on_one: (
        "PeerFailed KeyError",
        r"rank 1 failed in capturing the step: KeyError: 'labels'|^'labels'",
    ),
    plan_for_another_model: (
        "BadPlan BadPlan",
        r"for another model: it plans 'head.weight', which has no gradient here.*Name a mode",
    ),
    plan_missing: ("BadPlan PeerFailed", r"cannot read the plan nowhere/plan.json: No such file"),
    plan_corrupt: ("BadPlan PeerFailed", r"cannot read the plan .*plan_0.json: "),
    plan_misspelt: (
        "BadPlan BadPlan",
        r"'topkk\(0.01\)' is neither the path of a saved plan nor a compressor",
    ),
    plan_misspelt_on_one: ("PeerFailed BadPlan", "'nope' is neither the path of a saved plan nor a compressor"),
    no_micro_batches_on_one: (
        "PeerFailed BadOption",
        "accumulate must be a number of micro-batches",
    ),
    plans_differ: (
        "ReplicasDiffer ReplicasDiffer",
        r"the plan is 'topk\(0.1\)' on rank 1 and 'topk\(0.01\)' on rank 0.*pass the same arguments",
    ),
    plan_given_to_one: ("ReplicasDiffer ReplicasDiffer", "the plan is None on rank 1 and 'int8' on rank 0"),
    saved_plans_differ: (
        "ReplicasDiffer ReplicasDiffer",
        r"the strategy of '[\w.]+' in the plan is 'all_reduce@world' on rank 1 and 'compress\(int8\).* on rank 0",
    ),
    plan_saved_on_rank_0: ("none none", ""),
    other_warm_up: (
        "ReplicasDiffer ReplicasDiffer",
        "warmup is .*dense_steps=3.* on rank 1 and .*dense_steps=2.* on rank 0.*pass the same arguments",
    ),
    other_costs: ("none none", ""),  # each machine may have its own; rank 0's decide
    other_links: ("ReplicasDiffer ReplicasDiffer", "cluster is '.*10gbit.*' on rank 1 and '.*1gbit.*' on rank 0"),
    links_that_are_written_alike: ("ReplicasDiffer ReplicasDiffer", "the digest of cluster= is .* on rank 1 and"),
    cluster_of_another_size: ("BadOption BadOption", "the cluster 3x1 has 3 ranks, the process group has 2"),
    wrong_on_all: ("VerificationFailed VerificationFailed", "step 0: the gradient of '0.bias' differs from eager"),
    wrong_on_one: (
        "VerificationFailed VerificationFailed",
        "the gradient of '0.bias' differs|another rank found a difference",
    ),
    one_state_on_all_ranks: ("BadState BadState", "rank 0 and rank 1 load the state of rank 0: .* would count twice"),
    state_of_another_model: ("BadState BadState", r"of another model: they hold '[02].(weight|bias)', which this"),
    works: ("none none", ""),
}


def outcomes_of(folder: Path) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for scenario in SCENARIOS:
        try:
            scenario(folder)
            found[scenario.__name__] = ("none", "")
        except Exception as error:
            found[scenario.__name__] = (type(error).__name__, str(error))
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    return run_ranks(2, outcomes_of, tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_rank_learns_what_went_wrong(on_two_ranks: Any, scenario: Any):
    expected, text = SCENARIOS[scenario]
    outcomes = [rank[scenario.__name__] for rank in on_two_ranks]
    assert " ".join(name for name, _ in outcomes) == expected, outcomes
    for _, message in outcomes:
        assert re.search(text, message, re.DOTALL), message


def absent_rank() -> None:
    if is_odd():
        time.sleep(600)  # ended when the other rank has failed
    compile_here(mlp())


def test_a_rank_that_never_arrives_ends_the_others_within_the_timeout():
    arrived, _ = try_ranks(2, absent_rank, group_timeout_s=5.0, grace_s=0.0)
    assert arrived.error == "PeerFailed"
    assert "rank 1 did not arrive at compile_step within 5 s" in arrived.text
    assert "every rank must" in arrived.text
