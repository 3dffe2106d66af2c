"""Gradients that a backward pass makes inside another one are trained: eager PyTorch adds them to `.grad` as well."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.eager import sgd, trains_as_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxcomp
from fxcomp import errors
from fxcomp.capture import forward_backward
from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.frontends.job import Job
from fxcomp.frontends.what_if import WhatIf, what_if
from fxcomp.graph.info import Role, info

again = partial(checkpoint, use_reentrant=True)


class Block(nn.Module):
    def __init__(self, p: float = 0.0):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(F.dropout(x, self.p)))), self.p)


class Blocks(nn.Module):
    """Frozen embeddings whose output requires a gradient, blocks that a rule runs, and a head."""

    def __init__(self, rule: Callable[[Any, Tensor], Tensor], p: float = 0.0, *, trained: bool = False):
        super().__init__()
        self.embed = nn.Linear(8, 8).requires_grad_(trained)
        self.blocks, self.head, self.rule = nn.ModuleList(Block(p) for _ in range(3)), nn.Linear(8, 8), rule

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.rule(self, x if x.requires_grad else x.requires_grad_()))


def one_by_one(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = again(block, x)
    return x


def nested(model: Any, x: Tensor) -> Tensor:
    return again(lambda y: model.blocks[2](again(lambda z: model.blocks[1](again(model.blocks[0], z)), y)), x)


def by_segments(model: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(model.blocks, 2, x, use_reentrant=True)


def shared(model: Any, x: Tensor) -> Tensor:
    """Use a block and the head inside of a checkpoint, and outside."""
    return model.blocks[0](again(lambda y: model.head(model.blocks[0](model.blocks[1](y))), x)) + model.blocks[2](x)


def kinds_mixed(model: Any, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: model.blocks[1](again(model.blocks[0], y)), x, use_reentrant=False)
    return again(lambda y: checkpoint(model.blocks[2], y, use_reentrant=False), x)


def under_autocast(model: Any, x: Tensor) -> Tensor:
    """Cast a weight in two checkpoints, whose caches of casts end with them."""
    with torch.autocast("cpu", torch.bfloat16):
        return one_by_one(model, again(model.blocks[0], x)).float()


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1): the backward pass computes x1 and x2 again, and calls backward() on f and g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.y1, ctx.y2, ctx.f, ctx.g = y1.detach(), y2.detach(), f, g
        return torch.cat([y1, y2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d1, d2 = grads[0].chunk(2, -1)
        y1 = ctx.y1.requires_grad_()
        with torch.enable_grad():
            g1 = ctx.g(y1)
            g1.backward(d2)
        d1 = d1 + y1.grad
        x2 = (ctx.y2 - g1).detach().requires_grad_()
        with torch.enable_grad():
            ctx.f(x2).backward(d1)
        return torch.cat([d1, d2 + x2.grad], -1), None, None


def reversible(model: Any, x: Tensor) -> Tensor:
    x = torch.cat([x, x], -1)
    x = Reversible.apply(x, model.blocks[0], model.blocks[1])
    return Reversible.apply(x, model.blocks[1], model.blocks[2])[..., :8]


class LocalLoss(torch.autograd.Function):
    """Train a head on the hidden state, and let the gradient pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.head = head
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            ctx.head(ctx.saved_tensors[0].detach()).square().mean().backward()
        return grads[0], None


def local_losses(model: Any, x: Tensor) -> Tensor:
    x = LocalLoss.apply(model.blocks[0](x), model.blocks[1])
    return LocalLoss.apply(x, model.blocks[2])


def local_loss_beside_the_way(model: Any, x: Tensor) -> Tensor:
    """The Function leads to no parameter, so that `autograd.grad` does not run it."""
    return model.blocks[0](x.detach()) + LocalLoss.apply(x, model.blocks[1]) + model.blocks[2](x.detach())


def by_a_hook(model: Any, x: Tensor) -> Tensor:
    h = model.blocks[0](x)

    def train(gradient: Tensor) -> None:
        with torch.enable_grad():
            (model.blocks[1](h.detach()) * gradient).sum().backward()

    h.register_hook(train)
    return h + model.blocks[2](x)


RULES = [
    *(one_by_one, nested, by_segments, shared, kinds_mixed, under_autocast),
    *(reversible, local_losses, local_loss_beside_the_way, by_a_hook),
]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batches(*sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 8) for rows in sizes or (4, 4, 6, 4)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("error:fxcomp")
@pytest.mark.one_in(3)
def test_gradients_of_nested_backward_passes_are_eagers(rule: Callable[[Any, Tensor], Tensor], trained: bool):
    trains_as_eager(Blocks(rule, trained=trained), square, batches())


