"""`fxcomp.compile_model`: a gradient that no compiled backward pass has averaged raises before it is stored.

All cases of two ranks share a spawn: ranks report error texts and numbers, which the tests judge.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo import config, exc
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp.errors import BadOption, PeerFailed, Unsupported
from fxcomp.frontends import torch_compile as backend


def compiled(model: nn.Module, **options: Any) -> Any:
    return fxcomp.compile_model(model, "dense", **options)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def batch(step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def outcome(work: Callable[[], Any]) -> str:
    """Return the error's class and text, or the result's text."""
    torch._dynamo.reset()
    try:
        return str(work())
    except BackendCompilerFailed as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Models of which torch makes no graph


class Decides(nn.Module):
    """Reads a number in a `try`, where Dynamo cannot end a graph and skips the whole frame."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            scale = 2.0 if x.sum().item() > 0 else 1.0
        finally:
            pass
        return self.layer(x) * scale


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).pow(2).mean()


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def trains(model: nn.Module, x: Tensor | None = None, **options: Any) -> None:
    compiled(model, **options)(batch() if x is None else x).pow(2).mean().backward()


def full_backward_hook() -> None:
    model = mlp()
    model[0].register_full_backward_hook(lambda *_: None)
    trains(model)


def batch_norm_without_momentum() -> None:
    trains(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))))


def sparse_embedding() -> None:
    trains(seeded(lambda: nn.Embedding(9, 4, sparse=True, padding_idx=0)), torch.tensor([1, 0, 3]))


def quantization_aware() -> None:
    model = mlp().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    trains(torch.ao.quantization.prepare_qat(model))


def other_method() -> None:
    compiled(seeded(Methods)).loss(batch()).backward()


def module_itself() -> None:
    model = mlp()
    compiled(model)
    model(batch()).sum().backward()


def forced_eager() -> None:
    with torch.compiler.set_stance("force_eager"):
        trains(mlp())


def compilation_is_off() -> None:
    with config.patch(disable=True):
        trains(mlp())


def recompile_limit() -> None:
    """Shapes change more often than torch allows."""
    model = mlp()
    call = compiled(model, dynamic=False)
    with config.patch(recompile_limit=2):
        for length in range(2, 8):
            call(torch.randn(length, 4)).sum().backward()


def several_swallowed() -> list[str]:
    """Raise what Dynamo takes for a reason to run eager code; each must reach the user, and again with a gradient."""
    swallowed = [
        fake_tensor.DataDependentOutputException(torch.ops.aten.nonzero.default),
        fake_tensor.DynamicOutputShapeException(torch.ops.aten.nonzero.default),
        fake_tensor.UnsupportedOperatorException(torch.ops.aten.nonzero.default),
        fake_tensor.UnsupportedFakeTensorException("planted"),
        fake_tensor.UnsupportedMutationAliasingException("planted"),
        exc.SkipFrame("planted"),
        AssertionError("planted"),
        IndexError("planted"),
    ]
    texts: list[str] = []
    own = backend._compile_graph
    for error in swallowed:

        def failing(*_: Any, error: Exception = error) -> Any:
            raise error

        backend._compile_graph = failing
        try:
            model = mlp()
            first = outcome(lambda model=model: trains(model))
            with torch.compiler.set_stance("force_eager"):
                second = outcome(lambda model=model: model(batch()).sum().backward())
            texts.append(f"{first} | {second} | {gradients(model)}")
        finally:
            backend._compile_graph = own
    return texts


def suppressed_after_the_call() -> None:
    call = compiled(mlp())
    with config.patch(suppress_errors=True):
        call(batch()).sum().backward()


def watched_for_another_group() -> None:
    model = mlp()
    compiled(model, process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()])
    compiled(model)
    model(batch()).sum().backward()


def other_options() -> None:
    model = mlp()
    some_steps(compiled(model))
    some_steps(fxcomp.compile_model(model, "int8"))


def reset_before_backward() -> None:
    loss = compiled(mlp())(batch()).sum()
    torch._dynamo.reset()
    loss.backward()


