"""`torch.compile(model, backend="fxcomp")` trains as DistributedDataParallel does, and refuses what it cannot rightly.

Cases that can share a spawn do: ranks report numbers and error texts, which the tests judge.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import JOBS, Job, cross_entropy
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

from fxcomp.cost.table import CostTable
from fxcomp.frontends import torch_compile as backend
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

STEPS = 10

TWO_BUCKETS = Plan(
    (Bucket(("2.bias", "2.weight"), (10, 3000), DENSE), Bucket(("0.bias", "0.weight"), (300, 6000), DENSE))
)


def compiled(model: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="fxcomp", options={"plan": "dense", **options})


def own_options(model: nn.Module) -> Callable[..., Any]:
    """Options of its own, so that the models of one process are told apart."""
    return compiled(model, model=model)


# What ranks run


@dataclass(frozen=True)
class Trained:
    parameters: list[Tensor]
    first_gradients: list[Tensor]
    losses: list[float]

    def distance(self, other: Trained) -> float:
        """The largest difference of parameters and of the first step's gradients."""
        mine, theirs = (t.parameters + t.first_gradients for t in (self, other))
        return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.numpy().tobytes())
        return digest.hexdigest()


def train(
    job: Job,
    wrap: Callable[[nn.Module], Callable[..., Any]],
    *,
    stretch: Callable[[int], int] = lambda _: 0,
    micro: int = 1,
) -> Trained:
    """Some steps of SGD, of `micro` accumulated backward passes each."""
    model = job.build()
    call = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first: list[Tensor] = []
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            loss = cross_entropy(call, job.batch(step * micro + part, dist.get_rank(), job.length + stretch(step)))
            loss.backward()
            losses.append(loss.item())
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return Trained([p.detach().clone() for p in model.parameters()], first, losses)


def rank_by_rank(step: int) -> int:
    """Other lengths on every rank, in another order."""
    return (step + dist.get_rank()) % 4


