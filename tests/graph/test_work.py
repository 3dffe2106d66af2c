"""An operator's work follows from formulas and bytes, or is unknown where there are none."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.graphs import TWO
from helpers.ranks import run_alone
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxcomp import compat
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.graph.info import NodeInfo, Role, info, set_info
from fxcomp.graph.work import Basis, basis, flops, is_free, math_type, touched_bytes, unknowns
from fxcomp.passes.annotate_costs import annotate_costs

aten = torch.ops.aten

LIBRARY = torch.library.Library("fxcomp_test_work", "DEF")
LIBRARY.define("mystery(Tensor x) -> Tensor")
LIBRARY.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fxcomp_test_work::mystery", torch.empty_like, lib=LIBRARY)
LIBRARY.define("tick(int n) -> int")
LIBRARY.impl("tick", lambda n: n + 1, "CompositeExplicitAutograd")


def traced(function: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)


def node_of(gm: GraphModule, target: Any) -> Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def only(function: Callable[..., Any], *inputs: Any) -> Node:
    """The one node of a function that is an operator and does something."""
    nodes = [n for n in traced(function, *inputs).graph.nodes if n.op == "call_function" and not is_free(n)]
    assert len(nodes) == 1, nodes
    return nodes[0]


def test_products_and_convolutions_have_torchs_formulas():
    assert flops(only(torch.mm, torch.ones(4, 8), torch.ones(8, 16))) == 2 * 4 * 8 * 16
    image, kernel = torch.ones(2, 6, 10, 10), torch.ones(8, 3, 3, 3)
    node = only(lambda x, w: torch.conv2d(x, w, padding=1, groups=2), image, kernel)
    assert flops(node) == 2 * (2 * 8 * 10 * 10) * 3 * 3 * 3
    assert touched_bytes(node) == 4 * (image.numel() + kernel.numel() + 2 * 8 * 10 * 10)


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_attention_on_the_cpu_counts_as_attention_on_a_gpu(causal: bool, share: int):
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.autograd.grad(attend(q, k, v).sum(), [q, k, v])

    inputs = [torch.ones(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
    gm = traced(both, *inputs)
    product = 2 * 2 * 3 * 16 * 16 * 8
    forward = node_of(gm, aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = node_of(gm, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert flops(forward) == 2 * product / share
    assert flops(backward) == 5 * product / share
    assert basis(forward) is basis(backward) is Basis.WORK


def test_views_and_allocations_are_free():
    def views(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.t(), x[1:], x.expand(2, 4, 4), x.detach(), torch.empty_like(x)]

    assert all(is_free(n) for n in traced(views, torch.ones(4, 4)).graph.nodes if n.op == "call_function")


def test_a_chain_of_elementwise_operators_is_several():
    gm = traced(lambda x: (x * 2).relu() + 1, torch.ones(8))
    assert [touched_bytes(n) for n in gm.graph.nodes if n.op == "call_function"] == [2 * 4 * 8] * 3


def test_a_lookup_reads_the_rows_that_it_returns_and_not_the_table():
    table, rows = torch.ones(50_000, 16), torch.zeros(10, dtype=torch.int64)
    lookup = only(lambda i, t: torch.nn.functional.embedding(i, t), rows, table)
    assert touched_bytes(lookup) == 8 * 10 + 2 * (4 * 10 * 16)
    assert touched_bytes(only(lambda x, i: x[i], table, rows)) == 8 * 10 + 2 * (4 * 10 * 16)
    index = rows[:, None].expand(10, 16)
    added = only(lambda t, i, v: t.scatter_add_(0, i, v), table, index, torch.ones(10, 16))
    assert touched_bytes(added) < 4 * table.numel()


def test_a_fill_reads_nothing_and_a_copy_not_what_it_overwrites():
    assert touched_bytes(only(lambda x: x.zero_(), torch.ones(100))) == 400
    assert touched_bytes(only(torch.zeros_like, torch.ones(100))) == 400
    assert touched_bytes(only(lambda x, y: x.copy_(y), torch.ones(100), torch.ones(100))) == 800
    assert touched_bytes(only(lambda x, y: x.add_(y), torch.ones(100), torch.ones(100))) == 1200


def test_an_expanded_value_is_read_once():
    one = only(lambda x, y: x.mul_(y), torch.ones(1000), torch.ones(1))
    wide = traced(lambda x, y: x.mul_(y.expand(1000)), torch.ones(1000), torch.ones(1))
    assert touched_bytes(node_of(wide, aten.mul_.Tensor)) == touched_bytes(one)


def test_batch_norm_reads_its_input_twice():
    x = torch.ones(4, 3, 8, 8)
    node = only(lambda x, m, v: aten.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[0], x, *torch.ones(2, 3))
    assert touched_bytes(node) == pytest.approx(3 * 4 * x.numel(), rel=0.05)
    assert basis(node) is Basis.WORK


def test_operators_on_lists_are_priced_by_what_they_read_and_write():
    lists = [[torch.ones(100), torch.ones(50)] for _ in range(5)]
    added = only(lambda x, y: torch._foreach_add_(x, y) or x[0], *lists[:2])
    assert touched_bytes(added) == 3 * 4 * 150
    assert basis(added) is Basis.WORK

    def adam(p: Any, g: Any, m: Any, v: Any, steps: Any) -> Any:
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return p[0]

    fused = only(adam, *lists[:4], [torch.ones(()), torch.ones(())])
    assert touched_bytes(fused) == pytest.approx(7 * 4 * 150, rel=0.02)  # four read, three written


def test_softmax_and_losses_are_bound_by_memory():
    for function in (lambda x: x.softmax(1), lambda x: x.log_softmax(1), torch.nn.GELU(), lambda x: x.sum(0)):
        assert basis(only(function, torch.ones(8, 8))) is Basis.WORK


def labelled(gm: GraphModule) -> GraphModule:
    for node in gm.graph.nodes:
        set_info(node, NodeInfo({"placeholder": Role.INPUT, "output": Role.OUTPUT}.get(node.op, Role.COMPUTE)))
    return gm


def with_tick(x: torch.Tensor, times: int = 2) -> GraphModule:
    """A graph with an operator that has no tensor: tracing would run it and forget it."""
    gm = traced(lambda x: torch.ops.fxcomp_test_work.mystery(x) + 1, x)
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(first):
        for n in range(times):
            gm.graph.call_function(torch.ops.fxcomp_test_work.tick.default, (n,)).meta["val"] = n + 1
    return gm


def test_a_custom_operator_is_priced_by_bytes_and_one_without_tensors_is_unpriced():
    gm = with_tick(torch.ones(1000))
    found = unknowns(gm)
    assert found.by_bytes == (("mystery", 1),)
    assert found.unpriced == (("tick", 2),)
    costs = CostTable(roofline=Roofline(gflops=10.0, gb_per_s=1.0, launch_us=2.0))
    annotated = annotate_costs(labelled(gm), costs, TWO)
    mystery, tick = (
        node_of(annotated, op.default) for op in (torch.ops.fxcomp_test_work.mystery, torch.ops.fxcomp_test_work.tick)
    )
    assert info(mystery).cost_us == pytest.approx(8.0)
    assert info(tick).cost_us == 0.0


def test_a_decomposition_of_a_matrix_is_priced_by_bytes_alone():
    assert unknowns(traced(lambda x: torch.linalg.qr(x)[0], torch.ones(8, 8))).by_bytes == (("aten.linalg_qr", 1),)


def test_a_higher_order_operator_is_listed():
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    gm = traced(branch, torch.ones(8))
    assert [name for name, _ in unknowns(gm).by_bytes] == ["cond"]
    annotate_costs(labelled(gm), CostTable(), TWO)


def test_symbolic_sizes_count_as_traced():
    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxcomp_test_work.mystery(x @ w).reshape(x.shape[0] * w.shape[1])

    gm = traced(both, torch.ones(6, 8), torch.ones(8, 16), symbolic=True)
    node = node_of(gm, aten.mm.default)
    assert any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
    assert flops(node) == 2 * 6 * 8 * 16
    assert touched_bytes(node) == 4 * (6 * 8 + 8 * 16 + 6 * 16)
    assert unknowns(gm).by_bytes == (("mystery", 1),)
    annotate_costs(labelled(gm), CostTable(), TWO)


def test_products_count_in_their_own_numbers():
    product = only(torch.mm, torch.ones(4, 4), torch.ones(4, 4))
    assert math_type(product) == "f32"
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    assert math_type(only(torch.mm, half, half)) == "bf16"
    eight, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    scaled = traced(lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=torch.bfloat16), eight, eight, scale)
    assert math_type(node_of(scaled, aten._scaled_mm.default)) == "f8"


def test_products_of_experts_count_each_token_once():
    tokens, experts = torch.ones(12, 8, dtype=torch.bfloat16), torch.ones(2, 8, 16, dtype=torch.bfloat16)
    ends, results = torch.tensor([4, 12], dtype=torch.int32), torch.ones(12, 16, dtype=torch.bfloat16)
    grouped = aten._grouped_mm.default
    forward = traced(grouped, tokens, experts, ends)
    of_weights = traced(lambda x, y, e: grouped(x.t(), y, e), tokens, results, ends)
    assert [flops(node_of(gm, grouped)) for gm in (forward, of_weights)] == [2 * 12 * 8 * 16] * 2
    assert unknowns(forward).by_bytes == ()


TF32 = {
    "": (False, True),  # torch's default
    "torch.backends.cuda.matmul.allow_tf32 = True": (True, True),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": (True, True),
    "torch.backends.cudnn.allow_tf32 = False": (False, False),
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "torch.backends.fp32_precision = 'tf32'": (True, True),
    "torch.backends.fp32_precision = 'ieee'": (False, False),
}
"""Lines of a script, and if products and convolutions of float32 are in TF32 after them."""


def multiplies_after(line: str) -> tuple[bool, bool]:
    exec(line, {"torch": torch})
    return compat.multiplies_in_tf32(is_convolution=False), compat.multiplies_in_tf32(is_convolution=True)


@pytest.mark.parametrize("line", TF32)
def test_float32_is_multiplied_in_tf32_where_the_script_allows_it(line: str):
    assert run_alone(multiplies_after, line) == TF32[line]


def test_attention_in_float32_is_not_in_tf32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=SimpleNamespace(fp32_precision="tf32")))
    inputs = [torch.ones(1, 2, 4, 8) for _ in range(3)]
    assert (
        math_type(only(lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0], *inputs))
        == "f32"
    )
    assert math_type(only(torch.mm, torch.ones(4, 4), torch.ones(4, 4))) == "tf32"
