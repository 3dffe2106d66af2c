"""List the kernels that a GPU runs for forward and backward, in order.

    %view  compute  bf16[8,16]  aten.view(%addmm)
    %gelu  compute  bf16[8,16]  aten.gelu(%view)             computed in each kernel that reads it
    %mul   compute  bf16[8,16]  aten.mul.Tensor(%gelu, %x)   Inductor kernel: reads %addmm and %x, writes %mul
    %mm    compute  bf16[8,4]   aten.mm(%mul, %w)            library kernel

In eager mode every operator is a kernel. Inductor fuses elementwise operators and reductions (torch/_inductor/graph.py,
ir.py and scheduler.py, torch 2.13); other operators stay alone:

1. Kernels that read an elementwise value compute it. It is written to memory if a library kernel or a line reads it, or
   if it has many inputs.
2. A normalisation writes its statistics. Its result is elementwise in its input and the statistics.
3. A written value joins the latest kernel that makes or reads one of its arguments. Both must have equally many values,
   or one must reduce rows of the other, and no argument may depend on that kernel through a third kernel. Reductions of
   other dimensions (COLUMNS) join only each other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.graph.info import Role, has_info, info
from fxcomp.graph.lines import compressor_at, line_of
from fxcomp.graph.regions import BODY
from fxcomp.graph.update_kinds import update_lists
from fxcomp.graph.work import (
    OperatorWork,
    argument,
    is_bound_by_memory,
    is_free,
    name_of,
    reads,
    tensor_bytes,
    tensors,
    work,
)
from fxcomp.plan.kinds import ATTENTION, CUDNN_ATTENTION

MOST_READS_OF_A_SHARED_VALUE, MOST_READS, MOST_NODES = 4, 8, 64
"""Inductor's limits (torch._inductor.config, torch 2.13: realize_reads_threshold, realize_acc_reads_threshold,
max_fusion_size)."""


class Order(Enum):
    """Order in which an operator reads memory."""

    POINTS = "elementwise"
    ROWS = "reduces the last dimensions"
    COLUMNS = "reduces other dimensions"
    ALONE = "a library's"


@dataclass(eq=False, slots=True)
class Kernel:
    """Operators that run as one kernel, with its floating-point operations and bytes."""

    place: int
    """Index in the list of kernels."""
    order: Order
    size: int
    """Maximum of the operators' numbers of values (`_order_of`)."""
    nodes: list[Node] = field(default_factory=list[Node])
    before: int = 0
    """Bit mask of the kernels that this kernel depends on."""
    reads: dict[Node, float] = field(default_factory=dict[Node, float])
    """Bytes read of each value in memory."""
    writes: dict[Node, float] = field(default_factory=dict[Node, float])
    touched_bytes: float = 0.0

    @property
    def name(self) -> str:
        return _name(self.nodes[0])

    @property
    def is_attention(self) -> bool:
        return self.name.startswith("_scaled_dot_product")

    @property
    def work(self) -> OperatorWork:
        """Operations and bytes of the first operator."""
        return info(self.nodes[0]).work or work(self.nodes[0])

    @property
    def flops(self) -> float:
        """Floating-point operations of a library kernel; 0 for other kernels."""
        return self.work.flops if self.order is Order.ALONE else 0.0

    @property
    def math_type(self) -> str:
        """Number type of the matrix products, with a suffix for attention."""
        name = self.work.math_type
        if not self.is_attention:
            return name
        return f"{name} {CUDNN_ATTENTION if 'cudnn' in self.name else ATTENTION}"


def kernels(gm: GraphModule, *, joins: bool = True) -> list[Kernel]:
    """List the kernels. If `joins` is false, each operator is a kernel, as in eager mode."""
    body = [n for n in gm.graph.nodes if n.op == "call_function" and has_info(n) and info(n).role in BODY]
    return _Listing(body, joins).finished()


def memory_of(node: Node) -> Node:
    """Return the value whose memory a view shares; `node` itself if it is no view."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    """Return whether a node's value shares the memory of its first argument."""
    target: Any = node.target
    if target is operator.getitem:
        return isinstance(source := node.args[0], Node) and is_view(source)
    return compat.is_operator(target) and (compat.is_view(target) or target in _VIEWS)


_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default)  # pyright: ignore[reportPrivateUsage]