def in_bfloat16(call: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast around each forward pass."""

    def run(inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(inputs)

    return run


def parities() -> dict[str, float]:
    """Distances to eager DDP."""
    found: dict[str, float] = {}
    for name in ("mlp", "transformer", "conv"):
        ddp = train(JOBS[name], DistributedDataParallel)
        found[name] = train(JOBS[name], own_options).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel)
    found["two buckets"] = train(JOBS["mlp"], lambda model: compiled(model, plan=TWO_BUCKETS, model=model)).distance(
        ddp
    )
    chosen = {"plan": None, "costs": CostTable(), "mode": "lossless"}
    found["chosen"] = train(JOBS["mlp"], lambda model: compiled(model, model=model, **chosen)).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel, stretch=rank_by_rank)
    found["lengths"] = train(JOBS["mlp"], own_options, stretch=rank_by_rank).distance(ddp)
    ddp = train(JOBS["mlp"], lambda model: in_bfloat16(DistributedDataParallel(model)))
    found["autocast"] = train(JOBS["mlp"], lambda model: in_bfloat16(own_options(model))).distance(ddp)
    ddp = train(JOBS["mlp"], DistributedDataParallel, micro=2)
    found["accumulated"] = train(JOBS["mlp"], own_options, micro=2).distance(ddp)
    return found


def test_dense_training_equals_ddp():
    for found in run_ranks(2, parities):
        assert all(distance < 1e-6 for distance in found.values()), found


def compressed(name: str) -> tuple[str, float, float, float]:
    """The fingerprint, how far the loss is from dense, the distance to dense, and what the residuals hold."""
    dense = train(JOBS[name], own_options)
    job, models = JOBS[name], []

    def wrap(model: nn.Module) -> Callable[..., Any]:
        models.append(model)
        return compiled(model, plan="int8(block=1024)", model=model)

    lossy = train(job, wrap)
    kept = backend.compiled_model(models[0])
    left_out, saved = kept.state.residuals.arena.clone(), kept.state_dict()
    for _ in range(2):
        kept.state.residuals.arena.zero_()
        kept.load_state_dict(saved)
        assert torch.equal(kept.state.residuals.arena, left_out)
    return (
        lossy.fingerprint,
        abs(lossy.losses[-1] - dense.losses[-1]),
        lossy.distance(dense),
        left_out.abs().max().item(),
    )


def test_int8_keeps_ranks_bit_identical_and_follows_the_dense_loss():
    ranks = run_ranks(2, compressed, "mlp")
    assert len({fingerprint for fingerprint, *_ in ranks}) == 1
    for _, loss, distance, left_out in ranks:
        assert loss < 1e-2
        assert 0 < distance < 1e-2
        assert left_out > 0


# What is refused


class Broken(nn.Module):
    """Its forward breaks the graph between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Reduced(torch.autograd.Function):
    """Hands a parameter on, and sums its gradient over the ranks as the user asks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, operation: str, divide: bool) -> Tensor:
        ctx.operation, ctx.divide = operation, divide
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = collectives.all_reduce(gradient, ctx.operation, dist.group.WORLD)
        return total / dist.get_world_size() if ctx.divide else total, None, None


class ReducesItself(nn.Module):
    def __init__(self, operation: str, divide: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.how = operation, divide

    def forward(self, x: Tensor) -> Tensor:
        return x * Reduced.apply(self.weight, *self.how)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def step(call: Callable[..., Any]) -> None:
    call(torch.randn(3, 4)).sum().backward()


def failure(work: Callable[[], Any]) -> str:
    """The error's class and text, or what came back. Warnings come first."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = work()
            text = "" if result is None else str(result)
        except BackendCompilerFailed as error:
            text = str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return "\n".join([*(str(w.message) for w in caught if "fxcomp" in str(w.message)), text])


def break_without_model() -> None:
    step(compiled(seeded(Broken)))


def break_with_model() -> None:
    model = seeded(Broken)
    step(compiled(model, model=model))


def unused() -> str:
    model = seeded(Unused)
    step(compiled(model, model=model))
    return f"no gradient for {[name for name, p in model.named_parameters() if p.grad is None]}"


def used_outside() -> None:
    model = seeded(Unused)
    net = compiled(model, model=model)
    (net(torch.randn(3, 4)).sum() + model.unused.weight.sum()).backward()


def unused_but_ignored() -> float:
    """`used.bias` is ignored too: it keeps this rank's own gradient."""
    model = nn.ModuleList([seeded(Unused)])[0]
    step(compiled(model, model=model, ignore=["unused.weight", "unused.bias", "used.bias"]))
    assert model.used.weight.grad is not None
    return model.used.weight.grad.mean().item()


def wrapped() -> None:
    step(compiled(DistributedDataParallel(seeded(Unused), find_unused_parameters=True)))


def wraps_inside() -> None:
    step(DistributedDataParallel(compiled(seeded(lambda: nn.Linear(4, 4)))))


def other_start() -> None:
    torch.manual_seed(dist.get_rank())
    step(compiled(nn.Linear(4, 4)))


def other_start_shared() -> float:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    step(compiled(model, model=model))
    return model.weight.sum().item()


def other_model() -> None:
    step(compiled(seeded(lambda: nn.Linear(4, 4 + dist.get_rank()))))


def half() -> None:
    step(compiled(seeded(lambda: nn.Linear(4, 4, dtype=torch.float64)).requires_grad_(True)))


def drift() -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    call = compiled(model)
    step(call)
    with torch.no_grad():
        model.bias.add_(dist.get_rank())
    step(call)


def eager_behind_its_back() -> None:
    model = seeded(lambda: nn.Linear(4, 4))
    call = compiled(model)
    step(call)
    step(call)
    step(model)


def two_models() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4))
    calls = compiled(first, model=first), compiled(second, model=second)
    step(lambda x: calls[1](calls[0](x)))