def eager_inside_no_sync() -> None:
    model = mlp()
    call = compiled(model)
    call(batch()).sum().backward()
    with fxcomp.no_sync(model):
        model(batch()).sum().backward()
    call(batch()).sum().backward()


def data_outside(on_ranks: tuple[int, ...]) -> None:
    model = mlp()
    call = compiled(model)
    loss = call(batch()).sum()
    if dist.get_rank() in on_ranks:
        loss = loss + (model[2].weight * batch().mean()).sum()
    loss.backward()


REFUSED: dict[str, Callable[[], Any]] = {
    "full backward hook": full_backward_hook,
    "batch norm without momentum": batch_norm_without_momentum,
    "sparse embedding": sparse_embedding,
    "quantization-aware": quantization_aware,
    "item in a try": lambda: trains(seeded(Decides)),
    "disabled": lambda: trains(seeded(lambda: Disabled(4, 3))),
    "forced eager": forced_eager,
    "compilation is off": compilation_is_off,
    "other method": other_method,
    "module itself": module_itself,
    "recompile limit": recompile_limit,
    "suppressed after the call": suppressed_after_the_call,
    "eager inside no_sync": eager_inside_no_sync,
    "watched for another group": watched_for_another_group,
    "other options": other_options,
    "reset before backward": reset_before_backward,
    "data outside on all": lambda: data_outside((0, 1)),
    "data outside on one": lambda: data_outside((1,)),
}

EXPECTED = {
    "sparse embedding": "CaptureFailed: torch could not compile the model for training: DynamicOutputShapeException",
    "forced eager": "set_stance('force_eager') is in force",
    "compilation is off": "TORCH_COMPILE_DISABLE=1",
    "suppressed after the call": "Unsupported: torch._dynamo.config.suppress_errors is on",
    "other options": "BadOption: the model has been compiled with other options before",
    "reset before backward": "BadCall: this model's compiled backward pass has been closed",
    "data outside on all": "the gradient of '2.weight' differs between ranks",
    "data outside on one": "the gradient of '2.weight' differs between ranks",
}

# What is right


def distance(model: nn.Module, work: Callable[[Any, nn.Module], None]) -> float:
    """Return the largest distance of gradients from DistributedDataParallel's after the same work."""
    other = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    work(compiled(model), model)
    work(other, other.module)
    pairs = list(zip(gradients(model), gradients(other.module), strict=True))
    assert pairs
    return max(float((a - b).abs().max()) for a, b in pairs)


def some_steps(call: Any, steps: int = 2) -> None:
    for step in range(steps):
        call(batch(step)).pow(2).mean().backward()


def frozen_first(call: Any, model: nn.Module) -> None:
    model[0].requires_grad_(False)
    some_steps(call)


