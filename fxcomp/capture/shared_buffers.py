"""Agree on the buffers that all ranks take from rank 0 at each step, and when they travel.

DistributedDataParallel sends all buffers before each forward pass. Here only those travel that may have changed, hidden
after the backward pass. A rank sees what its own capture writes, and captures again, alone, for batches of another
shape. So the set is agreed once, while the step is compiled, and every capture follows it:

    written by the first capture of any rank     ─┐
    others, as many as cost next to nothing       ├─► the same for every rank and every batch
    large constants, such as attention masks      ─► stay; to write one later is an error that names it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp.errors import CaptureFailed, StepChanged
from fxcomp.graph.captured import buffers, is_known_early, last_writes, written_parameters
from fxcomp.graph.info import Sharing, update_info
from fxcomp.ranks import ALONE, Ranks

SMALL_BYTES = 1 << 16
"""Bytes of buffers that travel although no rank was seen to write them: as long as a few latencies (assumed)."""


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """The names of the buffers that travel, and when they leave."""

    names: frozenset[str]
    sharing: Sharing

    @classmethod
    def agree(cls, graph: GraphModule, ranks: Ranks = ALONE) -> SharedBuffers:
        """Agree with all ranks, each with its first capture."""
        inputs = buffers(graph)
        names = {node: name for name, node in inputs.items()}
        mine: dict[str, Any] = {
            "written": [names[node] for node in last_writes(graph)],
            "early": is_known_early(graph),
        }
        everyone = ranks.gather("comparing buffers", mine)
        written = {name for theirs in everyone for name in theirs["written"]}
        early = all(theirs["early"] for theirs in everyone)
        shared = frozenset(written | _small(inputs, written))
        return cls(shared, Sharing.EARLY if early else Sharing.LATE)

    def mark(self, graph: GraphModule) -> None:
        """Label a capture's buffers. Raises StepChanged if it writes one that does not travel."""
        inputs = buffers(graph)
        writes = last_writes(graph)
        for name, node in inputs.items():
            if name in self.names:
                update_info(node, sharing=self.sharing)
            elif node in writes:
                raise StepChanged(
                    f"the buffer {name!r} ({_bytes(node) / 1e3:.3g} kB) is written for this batch, and was not on any"
                    " rank when the step was compiled.\n"
                    "  Ranks agree on the buffers that they share when they compile: pass compile_step an example batch"
                    " for which the forward pass writes it, on one rank at least."
                )


def check_parameters_are_read(graph: GraphModule) -> None:
    """Raise CaptureFailed if the forward pass writes a parameter: ranks would drift apart, each by its own batch."""
    written = sorted(written_parameters(graph))
    if written:
        raise CaptureFailed(
            f"the forward pass writes the parameter {written[0]!r}, as nn.Embedding(max_norm=...) does: of several"
            " ranks each would write what follows from its own batch, and replicas would drift apart.\n"
            "  Write it after the step, on all ranks alike: with torch.no_grad(): parameter.copy_(...)."
        )


def _small(inputs: Mapping[str, Node], written: Collection[str]) -> set[str]:
    """Choose buffers that nobody was seen to write, in the model's order, up to SMALL_BYTES together."""
    chosen: set[str] = set()
    left = SMALL_BYTES
    for name, node in inputs.items():
        if name not in written and _bytes(node) <= left and not _overlaps(node.meta["val"]):
            chosen.add(name)
            left -= _bytes(node)
    return chosen


def _overlaps(value: Tensor) -> bool:
    """Ask if several elements share memory, as in an expanded tensor: nobody can write such a buffer."""
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _bytes(node: Node) -> int:
    return node.meta["val"].nbytes