def two_alike_without_options() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4))
    step(compiled(first))
    step(compiled(second))


def two_models_without_options() -> None:
    first, second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 3))
    calls = (
        torch.compile(first, backend="fxcomp", mode="lossless"),
        torch.compile(second, backend="fxcomp", mode="lossless"),
    )
    step(lambda x: calls[1](calls[0](x)))


def shared_gradient() -> float:
    """Two parameters whose gradients are one tensor, which goes on into the layer before."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 4)
            self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.before(x) + self.a + self.b

    model, other = seeded(Shared), DistributedDataParallel(seeded(Shared))
    x, weight = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for call in (compiled(model), other):
        (call(x) * weight).sum().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None)


def reduces_itself(operation: str, divide: bool) -> float:
    """Return the distance of its own reduction from the mean over the ranks; of a mean that it divides, the half."""
    model = ReducesItself(operation, divide)
    compiled(model)(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
    assert model.weight.grad is not None
    mean = 0.75 if operation == "avg" and divide else 1.5
    return (model.weight.grad - mean).abs().max().item()


class Contrasts(nn.Module):
    """Compares its embeddings with all ranks', normalised by a count over all ranks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = self.body(x)
        everyone = collectives.all_gather_tensor_autograd(own, 0, dist.group.WORLD)
        count = (x[:, 0] > 0).sum()
        dist.all_reduce(count)
        return (own @ everyone.T).logsumexp(1) / (count + 1)


def exchanges_inside() -> float:
    """Return the gradients' distance from eager DDP's where the forward and backward pass communicate by themselves."""
    models = [seeded(Contrasts), seeded(Contrasts)]
    calls = [compiled(models[0], model=models[0]), DistributedDataParallel(models[1])]
    for model, call in zip(models, calls, strict=True):
        torch.manual_seed(dist.get_rank())
        step(call)
        assert model.body.weight.grad is not None
    assert "rt.exchange(" in backend.compiled_model(models[0]).source
    return max((p.grad - q.grad).abs().max().item() for p, q in zip(*(m.parameters() for m in models), strict=True))


def missing_state() -> None:
    backend.compiled_model(nn.Linear(2, 2))


CASES: dict[str, Callable[[], Any]] = {
    "break": break_without_model,
    "break_with_model": break_with_model,
    "unused": unused,
    "used_outside": used_outside,
    "ignored": unused_but_ignored,
    "wrapped": wrapped,
    "wraps_inside": wraps_inside,
    "other_start": other_start,
    "other_start_shared": other_start_shared,
    "other_model": other_model,
    "float64": half,
    "drift": drift,
    "eager": eager_behind_its_back,
    "two_models": two_models,
    "two_alike_without_options": two_alike_without_options,
    "two_models_without_options": two_models_without_options,
    "shared_gradient": shared_gradient,
    "own_mean": lambda: reduces_itself("avg", False),
    "own_sum_divided": lambda: reduces_itself("sum", True),
    "own_sum": lambda: reduces_itself("sum", False),
    "own_mean_divided": lambda: reduces_itself("avg", True),
    "exchanges_inside": exchanges_inside,
    "missing_state": missing_state,
}


