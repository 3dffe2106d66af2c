"""The kernels of a GPU: joined as Inductor joins operators, or each operator alone, with the memory that they touch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxcomp.graph.info import NodeInfo, Role, set_info
from fxcomp.graph.kernels import MOST_READS_OF_A_SHARED_VALUE, Kernel, Order, kernels
from fxcomp.graph.peak_memory import peak_memory

ROWS, WIDTH = 64, 256
VALUES = 4 * ROWS * WIDTH
"""Bytes of one value."""


def body(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:
        role = {"placeholder": Role.INPUT, "output": Role.OUTPUT}.get(node.op, Role.COMPUTE)
        set_info(node, NodeInfo(role))
    return gm


def listed(function: Callable[..., object], *inputs: Tensor, joins: bool = True) -> list[Kernel]:
    return kernels(body(function, *inputs), joins=joins)


def value(rows: int = ROWS) -> Tensor:
    return torch.empty(rows, WIDTH)


def test_a_chain_of_elementwise_operators_is_one_kernel_that_writes_its_end():
    (kernel,) = listed(lambda x, y: torch.relu(x * 2 + y).sin(), value(), value())
    assert sum(kernel.reads.values()) == 2 * VALUES
    assert sum(kernel.writes.values()) == VALUES
    assert kernel.touched_bytes == 3 * VALUES
    assert kernel.flops == 0


def test_each_operator_alone_reads_and_writes_memory():
    alone = listed(lambda x, y: torch.relu(x * 2 + y).sin(), value(), value(), joins=False)
    assert [kernel.touched_bytes / VALUES for kernel in alone] == [2, 3, 2, 2]


def test_a_library_reads_its_inputs_from_memory():
    before, product, after = listed(lambda x, w: torch.relu(torch.relu(x) @ w) + 1, value(), torch.empty(WIDTH, WIDTH))
    assert [kernel.order for kernel in (before, product, after)] == [Order.POINTS, Order.ALONE, Order.POINTS]
    assert product.flops == 2 * ROWS * WIDTH * WIDTH
    assert after.touched_bytes == 2 * VALUES, "relu and add read the product and write one value"


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_a_normalisation_joins_what_comes_before_and_after_it(name: str):
    norm = {"softmax": lambda x: x.softmax(-1), "layer_norm": lambda x: F.layer_norm(x, (WIDTH,))}[name]
    (kernel,) = listed(lambda x, y: (norm(x + y) * 2).bfloat16(), value(), value())
    assert kernel.order is Order.ROWS
    assert sum(kernel.reads.values()) == 2 * VALUES
    assert sum(size for v, size in kernel.writes.items() if v.meta["val"].dtype is torch.bfloat16) == VALUES / 2


def test_cross_entropy_keeps_no_probabilities_between_forward_and_backward():
    def both(logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.float(), targets)
        return torch.autograd.grad(loss, logits)[0]

    logits = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.long)
    joined = listed(both, logits, targets)
    large = [(k.place, v.name, size) for k in joined for v, size in k.writes.items() if size >= VALUES / 2]
    assert [size for _, _, size in large] == [VALUES / 2], "the gradient alone, in bf16"
    alone = listed(both, logits, targets, joins=False)
    assert sum(k.touched_bytes for k in alone) > 4 * sum(k.touched_bytes for k in joined)


def test_a_sum_over_rows_is_a_kernel_of_its_own_and_computes_what_it_reads():
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y.sum(0), torch.relu(y) @ w

    sums = [kernel for kernel in listed(both, value(), torch.empty(WIDTH, 8)) if kernel.order is Order.COLUMNS]
    assert len(sums) == 1
    assert [node.name for node in sums[0].reads] == ["x_1"]


def test_an_operator_joins_no_kernel_that_waits_for_it():
    def crossed(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(x)
        return torch.sin(y) + (y @ w)  # the sum waits for the product, which waits for y

    joined = listed(crossed, value(), torch.empty(WIDTH, WIDTH))
    places = {node.name: kernel.place for kernel in joined for node in kernel.nodes}
    assert places["add"] != places["relu"]
    order = sorted(joined, key=lambda kernel: bin(kernel.before).count("1"))
    assert [kernel.order for kernel in order] == [Order.POINTS, Order.ALONE, Order.POINTS]


@pytest.mark.parametrize(("terms", "read"), [(3, 3), (MOST_READS_OF_A_SHARED_VALUE + 1, 1)])
def test_a_value_of_several_readers_is_written_if_it_takes_many_reads(terms: int, read: int):
    def both(*xs: Tensor) -> tuple[Tensor, Tensor]:
        total = sum(xs[1:], xs[0])
        return total.sum(0), total.sum(1)

    joined = {kernel.order: kernel for kernel in listed(both, *(value() for _ in range(terms)))}
    assert len(joined[Order.COLUMNS].reads) == read
    assert len(joined[Order.ROWS].reads) == terms


def test_a_lookup_reads_rows_and_a_scattered_sum_stays_alone():
    table, index = torch.empty(1000, WIDTH, requires_grad=True), torch.zeros(ROWS, dtype=torch.long)

    def both(table: Tensor, index: Tensor) -> Tensor:
        return torch.autograd.grad(torch.relu(F.embedding(index, table)).sum(), table)[0]

    joined = listed(both, table, index)
    assert [k.order for k in joined if k.name == "embedding_dense_backward"] == [Order.ALONE]
    assert all(size < 1000 * 4 * WIDTH for k in joined if k.order is not Order.ALONE for size in k.reads.values())


def test_batch_norm_reads_its_input_for_the_statistics_and_once_more():
    x, mean, variance = torch.empty(4, 8, 16, 16), torch.empty(8), torch.empty(8)
    run = functools.partial(F.batch_norm, training=True)
    statistics, result = listed(lambda x, m, v: torch.relu(run(x, m, v)), x, mean, variance)
    assert statistics.order is Order.COLUMNS
    assert max(result.reads.values()) == 4 * x.numel()
    assert max(result.writes.values()) == 4 * x.numel()


def test_a_list_without_operators_is_empty():
    assert listed(lambda x: x.t(), value()) == []


# Memory


def test_memory_at_the_peak_is_what_kernels_leave_for_later():
    def chain(x: Tensor, w: Tensor) -> Tensor:
        kept = [x]
        for _ in range(3):
            kept.append(torch.relu(kept[-1]) @ w)
        return sum(kept[2:], kept[1])

    gm = body(chain, value(), torch.empty(WIDTH, WIDTH))
    joined, alone = peak_memory(gm, kernels(gm)), peak_memory(gm, kernels(gm, joins=False))
    assert joined["activations"] == 4 * VALUES, "three products, and the last relu or the sum"
    assert alone["activations"] >= joined["activations"]
    assert joined["parameters"] == joined["buckets"] == 0


def test_a_value_is_freed_after_its_last_reader():
    def long(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            x = x @ w
        return x

    gm = body(long, value(), torch.empty(WIDTH, WIDTH))
    assert peak_memory(gm, kernels(gm))["activations"] == 2 * VALUES