@pytest.mark.parametrize("rule", [one_by_one, nested, by_segments, shared, kinds_mixed])
@pytest.mark.filterwarnings("error:fxcomp")
def test_reentrant_checkpoints_draw_the_masks_of_the_forward_pass_again(rule: Callable[[Any, Tensor], Tensor]):
    trains_as_eager(Blocks(rule, p=0.5), square, batches())


@pytest.mark.parametrize("rule", [one_by_one, shared, reversible])
def test_sizes_that_vary_are_captured_as_symbols(rule: Callable[[Any, Tensor], Tensor]):
    step = trains_as_eager(Blocks(rule, p=0.0 if rule is reversible else 0.5), square, batches(4, 6, 8, 10, 12, 14))
    assert len(step.in_force.programs) == 3, "the third size is a symbol, and all that follow"


def compiled(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checks = fxcomp.Checks(verify=1)
    return fxcomp.compile_step(model, square, optimizer, batches()[0], compress="dense", checks=checks, **options)


@pytest.mark.parametrize("rule", [one_by_one, shared, reversible])
def test_accumulated_scaled_and_clipped_gradients_are_eagers(rule: Callable[[Any, Tensor], Tensor]):
    model = Blocks(rule)
    reference = copy.deepcopy(model)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2))
    eager = torch.optim.AdamW(reference.parameters(), lr=0.01)
    step = compiled(model, accumulate=2, max_grad_norm=0.1, scaler=ours)
    for _ in range(3):
        eager.zero_grad()
        for batch in batches(4, 6):
            step(batch)
            theirs.scale(square(reference, batch) / 2).backward()
        theirs.unscale_(eager)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        theirs.step(eager)
        theirs.update()
        ours.update()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("rule", [one_by_one, shared, local_loss_beside_the_way])
@pytest.mark.filterwarnings("ignore:fxcomp. the loss does not depend")
def test_the_verifier_finds_gradients_that_a_capture_has_lost(rule: Callable[[Any, Tensor], Tensor]):
    with patch.object(forward_backward, "_calls_out", lambda _: False):
        step = compiled(Blocks(rule))
    with pytest.raises(errors.VerificationFailed, match="gradient"):
        step(batches()[0])


def test_a_verified_step_leaves_gradients_and_accumulators_alone():
    model = Blocks(one_by_one)
    trained = [p for p in model.parameters() if p.requires_grad]
    # DistributedDataParallel hooks into these nodes.
    accumulators: list[Any] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in trained]
    called: list[Any] = []
    for node in accumulators:
        node.register_hook(lambda *_: called.append(1))
    step = compiled(model)
    kept = [torch.ones_like(p) for p in trained]
    for parameter, gradient in zip(trained, kept, strict=True):
        parameter.grad = gradient
    spread = torch.ones(1, 8).expand(4, 8).requires_grad_()
    for batch in (batches()[0].requires_grad_(), spread):
        step(batch)
        assert batch.grad is None
    assert not called
    assert all(p.grad is gradient and bool((gradient == 1).all()) for p, gradient in zip(trained, kept, strict=True))


def test_a_sparse_embedding_inside_of_a_reentrant_checkpoint_is_trained():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return again(lambda y: again(lambda z: self.fc(z * self.embed(torch.arange(4))), y), x.requires_grad_())

    trains_as_eager(Model(), square, batches(4, 4, 4), sgd, tolerance=1e-5)


def through(model: Any, x: Tensor, outside: nn.Module) -> Tensor:
    return again(lambda y: outside(model.blocks[0](y)), x)


def through_two(model: Any, x: Tensor, outside: nn.Module) -> Tensor:
    return again(lambda y: again(outside, model.blocks[1](y)), x)


def by_a_function(model: Any, x: Tensor, outside: nn.Module) -> Tensor:
    return model.blocks[1](LocalLoss.apply(model.blocks[0](x), outside))


OUTSIDE = [through, through_two, by_a_function]


@pytest.mark.parametrize("rule", OUTSIDE)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_modules_outside_of_the_model_that_a_nested_pass_trains_are_refused(rule: Callable[..., Tensor]):
    outside = nn.Linear(8, 8)
    outside.weight.grad = kept = torch.ones(8, 8)
    with pytest.raises(errors.CaptureFailed, match="is not the model's, so that a compiled step would not train it"):
        compiled(Blocks(lambda model, x: rule(model, x, outside)))
    assert outside.weight.grad is kept
    assert bool((kept == 1).all())
    assert outside.bias.grad is None
    assert not vars(outside.weight)
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in outside.parameters())


