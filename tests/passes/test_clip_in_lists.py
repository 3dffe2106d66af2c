"""Buckets are clipped as wholes on an accelerator, and what they hold is what each gradient's clipping makes of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from helpers.before_after import before_after
from helpers.graphs import TWO
from helpers.pretended import as_accelerator, mean_square
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from fxcomp.capture.training import Training
from fxcomp.capture.whole_step import capture
from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.run_passes import run
from fxcomp.passes.clip_in_lists import clip_in_lists
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import DENSE

ONE = Plan((Bucket(("bias", "weight"), (2, 6), DENSE),))
CUT = Plan((Bucket(("bias", "weight"), (2, 3), DENSE), Bucket(("weight",), (3,), DENSE, (3,))))
ALONE = Plan(())


@pytest.fixture(autouse=True)
def _accelerator() -> Generator[None]:
    with as_accelerator():
        yield


def stepped(plan: Plan, dtype: torch.dtype = torch.float32) -> GraphModule:
    model = nn.Linear(3, 2, dtype=dtype)
    training = Training.of(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.5), 0.01)
    graph = capture(training, (torch.ones(4, 3, dtype=dtype),)).graph
    compiler = Compiler(TWO)
    if not plan.buckets:
        return run(graph, ())
    return run(graph, (*compiler.labelling(), *compiler._bucketing(plan)))  # pyright: ignore[reportPrivateUsage]


def targets(gm: GraphModule, role: Role = Role.CLIP) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if info(node).role is role]


def test_a_bucket_has_one_norm_and_one_product(golden):
    text, gm = before_after(clip_in_lists, stepped(ONE))
    golden("clip_in_lists/bucket.txt", text)
    assert targets(gm).count("aten._foreach_norm.Scalar") == targets(gm).count("aten._foreach_mul_.Tensor") == 1
    assert not any("aten.mul_" in name for name in targets(gm))


def test_what_comes_in_parts_is_multiplied_by_itself(golden):
    text, gm = before_after(clip_in_lists, stepped(CUT))
    golden("clip_in_lists/parts.txt", text)
    (norm,) = (node for node in gm.graph.nodes if "_foreach_norm" in str(node.target))
    assert [each.name for each in norm.args[0]] == ["wait_0", "wait_1"]
    (product,) = (node for node in gm.graph.nodes if "_foreach_mul_" in str(node.target))
    assert len(product.args[0]) == 2


def test_one_rank_alone_leaves_its_gradients_as_they_are():
    gm = clip_in_lists(stepped(ALONE))
    assert "aten._foreach_mul.Tensor" in targets(gm)
    assert "aten._foreach_mul_.Tensor" not in targets(gm)


def test_norms_of_narrow_types_are_taken_in_fp32():
    gm = clip_in_lists(stepped(ALONE, torch.bfloat16))
    (norm,) = (node for node in gm.graph.nodes if "_foreach_norm" in str(node.target))
    assert norm.kwargs == {"dtype": torch.float32}


def test_it_changes_nothing_the_second_time():
    gm = clip_in_lists(stepped(ONE))
    before = str(gm.graph)
    assert str(clip_in_lists(gm).graph) == before


def inputs(gm: GraphModule) -> Sequence[Any]:
    generator = torch.Generator().manual_seed(0)
    found: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        drawn = torch.randn(value.shape, generator=generator).to(value.dtype) if isinstance(value, Tensor) else 0.5
        found.append(drawn)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_update_is_the_same_to_rounding(dtype: torch.dtype):
    before = stepped(ALONE, dtype)
    after = clip_in_lists(stepped(ALONE, dtype))
    results: list[list[Tensor]] = []
    for gm in (before, after):
        given = inputs(gm)
        Interpreter(gm).run(*given, enable_io_processing=False)
        kinds = [info(node).source.kind for node in gm.graph.find_nodes(op="placeholder")]
        results.append([v for kind, v in zip(kinds, given, strict=True) if kind is InputKind.PARAMETER])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
