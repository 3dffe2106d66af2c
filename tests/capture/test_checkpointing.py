"""Activation checkpointing draws the masks of the forward pass again, and leaves the generator where eager does."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.eager import beside_ddp, trains_as_eager
from helpers.plans import plan_in_turns
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import fxcomp
from fxcomp.plan.strategy import Strategy

again = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """Two dropouts, one of them on a transposed activation, and attention, which drops by an operator of its own."""

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(8, 24), nn.Linear(8, 8), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.dropout(x, self.p)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).transpose(1, 2).flatten(-2)
        return F.dropout(self.out(x).transpose(0, 1), self.p).transpose(0, 1)


class Blocks(nn.Module):
    """Blocks that a rule computes again, and a draw outside of them."""

    def __init__(self, rule: Callable[[nn.ModuleList, Tensor], Tensor], p: float = 0.5):
        super().__init__()
        self.blocks, self.head, self.rule, self.p = nn.ModuleList(Block(p) for _ in range(3)), nn.Linear(8, 4), rule, p

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.rule(self.blocks, x), self.p))


def one_by_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = again(block, x)
    return x


def every_other(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return again(blocks[2], blocks[1](again(blocks[0], x)))


def nested(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return again(lambda y: blocks[2](again(lambda z: F.dropout(again(blocks[0], z) + blocks[1](z), 0.3), y)), x)


def to_the_end(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return one_by_one(blocks, x)


def by_segments(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(blocks, 2, x, use_reentrant=False)


def by_a_fork(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Not checkpointing: a user's own use of the state."""
    with torch.random.fork_rng([]):
        x = blocks[0](x)
    return blocks[1](x)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batches() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 8) for _ in range(2)]


@pytest.mark.parametrize("rule", [one_by_one, every_other, nested, to_the_end, by_segments, by_a_fork])
@pytest.mark.filterwarnings("ignore:fxcomp. the loss does not depend")
@pytest.mark.one_in(2)
def test_checkpointed_dropout_is_eager_bit_for_bit(rule: Callable[[nn.ModuleList, Tensor], Tensor]):
    trains_as_eager(Blocks(rule), square, batches())


def test_a_block_without_dropout_leaves_no_state_behind():
    """An operator's arguments say if it draws, not its tag alone: attention without dropout does not."""
    step = trains_as_eager(Blocks(one_by_one, p=0.0), square, batches())
    assert "rng_state" not in step.source


def test_each_block_sets_its_own_state_in_reverse_order_and_the_last_one_goes_on():
    step = trains_as_eager(Blocks(one_by_one), square, batches()[:1])
    states = re.findall(r"(\w+) = rt.rng_state", step.source)
    assert len(states) == 4, "one for each block, and one before the first is computed again"
    assert re.findall(r"rt.set_rng_state\((\w+)", step.source) == [*reversed(states[:3]), states[3]]


def test_states_lie_between_the_regions_that_inductor_compiles():
    step = trains_as_eager(Blocks(one_by_one), square, batches()[:1])
    regions = [body for body in step.source.split("\n\n\n") if body.startswith("def region_")]
    assert len(regions) > 6
    assert not any("rng_state" in body for body in regions)


def test_checkpointing_may_be_switched_while_the_job_runs():
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.checkpoints = Block(), True

        def forward(self, x: Tensor) -> Tensor:
            return again(self.block, x) if self.checkpoints else self.block(x)

    torch.manual_seed(0)
    model = Switched()
    step = fxcomp.compile_step(model, square, torch.optim.SGD(model.parameters(), lr=0.0), batches()[0])
    losses: list[Tensor] = []
    for model.checkpoints in (True, False):
        torch.manual_seed(1)
        losses.append(step(batches()[0]))
    assert torch.equal(*losses)
    assert "rng_state" not in step.source


def in_small_buckets() -> tuple[float, list[str]]:
    """The distance to DDP, and the lines that launch buckets and set states."""
    torch.manual_seed(7)
    model = Blocks(one_by_one)
    plan = plan_in_turns(model, [Strategy.flat(None)], per_bucket=3)
    distances, step = beside_ddp(model, square, batches(), momentum=0.0, plan=plan)
    return max(distances.values()), re.findall(r"rt\.(set_rng_state|launch)", step.source)


def test_states_stay_in_order_where_buckets_leave_between_them():
    for apart, lines in run_ranks(2, in_small_buckets):
        assert apart == 0
        assert "launch" in lines[lines.index("set_rng_state") : -1], "a bucket leaves between two blocks"
