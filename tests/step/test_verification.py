"""Verified steps are compared with eager PyTorch: what is wrong is named, what is right is left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.edits import rerun_with
from helpers.gathered import gathered
from helpers.jobs import JOBS, OPTIMIZERS, cross_entropy, mlp
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp import compat
from fxcomp.capture.step_guard import StepGuard
from fxcomp.errors import BadOption, VerificationFailed
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.ops import PACK
from fxcomp.plan.verified_steps import VerifiedSteps
from fxcomp.step.compiled_step import CompiledStep
from fxcomp.step.verify import differences as compare
from fxcomp.step.verify.differences import Differences
from fxcomp.step.verify.update import Means

BATCH = JOBS["mlp"].batch(0)
ADAMW: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.99))  # noqa: E731


def compiled(
    model: nn.Module, loss: Any = cross_entropy, optimizer: Any = "sgd", batch: Any = BATCH, **options: Any
) -> CompiledStep:
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return fxcomp.compile_step(model, loss, make(model.parameters()), batch, **gathered(**{"verify": 1, **options}))


# Which steps


def test_a_sample_of_the_steps_thins_out():
    steps = VerifiedSteps.parse("sampled")
    assert [step for step in range(2001) if step in steps] == [2, 5, 10, 20, 50, 100, 200, 500, 1000, 1500, 2000]


@pytest.mark.parametrize(("option", "expected"), [("never", []), (0, []), (3, [0, 3, 6]), (1, list(range(8)))])
def test_other_steps_are_verified_if_asked_for(option: Any, expected: list[int]):
    steps = VerifiedSteps.parse(option)
    assert [step for step in range(8) if step in steps] == expected


@pytest.mark.parametrize("option", ["often", -2, 2.5, None])
def test_what_is_no_choice_of_steps_is_refused(option: Any):
    with pytest.raises(BadOption, match=r"'sampled', 'never' or a number(?s:.*)steps 2, 5, 10, 20"):
        VerifiedSteps.parse(option)


def test_steps_are_sampled_unless_told_otherwise():
    weight = [1.0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return weight[0] * cross_entropy(model, batch)

    model = mlp()
    step = fxcomp.compile_step(model, loss, OPTIMIZERS["adam"](model.parameters()), BATCH)
    step(BATCH)
    with unseen_change(step, weight, 2.0):
        step(BATCH)
        with pytest.raises(VerificationFailed, match=r"step 2: the loss is .*, eager's is"):
            step(BATCH)


@contextmanager
def unseen_change(step: CompiledStep, holder: list[float], value: float) -> Generator[None]:
    """Change a value that tracing took for a constant, unseen by guards."""
    before, key = holder[0], StepGuard(step.training).key()
    holder[0] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxcomp.capture.step_guard.StepGuard.key", lambda _: key)
        yield
    holder[0] = before


# What is found


def bake(kind: str) -> Callable[[GraphModule], None]:
    """Make a live number of the captured step the constant that it was."""

    def edit(gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            source = info(node).source if node.op == "placeholder" else None
            if source is not None and source.kind is InputKind.HYPER and source.key == kind:
                for user in list(node.users):
                    user.args = tuple(1e-3 if a is node else a for a in user.args)
                    user.kwargs = {key: 1e-3 if a is node else a for key, a in user.kwargs.items()}

    return edit


def drop_update(gm: GraphModule) -> None:
    """Leave out what updates one parameter."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and info(node).role is Role.UPDATE and info(node).parameter == "2.bias":
            gm.graph.erase_node(node)
            return


