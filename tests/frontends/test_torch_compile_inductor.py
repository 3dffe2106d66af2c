"""With `inductor=True` the backend trains as `backend="inductor"` does, compiled by Inductor in both passes.

All cases share a spawn: compiling takes long, and ranks report numbers, which the tests judge.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.torch_compiled import QUICK, compiled, seeded
from torch import Tensor, nn
from torch._inductor import config
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import fxcomp
from fxcomp.frontends.torch_compile import compiled_model
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own

TWO_BUCKETS = Plan((Bucket(("2.bias", "2.weight"), (10, 480), DENSE), Bucket(("0.bias", "0.weight"), (48, 960), DENSE)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 10))


def conv() -> nn.Module:
    """Its running statistics change in each forward pass."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attend(x, x, x, need_weights=False)[0], 0.3)
        return self.head(self.norm(x))


class Checkpointed(nn.Module):
    """A block that is computed again, with a dropout inside, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 20), nn.Linear(20, 10)

    def block(self, x: Tensor) -> Tensor:
        return dropout(torch.tanh(self.first(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(dropout(checkpoint(self.block, x, use_reentrant=False), 0.3))


@contextmanager
def graphs_of_inductor() -> Generator[list[tuple[bool, bool]]]:
    """List what Inductor compiles: whether each is an inference graph, as regions are, or a whole backward pass."""
    from torch._inductor import compile_fx

    found: list[tuple[bool, bool]] = []
    inner = compile_fx._compile_fx_inner

    def counted(gm: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        found.append((how["is_inference"], how["is_backward"]))
        return inner(gm, inputs, *args, **how)

    compile_fx._compile_fx_inner = counted
    try:
        yield found
    finally:
        compile_fx._compile_fx_inner = inner


def batch(shape: Sequence[int], number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * dist.get_rank() + number))


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """The gradients after a backward pass. All ranks draw numbers of their own."""
    model.zero_grad()
    torch.manual_seed(5 + dist.get_rank())
    run().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gap(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference, in units of the largest element."""
    pairs = zip(mine, theirs, strict=True)
    return max((((a - b).abs().max() / (b.abs().max() + 1e-3)).item() for a, b in pairs), default=0.0)


def drift(values: Sequence[Tensor]) -> float:
    """The largest difference from rank 0."""
    flat = torch.cat([value.flatten() for value in values])
    first = flat.clone()
    dist.broadcast(first, 0)
    return (flat - first).abs().max().item()


def compared(
    build: Callable[[], nn.Module], losses: Callable[[Callable[..., Any]], Tensor], **options: Any
) -> tuple[float, float]:
    """The gap to the mean of what `backend="inductor"` makes on every rank, and how far ranks differ."""
    torch._dynamo.reset()
    ours, model = (seeded(build) for _ in range(2))
    theirs = torch.compile(model, backend="inductor", dynamic=options.get("dynamic"))
    run = compiled(ours, model=ours, inductor=True, **{"plan": "dense", **options})
    mine = gradients(ours, lambda: losses(run))
    expected = means(gradients(model, lambda: losses(theirs)))
    buffers = gap([b.float() for b in ours.buffers()], [b.float() for b in model.buffers()])
    return max(gap(mine, expected), buffers), drift(mine)


def two_forwards(run: Callable[..., Any]) -> Tensor:
    return run(batch((6, 20))).square().mean() + run(batch((6, 20), 1)).square().mean()


@config.patch(QUICK)
def passes_of_an_mlp() -> dict[str, Any]:
    """Tell what Inductor compiled, gaps to eager, and what became of gradients held."""
    found: dict[str, Any] = {}
    model, eager = seeded(mlp), seeded(mlp)
    run = compiled(model, model=model, inductor=True, plan=TWO_BUCKETS)
    with graphs_of_inductor() as graphs:
        first = gradients(model, lambda: run(batch((6, 20))).square().mean())
    found["graphs"] = graphs
    held = [gradient.clone() for gradient in first]
    found["memories"] = len({gradient.untyped_storage().data_ptr() for gradient in first})
    for rows in (9, 4):
        found[f"{rows} rows"] = gap(
            gradients(model, lambda rows=rows: run(batch((rows, 20))).square().mean()),
            means(gradients(eager, lambda rows=rows: eager(batch((rows, 20))).square().mean())),
        )
    found["held gradients changed by"] = gap(first, held)
    model.zero_grad()
    with fxcomp.no_sync(model):
        run(batch((6, 20))).square().mean().backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found["no_sync, own"] = gap(own, gradients(eager, lambda: eager(batch((6, 20))).square().mean()))
    run(batch((6, 20), 1)).square().mean().backward()
    summed = [p.grad for p in model.parameters() if p.grad is not None]
    found["no_sync, averaged"] = gap(summed, means(gradients(eager, lambda: two_forwards(eager))))
    found["ranks differ by"] = drift(summed)
    found["source"] = compiled_model(model).source
    return found


def means(values: Sequence[Tensor]) -> list[Tensor]:
    """The ranks' means of these values."""
    copies = [value.clone() for value in values]
    for each in copies:
        dist.all_reduce(each)
    return [each / dist.get_world_size() for each in copies]


def test_inductor_compiles_both_passes_and_gradients_lie_in_their_buckets():
    for found in run_ranks(2, passes_of_an_mlp):
        forward, *regions = found.pop("graphs")
        assert forward == (False, False)
        assert regions == [(True, False)] * 2, "the backward pass's regions, one for each bucket"
        assert "aten.clone" not in found.pop("source")
        assert found.pop("memories") == 2
        assert found.pop("ranks differ by") == 0
        assert found.pop("held gradients changed by") == 0
        assert all(distance < 1e-5 for distance in found.values()), found


@config.patch(QUICK)
def other_models() -> dict[str, tuple[float, float]]:
    """Gaps to `backend="inductor"`, and how far ranks differ."""
    found = {"two forward passes": compared(mlp, two_forwards, plan=TWO_BUCKETS)}
    found["conv"] = compared(conv, lambda run: run(batch((4, 3, 8, 8))).square().mean())
    for name, build, shape in (("attention", Attention, (3, 5, 16)), ("checkpointed", Checkpointed, (6, 20))):
        for torch_draws in (False, True):
            with config.patch(fallback_random=torch_draws):
                by = "torch" if torch_draws else "Inductor"
                found[f"{name}, drawn by {by}"] = compared(
                    build, lambda run, shape=shape: run(batch(shape)).square().mean()
                )
    return found


@pytest.mark.slow
def test_gradients_are_those_of_inductor():
    for found in run_ranks(2, other_models, timeout_s=600):
        assert len(found) == 6
        assert all(distance < 1e-5 and apart == 0 for distance, apart in found.values()), found


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_rank_alone_draws_and_trains_as_eager_where_torch_draws():
    model, eager = (seeded(Checkpointed) for _ in range(2))
    with config.patch({**QUICK, "fallback_random": True}), graphs_of_inductor() as graphs:
        run = compiled(model, inductor=True)
        for each, call in ((model, run), (eager, eager)):
            torch.manual_seed(1)
            call(torch.ones(6, 20)).square().mean().backward()
            assert all(p.grad is not None for p in each.parameters())
    assert graphs == [(False, False), (False, True)]
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