class _Listing:
    def __init__(self, body: list[Node], joins: bool) -> None:
        self._kernels: list[Kernel] = []
        self._joins, self._body = joins, set(body)
        self._maker: dict[Node, Kernel] = {}
        self._reader: dict[Node, Kernel] = {}
        self._orders: dict[Node, tuple[Order, int]] = {}
        self._computed: dict[Node, dict[Node, float]] = {}
        """For each recomputed value: the values in memory to read instead, with their bytes."""
        for node in body:
            if not is_view(node) and node.target is not operator.getitem and not is_free(node):
                self._add(node)

    def _add(self, node: Node) -> None:
        """Add an operator to an existing or new kernel, unless readers recompute its result."""
        order, size = self._order(node)
        sources = dict(self._sources(node))
        results = [user for user in node.users if user.target is operator.getitem] or [node]
        first = next((each for each in results if each is node or each.args[1] == 0), node)
        if order is Order.POINTS and not self._is_written(node, sources):
            self._computed[node] = sources
            return
        kernel = self._join(node, order, size, sources)
        self._maker.update(dict.fromkeys((node, *results), kernel))
        if order is Order.ALONE:
            kernel.touched_bytes = kernel.work.touched_bytes
        if _name(node) not in NORMALISATIONS or order is Order.ALONE:
            return
        if not self._is_written(first, sources):
            self._computed[first] = {**sources, node: _statistics_bytes(node)}
        sums = [each for each in results if each.args[1] in (1, 2) and "backward" in _name(node)]
        if order is Order.ROWS and sums:  # gradients of weights
            below = self._join(sums[0], Order.COLUMNS, size, {**sources, node: _statistics_bytes(node)})
            self._maker.update(dict.fromkeys(sums, below))

    def _order(self, node: Node) -> tuple[Order, int]:
        if node not in self._orders:
            self._orders[node] = _order_of(node) if self._joins else (Order.ALONE, 0)
        return self._orders[node]

    def _sources(self, node: Node) -> Iterator[tuple[Node, float]]:
        """Yield the values in memory that an operator reads, directly or through recomputed values."""
        for source, size in reads(node, info(node).work):
            value = memory_of(source)
            if size or not self._joins:  # in eager mode autograd keeps its inputs
                for each, most in self._computed.get(value, {value: math.inf}).items():
                    yield each, min(size, most)

    def _is_written(self, value: Node, sources: dict[Node, float]) -> bool:
        readers = list(_readers_of(value))
        if len(sources) > MOST_READS or (len(readers) > 1 and len(sources) > MOST_READS_OF_A_SHARED_VALUE):
            return True
        return any(reader not in self._body or self._order(reader)[0] is Order.ALONE for reader in readers)

    def _join(self, node: Node, order: Order, size: int, sources: dict[Node, float]) -> Kernel:
        makers = {self._maker[each] for each in sources if each in self._maker}
        near = {*makers, *(self._reader[each] for each in sources if each in self._reader)}
        latest = sorted(near, key=lambda kernel: -kernel.place)
        kernel = next((each for each in latest if _takes(each, order, size, makers)), None)
        waits = [] if kernel is None else self._kernels  # nothing depends on a new kernel
        if kernel is None:
            kernel = Kernel(len(self._kernels), order, size)
            self._kernels.append(kernel)
        kernel.nodes.append(node)
        kernel.order = order if kernel.order is Order.POINTS else kernel.order
        kernel.size = max(kernel.size, size)
        before = kernel.before
        for maker in makers - {kernel}:
            before |= maker.before | 1 << maker.place
        for other in waits if before != kernel.before else ():
            if other.before >> kernel.place & 1:
                other.before |= before
        kernel.before = before
        for source, read in sources.items():
            if self._maker.get(source) is not kernel:
                kernel.reads[source] = max(kernel.reads.get(source, 0.0), read)
                self._reader[source] = kernel
        return kernel

    def finished(self) -> list[Kernel]:
        read = {value for kernel in self._kernels for value in kernel.reads}
        for value, kernel in self._maker.items():
            is_result = value.target is operator.getitem or not isinstance(value.meta.get("val"), tuple | list)
            goes_out = any(reader not in self._body for reader in _readers_of(value)) and is_result
            if value in read or goes_out:
                is_statistics = not is_result or value in self._computed
                size = sum(map(tensor_bytes, tensors(value.meta.get("val"))))
                kernel.writes[value] = _statistics_bytes(value) if is_statistics else size
        for kernel in self._kernels:
            kernel.touched_bytes = kernel.touched_bytes or sum(kernel.reads.values()) + sum(kernel.writes.values())
        return self._kernels


def _takes(kernel: Kernel, order: Order, size: int, makers: set[Kernel]) -> bool:
    """Return whether an operator that reads the results of `makers` can join a kernel."""
    if Order.ALONE in (kernel.order, order) or (kernel.order is Order.COLUMNS) is not (order is Order.COLUMNS):
        return False
    if len(kernel.nodes) >= MOST_NODES or any(each.before >> kernel.place & 1 for each in makers):
        return False
    if kernel not in makers:
        return kernel.size == size
    if order is Order.COLUMNS:
        return False
    return kernel.size >= size if kernel.order is Order.ROWS else kernel.size <= size