def drop_clipping(gm: GraphModule) -> None:
    """Let gradients through as they are."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and info(node).role is Role.CLIP:
            for user in list(node.users):
                if info(user).role is Role.UPDATE:
                    user.replace_input_with(node, node.args[0])
            if "mul_" in str(node.target):
                gm.graph.erase_node(node)


def halve_a_bucket(gm: GraphModule) -> None:
    """Send less than the mean."""
    pack = next(node for node in gm.graph.nodes if node.target is PACK)
    pack.update_arg(1, 0.5 * pack.args[1])


WRONG: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "rate": (bake("lr"), "adamw", r"the update of '0.weight' differs from torch.optim.AdamW's by up to", {}),
    "beta": (bake("betas_0"), "adamw", r"the (update|exp_avg) of '0.weight' differs from torch.optim.AdamW's", {}),
    "missing": (drop_update, "sgd", r"the update of '2.bias' differs from torch.optim.SGD's by up to", {}),
    "clipping": (
        drop_clipping,
        "sgd",
        r"the gradient that updates '0.weight' differs from eager's, clipped",
        {"max_grad_norm": 0.01},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_update_that_is_not_the_optimizers_is_named_and_undone(case: str):
    edit, optimizer, text, options = WRONG[case]
    model = mlp()
    step = compiled(model, optimizer=optimizer, **options)
    step(BATCH)
    rerun_with(step, edit)
    step.training.optimizers[0].param_groups[0]["lr"] *= 10
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(VerificationFailed, match=text) as failure:
        step(BATCH)
    same = [torch.equal(value, before[name]) for name, value in model.state_dict().items()]
    changed = "No parameter" if all(same) else f"{len(same) - sum(same)} of {len(same)} parameters"
    assert f"{changed} of this rank ha" in str(failure.value)
    assert all(same) == (case != "missing")


def test_frozen_auxiliary_results_and_buffers_are_named():
    scale, counts = [1.0], [False]

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 10)
            self.register_buffer("mean", torch.zeros(20))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.mean(0), 0.1 * (scale[0] if counts[0] else 1.0))
            return self.layer(x)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        value = cross_entropy(model, batch)
        return value, {"scaled": value.detach() * (1.0 if counts[0] else scale[0]), "name": "loss"}

    for text in (r"value 0 of the auxiliary result is .*, eager's is", "the buffer 'mean'"):
        step = compiled(Counting(), loss)
        step(BATCH)
        with unseen_change(step, scale, 3.0), pytest.raises(VerificationFailed, match=text) as failure:
            step(BATCH)
        assert "All parameters of this rank have been updated. Load a checkpoint" in str(failure.value)
        counts[0] = True


def test_an_error_of_eager_pytorch_alone_is_a_difference():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if fails[0]:
            raise KeyError("gone")
        return cross_entropy(model, batch)

    fails = [0.0]
    step = compiled(mlp(), loss)
    with (
        unseen_change(step, fails, 1.0),
        pytest.raises(VerificationFailed, match="eager PyTorch raises KeyError: 'gone'"),
    ):
        step(BATCH)


def test_a_check_in_the_backward_pass_of_eager_pytorch_alone_is_a_difference():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        vectors: Tensor = torch.linalg.eig(model[0].weight[:2, :2] + turn)[1]
        return cross_entropy(model, batch) + vectors.real.sum()

    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    step = compiled(mlp(), loss)
    with pytest.raises(VerificationFailed, match=r"eager PyTorch raises RuntimeError: .*multiplication by e"):
        step(BATCH)


class Two(nn.Module):
    """Two layers, and a weight that was kept in a list and in a dict before compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 20), nn.Linear(20, 10)
        self.kept, self.factors = [self.one.weight], {self.one.weight: 3.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


def decay_of_kept(model: Two, batch: Any) -> Tensor:
    decayed = [p for p in model.parameters() if any(p is q for q in model.kept)]
    return cross_entropy(model, batch) + sum(p.square().sum() for p in decayed)


def freezes_kept(model: Two, batch: Any) -> Tensor:
    """Ask for identity where it changes gradients alone."""
    weight = model.one.weight
    weight = weight.detach() if weight is model.kept[0] else weight
    hidden = nn.functional.linear(batch[0], weight, model.one.bias)
    return nn.functional.cross_entropy(model.two(hidden), batch[1])


def scales_kept_gradients(model: Two, batch: Any) -> Tensor:
    weight = model.one.weight
    weight = weight * 2 - weight.detach() if weight is model.kept[0] else weight
    return nn.functional.cross_entropy(model.two(nn.functional.linear(batch[0], weight, model.one.bias)), batch[1])


def exact_type(model: Two, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * (2.0 if type(model.one.weight) is nn.Parameter else 1.0)


def named_type(model: Two, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * len(type(model.one.weight).__name__)


def kept_in_the_result(model: Two, batch: Any) -> Any:
    return cross_entropy(model, batch), {"is kept": model.one.weight is model.kept[0]}


@pytest.mark.parametrize(
    "loss", [decay_of_kept, freezes_kept, scales_kept_gradients, exact_type, named_type, kept_in_the_result]
)
def test_steps_that_tell_stand_ins_from_parameters_are_found(loss: Any):
    model = Two()
    step = compiled(model, loss)
    with pytest.raises(VerificationFailed):
        step(BATCH)
    assert all(p.grad is None for p in model.parameters())


# What is left alone


def factor_of_kept(model: Two, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * model.factors[model.one.weight]


def parameter_made_anew(model: Two, batch: Any) -> Tensor:
    copied = nn.Parameter(model.two.weight)
    hidden = model.one(batch[0])
    return nn.functional.cross_entropy(nn.functional.linear(hidden, copied) + model.two(hidden), batch[1])


def kept_in_a_set(model: Two, batch: Any) -> Tensor:
    chosen = set(model.kept)
    return cross_entropy(model, batch) + sum(p.square().sum() for p in model.parameters() if p in chosen)


def looked_up_again(model: Two, batch: Any) -> Tensor:
    """Look a parameter up in the backward pass."""

    def inner(x: Tensor) -> Tensor:
        return model.one(x).tanh() * model.factors[model.one.weight]

    x = batch[0].clone().requires_grad_()
    hidden = checkpoint(inner, checkpoint(lambda y: inner(y), x, use_reentrant=True), use_reentrant=False)
    return nn.functional.cross_entropy(model.two(hidden), batch[1])


def gradient_penalty(model: Two, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in gradients)


def copied_layer(model: Two, batch: Any) -> Tensor:
    clone = copy.copy(model.two)
    return nn.functional.cross_entropy(clone(model.one(batch[0])), batch[1])


@pytest.mark.parametrize(
    "loss",
    [factor_of_kept, parameter_made_anew, kept_in_a_set, looked_up_again, gradient_penalty, copied_layer],
)
def test_steps_that_find_parameters_by_what_is_followed_are_right(loss: Any):
    torch.manual_seed(0)
    model = Two()
    reference = copy.deepcopy(model)
    reference.kept, reference.factors = [reference.one.weight], {reference.one.weight: 3.0}
    eager = OPTIMIZERS["sgd"](reference.parameters())
    step = compiled(model, loss)
    for _ in range(2):
        step(BATCH)
        eager.zero_grad()
        loss(reference, BATCH).backward()
        eager.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_buffers_that_require_gradients_get_none():
    class Scaled(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(10).requires_grad_())
            self.register_buffer("shift", nn.Buffer(torch.ones(10).requires_grad_()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale + self.shift

    model, called = Scaled(), []
    step = fxcomp.compile_step(
        model,
        cross_entropy,
        torch.optim.SGD([*model.one.parameters(), *model.two.parameters()], lr=0.1),
        BATCH,
        checks=fxcomp.Checks(verify=1),
    )
    model.scale.grad = kept = torch.ones(10)
    model.scale.register_hook(called.append)
    step(BATCH)
    assert model.scale.grad is kept
    assert bool((kept == 1).all())
    assert model.shift.grad is None
    assert not called


def test_hooks_that_a_step_registers_on_parameters_are_not_left_behind():
    def loss(model: Two, batch: Any) -> Tensor:
        model.two.weight.register_hook(lambda gradient: gradient * 2)
        model.one.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return cross_entropy(model, batch)

    model = Two()
    step = compiled(model, loss)
    for _ in range(3):
        step(BATCH)
        assert not any(p._backward_hooks for p in model.parameters())


class Drawing(nn.Module):
    """Draws of every generator, a buffer, and a batch that the forward pass writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x.mul_(0.5))))


def test_a_verified_step_leaves_everything_as_any_other_step_does():
    def state_after(verify: int) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = Drawing()
        step = compiled(model, optimizer="adamw", verify=verify, max_grad_norm=1.0)
        x, target = (value.clone() for value in BATCH)
        losses = [step((x, target)).item() for _ in range(3)]
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        state = step.training.optimizers[0].state_dict()["state"]
        return [losses, drawn, x, model.state_dict(), state]

    verified, plain = state_after(1), state_after(0)
    torch.testing.assert_close(verified, plain, rtol=0, atol=0)


def test_a_job_without_room_for_eager_pytorch_trains_on_with_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "spare_bytes", lambda _: 1000)
    step = compiled(mlp())
    step(BATCH)
    step(BATCH)
    assert step.notes == [note for note in step.notes if "step 0 was not verified, for lack of memory" in note]
    assert len(step.notes) == 1


def test_running_out_of_memory_while_verifying_ends_the_verification_alone(monkeypatch: pytest.MonkeyPatch):
    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    step = compiled(mlp())
    monkeypatch.setattr("fxcomp.step.verify.verifier.run_eagerly", out_of_memory)
    before = step.training.owned[0].parameter.clone()
    step(BATCH)
    assert not torch.equal(before, step.training.owned[0].parameter)
    assert "step 0 was not verified, for lack of memory" in step.notes[0]


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("job", "loss"), [("conv", cross_entropy), ("conv", autocast_loss), ("dropout", autocast_loss)]
)
def test_right_steps_raise_no_alarm(job: str, loss: Any):
    model = JOBS[job].build()
    step = compiled(model, loss, "adamw_default", JOBS[job].batch(0), max_grad_norm=0.5)
    for number in range(3):
        step(JOBS[job].batch(number))


def test_gradients_that_share_memory_are_clipped_once_each():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.one + self.two + x).sum()

    step = compiled(Sum(), lambda model, batch: model(batch), batch=torch.ones(3), max_grad_norm=0.1)
    for _ in range(2):
        step(torch.ones(3))


@pytest.mark.parametrize("name", ["is_expected", "step_own"])
def test_an_update_that_cannot_be_copied_for_want_of_memory_is_taken(monkeypatch: pytest.MonkeyPatch, name: str):
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    plain, step = compiled(other, verify=0), compiled(model)
    monkeypatch.setattr(f"fxcomp.step.verify.update.UpdateCheck.{name}", _fails)
    step(BATCH)
    plain(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# Precision


def test_what_is_noise_depends_on_the_precision():
    exact = compiled(mlp(), verify=0).in_force.program
    rounded = compiled(mlp(), autocast_loss, verify=0).in_force.program
    assert exact is not None
    assert rounded is not None
    assert compare.tolerance_of(exact.captured) == compare.FLOAT32
    assert compare.tolerance_of(rounded.captured) == compare.HALF[torch.bfloat16]


def test_a_gradient_that_is_zero_but_for_rounding_is_held_against_the_others():
    noise, other = torch.tensor([3e-9, -1e-9]), torch.tensor([-2e-9, 2e-9])
    assert compare.difference(noise, other, 1e-4) is not None
    assert compare.difference(noise, other, 1e-4, absolute=compare.FLOOR * 1e-4 * 1.0) is None


class WithSmall(nn.Module):
    """A large gradient, and one of 1e-5."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.small = nn.Linear(20, 10), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_small_gradient_that_is_wrong_is_named_though_it_is_noise_of_the_largest():
    weight = [1.0]

    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + weight[0] * 1e-5 * model.small.sum()

    step = compiled(WithSmall(), loss)
    step(BATCH)
    with (
        unseen_change(step, weight, 1.5),
        pytest.raises(VerificationFailed, match=r"gradient of 'small' differs from eager by up to 5e-06, .* 1.5e-05"),
    ):
        step(BATCH)


class Cancelling(nn.Module):
    """A bias before a batch norm of small values: the sum of large terms is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.fc = nn.LSTM(20, 8, batch_first=True), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.fc(self.recurrent(x.unsqueeze(0))[0][0])))


def test_a_gradient_whose_terms_cancel_is_allowed_eager_s_own_rounding(monkeypatch: pytest.MonkeyPatch):
    # Without a floor, rounding of an LSTM, whose eager kernel is another, is always more than noise.
    monkeypatch.setattr("fxcomp.step.verify.differences.FLOOR", 0.0)
    suspected: list[str] = []
    judge = Differences.judge_suspects

    def watched(self: Differences, rounding: Mapping[str, float]) -> dict[str, float]:
        suspected.extend(self.suspects)
        return judge(self, rounding)

    monkeypatch.setattr(Differences, "judge_suspects", watched)
    torch.manual_seed(0)
    model = Cancelling()
    step = compiled(model, optimizer="sgd")
    for _ in range(3):
        step(BATCH)
    assert "fc.bias" in suspected
    monkeypatch.setattr("fxcomp.step.verify.differences.ROUNDINGS", 1e-3)
    with pytest.raises(VerificationFailed, match=r"the gradient of 'fc\.bias' differs from eager"):
        step(BATCH)


def test_an_update_is_held_against_its_movement():
    before = torch.tensor([1.0, -2.0])
    after = before - 1e-3
    assert compare.moved_otherwise(before, after, after + 1e-8) is None
    assert compare.moved_otherwise(before, before - 1.1e-3, after) is not None
    infinite = torch.tensor([float("inf"), -2.0])
    assert compare.moved_otherwise(before, infinite, infinite.clone()) is None
    assert compare.moved_otherwise(before, infinite, before) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_fused_update_may_round_otherwise_in_its_type_and_another_rate_may_not(dtype: torch.dtype, steps: int):
    torch.manual_seed(0)
    start = (0.02 * torch.randn(4096)).to(dtype)
    gradients = [torch.randn(4096).to(dtype) for _ in range(steps)]

    def updated(rate: float, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([value], lr=1e-3, eps=1e-4, fused=fused)
        before = start
        for step, gradient in enumerate(gradients, 1):
            before, value.grad = value.detach().clone(), gradient
            optimizer.param_groups[0]["lr"] = rate if step == steps else 1e-3
            optimizer.step()
        return before, value.detach()

    before, expected = updated(1e-3, fused=False)
    if steps == 1:
        assert compare.moved_otherwise(before, updated(1e-3, fused=True)[1], expected) is None
    assert compare.moved_otherwise(before, updated(1.2e-3, fused=False)[1], expected) is not None


# Several ranks


def on_two_ranks() -> list[str]:
    job, rank = JOBS["mlp"], dist.get_rank()
    outcomes: list[str] = []

    def attempt(step: CompiledStep) -> None:
        try:
            step(job.batch(1, rank))
            outcomes.append("; ".join(step.notes))
        except VerificationFailed as error:
            outcomes.append(str(error))

    def made(plan: str, **options: Any) -> CompiledStep:
        step = compiled(job.build(), optimizer="adamw", batch=job.batch(0, rank), plan=plan, **options)
        step(job.batch(0, rank))
        step.notes.clear()
        return step

    attempt(made("dense", max_grad_norm=0.5))
    attempt(made("int8", max_grad_norm=0.5))
    for plan in ("dense", "int8"):  # the clipping goes missing
        step = made(plan, max_grad_norm=0.01)
        rerun_with(step, drop_clipping)
        attempt(step)
    step = made("dense")  # one bucket is sent with half of its weight
    rerun_with(step, halve_a_bucket)
    attempt(step)
    step = made("dense")  # one rank alone has baked its rate
    if rank == 1:
        rerun_with(step, bake("lr"))
    step.training.optimizers[0].param_groups[0]["lr"] = 0.1
    attempt(step)
    step = made("dense")  # one rank alone has no room
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(compat, "spare_bytes", lambda _: 1000)
        attempt(step)
    step = made("int8")  # one rank alone runs out of memory
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("fxcomp.step.verify.verifier.run_eagerly", _fails)
        attempt(step)
    for off in (1e-12, 1.0):  # one rank alone suspects a gradient, which is rounding, and which is not
        step = made("dense")
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(
                    Differences, "check_gradient", lambda self, *_, off=off: self.suspects.update(x=(off, "x"))
                )
                patch.setattr("fxcomp.step.verify.verifier.rounding_of", lambda *_: {"x": 1e-3})
            attempt(step)
    return outcomes


def _fails(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no more")


def test_ranks_verify_together_and_fail_together():
    first, second = run_ranks(2, on_two_ranks)
    assert first[:2] == second[:2] == ["", ""]
    assert all("is not the mean of the ranks' own, clipped" in rank[2] for rank in (first, second))
    assert all("the averaged gradients have the norm" in rank[3] for rank in (first, second))
    assert all("is not the mean of the ranks' own" in rank[4] for rank in (first, second))
    assert "another rank found a difference" in first[5]
    assert "All parameters of this rank have been updated" in first[5]
    assert "the update of '0.bias' differs" in second[5] or "the update of '0.weight' differs" in second[5]
    for place in (6, 7):
        assert all("was not verified, for lack of memory on some rank" in rank[place] for rank in (first, second))
    assert first[8] == second[8] == ""
    assert "another rank found a difference" in first[9]
    assert ": x.\n  No parameter has been updated" in second[9]


def test_a_weighted_sum_tells_a_mean_from_what_is_close_to_it():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(300, 70, generator=generator)
    means = Means(torch.device("cpu"))
    means.add("weight", mean)
    assert not means.contradict("weight", mean * (1 + 1e-7), 1.0)
    assert not means.contradict("weight", mean * 0.25, 0.25)
    for other in (mean * 1.001, mean.roll(1), mean.roll(1, 0), mean.flip(0), mean.roll(128 * 251), -mean, mean * 0):
        assert means.contradict("weight", other, 1.0)
    means.add("nan", mean * float("nan"))
    assert not means.contradict("nan", mean * float("nan"), 1.0)
    assert means.contradict("nan", mean, 1.0)