def failures() -> dict[str, str]:
    return {name: failure(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def texts() -> list[dict[str, str]]:
    """For each rank, how each case ended."""
    return run_ranks(2, failures)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "break",
            [
                "CaptureFailed: a second graph has other trainable",
                "test_torch_compile.py:",
                "fullgraph=True",
                "ends early, at",
            ],
        ),
        ("break_with_model", ["UnsynchronizedGradient: the gradient of 'second.weight' never", "The graph broke at"]),
        (
            "unused",
            ["does not depend on 'unused.weight'", "skipped, as eager PyTorch", "for ['unused.weight', 'unused.bias']"],
        ),
        (
            "used_outside",
            ["UnsynchronizedGradient: the gradient of 'unused.weight' never", "\"ignore\": ['unused.weight']"],
        ),
        ("wrapped", ["UnsupportedFeature: the model is wrapped in DistributedDataParallel", "unwrapped"]),
        ("wraps_inside", ["UnsupportedFeature: the model is wrapped in DistributedDataParallel"]),
        (
            "other_start",
            ["ModelsDiffer: the parameter 'bias' starts with other values on rank 1", "Seed all ranks alike"],
        ),
        ("other_model", ["ModelsDiffer: rank 1 and rank 0", "the shape of 'bias' is [5] on rank 1 and [4] on rank 0"]),
        ("float64", ["UnsupportedParameter: the parameter 'weight' is torch.float64", "torch.autocast"]),
        ("drift", ["UnsynchronizedGradient: the parameter 'bias' differs between ranks"]),
        ("eager", ["a backward pass gave gradients without the compiled graph", "fullgraph=True"]),
        ("two_models_without_options", ["CaptureFailed", 'options={"model": model}']),
        ("two_alike_without_options", ["CaptureFailed: the parameter 'weight' is another object", "own options"]),
        ("own_sum", ["UnsupportedFeature: the gradient of 'weight' is summed", "divide the sum"]),
        ("missing_state", ["FxcompError: this model has no compiled backward pass yet"]),
    ],
)
def test_every_rank_says_what_is_wrong(texts: list[dict[str, str]], case: str, expected: list[str]):
    for rank in texts:
        for part in expected:
            assert part in rank[case]


@pytest.mark.parametrize("case", ["ignored", "other_start_shared"])
def test_all_ranks_find_the_same(texts: list[dict[str, str]], case: str):
    assert float(texts[0][case]) == float(texts[1][case])


@pytest.mark.parametrize("case", ["shared_gradient", "own_mean", "own_sum_divided", "own_mean_divided"])
def test_every_gradient_is_averaged_once(texts: list[dict[str, str]], case: str):
    assert all(float(rank[case]) < 1e-6 for rank in texts)


def test_collectives_inside_the_forward_and_backward_pass_are_kept(texts: list[dict[str, str]]):
    assert all(float(rank["exchanges_inside"].splitlines()[-1]) < 1e-6 for rank in texts)


def test_two_models_each_have_a_graph(texts: list[dict[str, str]]):
    assert [rank["two_models"].strip() for rank in texts] == ["", ""]


# One process


@pytest.fixture
def alone():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("alone")
def test_without_a_process_group_it_is_eager():
    job = JOBS["transformer"]
    models = job.build(), job.build()
    for model, call in zip(models, (models[0], compiled(models[1])), strict=True):
        cross_entropy(call, job.batch(0)).backward()
        assert all(p.grad is not None for p in model.parameters())
    for eager, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(eager.grad, ours.grad)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plann": "dense"}, "there is no option 'plann'; did you mean 'plan'?"),
        ({"race": "auto"}, "options['race'] is 'off' here: the backend sees backward passes and times no steps"),
        ({"mode": "lossles"}, "there is no mode 'lossles'; did you mean 'lossless'?"),
        ({"model": "mlp"}, "options['model'] must be the module that is compiled; it is a str"),
        ({"ignore": ["bias"]}, "needs options['model']"),
        ({"model": nn.Linear(2, 2), "ignore": ["bais"]}, "did you mean 'bias'?"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], text: str):
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", options=options)
    with pytest.raises(BackendCompilerFailed) as raised:
        model(torch.ones(1, 2))
    assert "BadOption" in str(raised.value)
    assert text in str(raised.value)


@pytest.mark.usefixtures("alone")
def test_a_mode_is_an_option_too():
    model = torch.compile(nn.Linear(2, 2), backend="fxcomp", mode="agressive")
    with pytest.raises(BackendCompilerFailed, match="did you mean 'aggressive'"):
        model(torch.ones(1, 2))


def test_torch_finds_the_backend_by_its_entry_point():
    assert "fxcomp" in torch._dynamo.list_backends()