@pytest.mark.parametrize("rule", OUTSIDE)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:fxcomp. the loss does not depend")
def test_modules_outside_are_trained_or_frozen_as_the_refusal_advises(rule: Callable[..., Tensor]):
    outside = nn.Linear(8, 8)
    both = nn.ModuleList([Blocks(one_by_one), outside])

    def loss(pair: Any, x: Tensor) -> Tensor:
        model, outside = pair
        return model.head(rule(model, model.embed(x).requires_grad_(), outside)).square().mean()

    trains_as_eager(both, loss, batches())
    frozen = nn.Linear(8, 8).requires_grad_(False)
    if rule in (through, through_two):  # the others call backward() on a loss of the outside module alone
        trains_as_eager(Blocks(lambda model, x: rule(model, x, frozen)), square, batches())


class Woken(nn.Module):
    """A table in a checkpoint, which records a graph because of a tensor beside the indexes."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.wakes, self.reentrant = torch.ones(1, requires_grad=True), reentrant

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0].abs().mul(3).long().clamp(max=8)
        looked_up = checkpoint(lambda _, rows: self.table(rows), self.wakes, rows, use_reentrant=self.reentrant)
        return self.head(looked_up)


def test_a_tensor_that_wakes_a_checkpoint_is_refused_and_the_advised_argument_trains_the_same():
    torch.manual_seed(0)
    reentrant = Woken(reentrant=True)
    with pytest.raises(errors.CaptureFailed, match="use_reentrant=False there; frozen or detached"):
        compiled(reentrant)
    torch.manual_seed(0)
    advised = Woken(reentrant=False)
    trains_as_eager(advised, square, batches(), sgd)
    eager = sgd(reentrant)
    for batch in batches():
        eager.zero_grad()
        square(reentrant, batch).backward()
        eager.step()
    assert torch.equal(reentrant.table.weight, advised.table.weight)
    assert torch.equal(reentrant.head.weight, advised.head.weight)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_blocks_that_eager_leaves_out_are_left_out_with_a_warning():
    def rule(model: Any, x: Tensor) -> Tensor:
        return again(model.blocks[0], x.detach()) + model.blocks[1](x)

    model = Blocks(rule)
    model.blocks[2].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"'blocks.0.*way that backward\(\) follows.*as eager PyTorch skips it"):
        trains_as_eager(model, square, batches())


class Writes(LocalLoss):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.head.up.bias.grad = grads[0].sum(0).repeat(2)
        return grads[0], None


def test_a_gradient_that_a_function_writes_by_hand_is_refused():
    with pytest.raises(
        errors.CaptureFailed, match=r"puts a gradient into .grad of 'blocks.1.up.bias'.*\n.*\n.*returns"
    ):
        compiled(Blocks(lambda model, x: Writes.apply(x, model.blocks[1])))


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_on_a_node_that_calls_backward_is_refused_and_registered_on_the_tensor_as_advised(register: str):
    def rule(model: Any, x: Tensor, *, on_the_tensor: bool) -> Tensor:
        h = model.blocks[0](x)

        def train(*_: Any) -> None:
            with torch.enable_grad():
                model.blocks[1](x.detach()).square().mean().backward()

        _ = h.register_hook(train) if on_the_tensor else getattr(h.grad_fn, register)(train)
        return h + model.blocks[2](x)

    with pytest.raises(
        errors.CaptureFailed, match=r"puts a gradient into .grad of(?s:.*)tensor.register_hook, instead"
    ):
        compiled(Blocks(partial(rule, on_the_tensor=False)))
    trains_as_eager(Blocks(partial(rule, on_the_tensor=True)), square, batches())


def test_a_prediction_counts_the_layers_that_nested_backward_passes_train():
    model = Blocks(one_by_one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = Cluster.parse("2x1", intra=Link(5.0, 12.0), inter=Link.parse("1gbit"))
    found = what_if(Job(model, square, optimizer, batches()[0]), where, WhatIf(device="h100", step_ms=1.0))
    assert set(found.workload.sizes) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_gradients_appear_where_the_backward_pass_makes_them():
    captured = capture(
        Training.of(model := Blocks(one_by_one), square, torch.optim.SGD(model.parameters())), batches()[0]
    )
    made = [info(n).parameter for n in captured.graph.graph.nodes if info(n).role is Role.GRADIENT]
    layers = [str(name).rpartition(".")[0] for name in made]
    assert list(dict.fromkeys(layers)) == [
        "head",
        *(f"blocks.{i}.{part}" for i in (2, 1, 0) for part in ("down", "up")),
    ]