NORMALISATIONS = {
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
         "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
         "native_group_norm", "native_group_norm_backward"), Order.ROWS),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
         "native_batch_norm_backward"), Order.COLUMNS),
}  # fmt: skip
"""Order in which normalisations read memory for statistics. Results are elementwise in input and statistics."""

_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "prod", "any", "all",
                         "linalg_vector_norm", "nll_loss_forward", "nll_loss2d_forward", "logsumexp"})  # fmt: skip

_STAY_ALONE = frozenset({"embedding_dense_backward", "index_put", "_unsafe_index_put", "_index_put_impl", "scatter",
                         "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "masked_scatter",
                         "cumsum", "masked_select", "nonzero", "bincount", "bucketize", "searchsorted", "mv", "dot",
                         "addmv", "ger", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
                         "upsample_nearest2d_backward", "upsample_bilinear2d_backward"})  # fmt: skip


def _name(node: Node) -> str:
    return name_of(node.target) if compat.is_operator(node.target) else ""


def _readers_of(value: Node) -> Iterator[Node]:
    for user in value.users:
        if is_view(user):
            yield from _readers_of(user)
        else:
            yield user


def _statistics_bytes(node: Node) -> float:
    value = next(tensors(node.all_input_nodes[0].meta["val"]))
    return 8.0 * math.prod(compat.size_hint(size) for size in value.shape[:-1])


def _order_of(node: Node) -> tuple[Order, int]:
    """Return an operator's order and number of values: read by a reduction or normalisation, made by an elementwise
    operator, 0 for an operator that stays alone.
    """
    name, target = _name(node), node.target
    if not is_bound_by_memory(target) or name in _STAY_ALONE or compat.is_in_place(target):
        return Order.ALONE, 0
    made, read = (
        [[compat.size_hint(size) for size in each.shape] for each in tensors(value)]
        for value in (node.meta.get("val"), [source.meta.get("val") for source in node.all_input_nodes])
    )
    over = math.prod(read[0]) if read else 0
    if name in NORMALISATIONS:
        return NORMALISATIONS[name], over
    if name not in _REDUCTIONS or not read:
        return Order.POINTS, sum(map(math.prod, made))
    dims, rank = argument(node, "dim"), len(read[0])
    dims = [] if dims is None else [dims] if isinstance(dims, int) else dims
    last = sorted(dim % rank for dim in dims)
    is_by_rows = 0 < len(last) < rank and last == list(range(rank - len(last), rank))
    return (Order.ROWS if is_by_rows else Order.COLUMNS), over


# Kernels outside of forward and backward

_KINDS = {
    **dict.fromkeys((Role.PACK, Role.COPY, Role.PART), "pack"),
    **dict.fromkeys((Role.PROPOSE, Role.COMPRESS), "encode"),
    **dict.fromkeys((Role.DECOMPRESS, Role.KEEP), "decode"),
    Role.COMMIT: "check",
    Role.CLIP: "clip",
    Role.UPDATE: "update",
}

CHUNK, MOST_CHUNKS, MOST_TENSORS = 65_536, 320, 36
"""ATen's limits of a kernel over 4 lists of tensors (ATen/native/cuda/MultiTensorApply.cuh): values per block, blocks,
tensors per list.
"""


def launches(gm: GraphModule, listed: Sequence[Kernel]) -> dict[str, int]:
    """Count a step's kernel launches by kind, without collectives."""
    found = {"forward and backward": len(listed)}
    rows = update_lists(gm, math.inf)
    together = {node for row in rows for node in row}
    alone = [[n] for n in gm.graph.nodes if n.op == "call_function" and n not in together and info(n).role in _KINDS]
    for row in (*alone, *rows):
        line, role = line_of(row[0]), info(row[0]).role
        if (line is None and (is_free(row[0]) or is_view(row[0]))) or (line is not None and not line.is_work):
            continue
        number = compressor_at(row[0]).facts.passes if role is Role.COMPRESS else _over_lists(row)
        found[_KINDS[role]] = found.get(_KINDS[role], 0) + number
    return found


def _over_lists(row: list[Node]) -> int:
    """Return the number of launches of the operators in `row`, which share ATen's kernels over lists if possible."""
    is_listed = len(row) > 1 or line_of(row[0]) is not None or compat.takes_lists(row[0].target)
    if not is_listed:
        return 1
    sources = [node.all_input_nodes[0] for node in row] if len(row) > 1 else row[0].all_input_nodes
    sizes = [math.prod(map(compat.size_hint, t.shape)) for each in sources for t in tensors(each.meta.get("val"))]
    chunks = sum(math.ceil(size / CHUNK) for size in sizes)
    return max(1, math.ceil(chunks / MOST_CHUNKS), math.ceil(len(sizes) / MOST_TENSORS))