def penalty_outside(call: Any, model: nn.Module) -> None:
    for step in range(4):
        (call(batch(step)).sum() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()


def several_backward_calls(call: Any, _: nn.Module) -> None:
    loss = call(batch()).pow(2)
    loss.mean().backward(retain_graph=True)
    loss.sum().backward()
    call(batch(1)).sum().backward()


def evaluates(call: Any, _: nn.Module) -> None:
    with torch.no_grad():
        call(batch())
    some_steps(call)
    with torch.no_grad():
        call(torch.ones(2, 4))


def reads_gradients(call: Any, model: nn.Module) -> None:
    some_steps(call)
    torch.autograd.grad(model(batch()).sum(), list(model.parameters()))


class Reentrant(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)


def checkpointed_outside(call: Any, _: nn.Module) -> None:
    for step in range(3):
        checkpoint(call, batch(step).requires_grad_(), use_reentrant=True).sum().backward()


def copies(call: Any, model: nn.Module) -> None:
    """A copy is not watched: it may train alone."""
    some_steps(call)
    other = copy.deepcopy(model)
    other(batch()).sum().backward()
    torch.save(model, io.BytesIO())


def freezes_and_thaws() -> tuple[float, int]:
    """Return the distance from DDP that is wrapped again after each change, and the number of plans."""
    models = [mlp(), mlp()]
    for model, wrap in zip(models, (lambda m: compiled(m), lambda m: DistributedDataParallel(m)), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        call = wrap(model)
        for step in range(9):
            if step % 3 == 0:
                model[0].requires_grad_(step != 3)
                call = call if wrap(model) is call or model is models[0] else DistributedDataParallel(model)
            call(batch(step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), len(backend._known(models[0], None))


def freezes_with_residuals(frozen: tuple[int, ...]) -> list[float]:
    """Return the sum over ranks of what has been applied and is left out, less what dense training applies."""
    model, dense = mlp(), mlp()
    call = fxcomp.compile_model(model, "topk(0.1)")
    applied, expected = torch.zeros_like(model[2].weight), torch.zeros_like(model[2].weight)
    for step in range(6):
        for each in (model, dense):
            each[0].requires_grad_(step not in frozen)
            each.zero_grad()
        call(batch(step)).pow(2).mean().backward()
        dense(batch(step)).pow(2).mean().backward()
        applied += model[2].weight.grad
        expected += dense[2].weight.grad
    kept = backend.compiled_model(model)
    owed = kept.state.owed_here(kept.follower.trained.sizes, 2)["2.weight"].view_as(applied)
    for total in (owed, expected):
        dist.all_reduce(total)
    return [float((applied + owed / 2 - expected / 2).abs().max()), float(owed.abs().max())]


def saves_while_frozen() -> list[str]:
    """Return the warnings of a state: before a layer freezes, while it is frozen, and after it trains again."""
    model, said = mlp(), list[str]()
    call = fxcomp.compile_model(model, "topk(0.1)")
    for step, trains in enumerate((True, False, True)):
        model[0].requires_grad_(trains)
        call(batch(step)).pow(2).mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backend.compiled_model(model).state_dict()
        said += ["; ".join(str(each.message) for each in caught)]
    return said


def freezes_inside_a_group() -> float:
    """Return how far gradients are apart on the ranks where layers freeze between micro-batches."""
    model = mlp()
    call = compiled(model)
    some_steps(call)
    model.zero_grad()
    with fxcomp.no_sync(model):
        call(batch(2)).sum().backward()
    model[0].requires_grad_(False)
    call(batch(3)).sum().backward()
    both = [torch.empty_like(model[2].weight) for _ in range(2)]
    dist.all_gather(both, model[2].weight.grad)
    return float((both[0] - both[1]).abs().max())


def is_freed() -> int:
    model = mlp()
    some_steps(compiled(model))
    watched = weakref.ref(model[0].weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    return int(watched() is not None)


def is_accepted_by_compile_step() -> float:
    models = [mlp(), mlp()]
    compiled(models[0])
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = fxcomp.compile_step(
            model, lambda m, x: m(x).pow(2).mean(), optimizer, batch(), compress="dense", checks=fxcomp.Checks(verify=1)
        )
        losses.append([float(step(batch(number))) for number in range(3)])
        step.close()
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def shares_a_parameter() -> float:
    """Return the distance from eager means where two compiled models hold the same layer."""
    shared, heads = mlp(), [seeded(lambda: nn.Linear(3, 2)), seeded(lambda: nn.Linear(3, 5))]
    models = [nn.Sequential(shared, head) for head in heads]
    calls = [compiled(model, fullgraph=True) for model in models]
    sum(call(batch()).pow(2).sum() for call in calls).backward()
    found = shared[0].weight.grad.clone()
    shared.zero_grad()
    expected = torch.autograd.grad(sum(model(batch()).pow(2).sum() for model in models), shared[0].weight)[0]
    dist.all_reduce(expected)
    return float((found - expected / 2).abs().max())


def bare_backend_falls_back() -> float:
    """Return the distance from DDP after the backend alone refused an option, and the user went on with DDP."""
    model = mlp()
    with suppress(BackendCompilerFailed):
        torch.compile(model, backend="fxcomp", options={"model": model, "colour": 1})(batch())
    other = mlp()
    for each in (model, other):
        some_steps(DistributedDataParallel(each))
    return max(float((a - b).abs().max()) for a, b in zip(gradients(model), gradients(other), strict=True))


def is_never_trained() -> int:
    model = mlp()
    with torch.no_grad():
        compiled(model)(batch())
    compiled(model)(batch())
    return len(gradients(model))


RIGHT: dict[str, Callable[[], float]] = {
    "two steps": lambda: distance(mlp(), lambda call, _: some_steps(call)),
    "frozen": lambda: distance(mlp(), frozen_first),
    "penalty outside": lambda: distance(mlp(), penalty_outside),
    "several backward calls": lambda: distance(mlp(), several_backward_calls),
    "evaluation": lambda: distance(mlp(), evaluates),
    "autograd.grad": lambda: distance(mlp(), reads_gradients),
    "checkpointed outside": lambda: distance(mlp(), checkpointed_outside),
    "copies": lambda: distance(mlp(), copies),
    "compiled twice": lambda: distance(compiled(mlp())._orig_mod, lambda call, _: some_steps(call)),
    "compile_step": is_accepted_by_compile_step,
    "freezes inside a group": freezes_inside_a_group,
    "freed": is_freed,
    "shared by two models": shares_a_parameter,
    "backend alone falls back to DDP": bare_backend_falls_back,
    "never trained": is_never_trained,
}


def all_cases() -> dict[str, Any]:
    found: dict[str, Any] = {name: outcome(case) for name, case in {**REFUSED, **RIGHT}.items()}
    found["swallowed"] = several_swallowed()
    found["freezes and thaws"] = outcome(freezes_and_thaws)
    found["residuals"] = [outcome(partial(freezes_with_residuals, frozen)) for frozen in ((2, 3), (3, 4, 5), (0, 1))]
    found["saves"] = saves_while_frozen()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """For each rank, how each case ended."""
    return run_ranks(2, all_cases)


@pytest.mark.parametrize("case", REFUSED)
def test_a_gradient_that_no_rank_averages_raises_on_every_rank(found: list[dict[str, Any]], case: str):
    for rank in found:
        text = rank[case]
        assert "never reaches a collective" in text or case in EXPECTED, text
        assert EXPECTED.get(case, "CaptureFailed: the gradient of '") in text


def test_what_dynamo_swallows_is_raised_and_raised_again(found: list[dict[str, Any]]):
    for rank in found:
        for text in rank["swallowed"]:
            first, second, stored = text.split(" | ")
            assert "CaptureFailed: torch could not compile" in first
            assert second.startswith("CaptureFailed: torch could not compile")
            assert stored == "[]"


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_raises_nothing(found: list[dict[str, Any]], case: str):
    for rank in found:
        assert float(rank[case]) < 1e-6, rank[case]


def test_each_set_of_trained_parameters_has_a_plan(found: list[dict[str, Any]]):
    for rank in found:
        off, plans = eval(rank["freezes and thaws"])
        assert off < 1e-6
        assert plans == 2


def test_freezing_loses_nothing_that_compression_left_out(found: list[dict[str, Any]]):
    for rank in found:
        for text in rank["residuals"]:
            off, owed = eval(text)
            assert owed > 1e-3
            assert off < 1e-5


def test_a_state_warns_of_what_frozen_parameters_are_owed(found: list[dict[str, Any]]):
    for rank in found:
        before, frozen, after = rank["saves"]
        assert not before
        assert "this state lacks the residuals of 0.weight, which were frozen" in frozen
        assert "save after a backward pass that trains them" in frozen
        assert not after


def warned_by_the_backend_alone() -> list[int]:
    counts: list[int] = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = mlp()
        call = compiled(model) if watched else torch.compile(model, backend="fxcomp", options={"model": model})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for length in (2, 3, 4):
                call(torch.ones(length, 4)).sum().backward()
        counts.append(sum("cannot see parameters that never reach it" in str(each.message) for each in caught))
    return counts


def test_the_backend_alone_warns_once_a_model():
    assert run_ranks(2, warned_by_the_backend_alone) == [[1, 0]] * 2


# One rank alone


def fails_alone(when: str) -> str:
    """Rank 1 runs eagerly at some time; return the error of this rank."""
    model = mlp()
    call = compiled(model)
    is_first = when == "first pass"
    for step in range(1 if is_first else 3):
        eager = dist.get_rank() == 1 and (is_first or step == 2)
        model[0].requires_grad_(when != "first pass of other parameters" or step < 2)
        try:
            with torch.compiler.set_stance("force_eager") if eager else nullcontext():
                call(batch(step)).sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


def refuses_alone() -> str:
    """Rank 1's backend refuses an option that rank 0 does not have."""
    model = mlp()
    options: dict[str, Any] = {"model": model, "compress": "dense"}
    if dist.get_rank() == 1:
        options["colour"] = "blue"
    try:
        torch.compile(model, backend="fxcomp", options=options)(batch()).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("case", ["first pass", "later pass", "first pass of other parameters", "in the backend"])
def test_ranks_that_wait_for_one_that_fails_are_given_its_error(case: str):
    ranks = run_ranks(2, refuses_alone) if case == "in the backend" else run_ranks(2, fails_alone, case)
    cause = "there is no option 'colour'" if case == "in the backend" else "force_eager"
    assert cause in ranks[1]
    assert PeerFailed.__name__ in ranks[0]
    assert cause in ranks[0]


def goes_on_afterwards() -> list[str]:
    """Fail on rank 1 alone before the first meeting, then train: no answer of the failure is taken for a later one."""
    texts = [outcome(lambda: fails_alone("first pass"))]
    torch._dynamo.reset()
    model = mlp()
    some_steps(compiled(model))
    return [*texts, str(float(sum(g.sum() for g in gradients(model))))]


def test_ranks_meet_again_after_one_of_them_failed():
    one, other = run_ranks(2, goes_on_afterwards)
    assert "PeerFailed" in one[0]
    assert one[1] == other[1]


# Options


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((nn.Linear(2, 2), "dense", {"colour": 1}), BadOption, "there is no option 'colour'"),
        ((nn.Linear(2, 2), "no_such", {}), fxcomp.FxcompError, "no_such"),
        ((print, "dense", {}), BadOption, "compile_model takes a torch.nn.Module; it is a builtin"),
        ((nn.Linear(2, 2), "dense", {"ignore": ["wieght"]}), BadOption, "did you mean 'weight'"),
        ((nn.Linear(2, 2), "dense", {"accumulate": 2}), BadOption, "Use fxcomp.compile_step"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(arguments: tuple[Any, str, Any], error: type, text: str):
    model, compress, options = arguments
    with pytest.raises(error, match=text):
        fxcomp.compile_model(model, compress, **options)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("wrap", "where"),
    [(lambda part: part, "the model"), (lambda part: nn.Sequential(nn.Tanh(), part), "the module '1'")],
)
def test_modules_of_torch_jit_are_refused_at_the_call(wrap: Callable[[Any], nn.Module], where: str):
    part = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=f"{where} is a RecursiveScriptModule of torch.jit"):
        fxcomp.compile_model(wrap(part))
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    if where != "the model":
        fxcomp.compile_model(wrap(part))


def test_suppressed_errors_are_refused_at_the_call():
    with config.patch(suppress_errors=True), pytest.raises(fxcomp.FxcompError, match="suppress_errors is on"):
        fxcomp.compile_model(nn.Linear(2, 2))


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_rank_alone_trains_as_eager_even_without_a_graph():
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    call = fxcomp.compile_model(models[1])
    for each in (models[0], models[1], call):
        each(torch.ones(2, 4)).sum().backward()
    assert torch.equal(2 * models[0].weight.grad, models[1].weight.grad)


def test_ddp_is_refused_at_the_call():
    wrapped: Any = nn.Linear(2, 2)
    wrapped.__class__ = type("Wrapped", (DistributedDataParallel,), {})
    with pytest.raises(Unsupported, match="wrapped in DistributedDataParallel"):
        fxcomp.compile_model(wrapped)


def test_a_model_that_is_not_initialized_yet_is_watched():
    model = nn.LazyLinear(3)
    fxcomp.compile_model(model)
    model(torch.ones(2, 4))
    assert model.weight._backward_hooks
