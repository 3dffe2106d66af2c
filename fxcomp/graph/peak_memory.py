"""Compute a step's peak device memory, in bytes for each of `PARTS`.

Inputs and buffers of lines are allocated for the whole step, values of forward and backward from first write to last
read, unless only their own kernel reads them (`kernels.py`). Library workspaces, allocator rounding and CUDA's context
are excluded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp.graph.info import InputKind, Role, info
from fxcomp.graph.kernels import Kernel, is_view, memory_of
from fxcomp.graph.memories import Memories
from fxcomp.graph.regions import BODY
from fxcomp.graph.work import tensor_bytes

PARTS = ("parameters", "optimizer", "residuals", "buckets", "payloads", "gradients", "activations", "inputs")

_OF_INPUTS = {
    InputKind.PARAMETER: "parameters",
    InputKind.STATE: "optimizer",
    **dict.fromkeys((InputKind.RESIDUAL, InputKind.COMPRESSOR_STATE), "residuals"),
    InputKind.SUM: "gradients",
}


def peak_memory(gm: GraphModule, listed: Sequence[Kernel]) -> dict[str, float]:
    kept: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    memories = Memories(gm, is_asynchronous=True)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        is_own = (
            isinstance(value, Tensor)
            and memories.of(node) == frozenset([node.name])
            and node.name not in memories.passing
        )
        if is_own and node.op in ("placeholder", "call_function"):
            kept[_part_kept(node)] += tensor_bytes(value)
    turns = list(_turns(gm, listed))
    sizes = {value: size for kernel in listed for value, size in kernel.writes.items()}
    last = {value: turn for turn, (read, written) in enumerate(turns) for value in (*read, *written) if value in sizes}
    ends: list[list[Node]] = [[] for _ in turns]
    for value, turn in last.items():
        ends[turn].append(value)
    live = {"gradients": 0.0, "activations": 0.0}
    peak = dict(live)
    for (_, written), ended in zip(turns, ends, strict=True):
        for value in written:
            live[_part_made(value)] += sizes[value]
        if sum(live.values()) > sum(peak.values()):
            peak = dict(live)
        for value in ended:
            live[_part_made(value)] -= sizes[value]
    return {part: size + peak.get(part, 0.0) for part, size in kept.items()}


def _turns(gm: GraphModule, listed: Sequence[Kernel]) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield the values read and written by each kernel and line, dependencies first."""
    of = {node: kernel for kernel in listed for node in kernel.nodes}
    maker = {value: kernel for kernel in listed for value in kernel.writes}
    done: set[Kernel] = set()

    def run(kernel: Kernel) -> Iterator[tuple[list[Node], list[Node]]]:
        todo = [kernel]
        while todo:
            before = [maker[each] for each in todo[-1].reads if each in maker and maker[each] not in done]
            if before and todo[-1] not in done:
                todo += before
            elif (ready := todo.pop()) not in done:
                done.add(ready)
                yield list(ready.reads), list(ready.writes)

    for node in gm.graph.nodes:
        if node in of:
            yield from run(of[node])
        elif node.op != "placeholder" and (node.op == "output" or info(node).role not in BODY):
            read = [memory_of(each) for each in node.all_input_nodes]
            for value in read:
                if value in maker:
                    yield from run(maker[value])
            yield read, []


def _part_kept(node: Node) -> str:
    source = info(node).source
    if source is not None:
        return _OF_INPUTS.get(source.kind, "inputs")
    return "buckets" if info(node).role in (Role.PACK, Role.DECOMPRESS) else "payloads"


def _part_made(value: Node) -> str:
    return "gradients" if _is_gradient(value) else "activations"


def _is_gradient(value: Node) -> bool:
    is_marked = info(value).role is Role.GRADIENT
    return is_marked or any(_is_gradient(user) for user in value.users if is_view(user))
