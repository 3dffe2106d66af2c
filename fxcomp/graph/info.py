"""Keep the facts about a node under the one meta key that is ours: role, parameter, what an input stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from fxcomp.graph.work import OperatorWork
from fxcomp.plan.kinds import Stream

KEY = "fxcomp"


class Role(Enum):
    """The purpose of a node."""

    INPUT = "input"
    COMPUTE = "compute"
    ARRIVE = "arrive"  # gradients that somebody else's backward pass hands over
    RANDOM_STATE = "random state"  # reads or sets a generator's state, so that draws are repeated
    COUNT = "count"  # of a weighted loss's elements, over all ranks: its collective and the wait
    GRADIENT = "gradient"  # the node that makes a parameter's local gradient
    PART = "part"  # some elements of a local gradient, for a bucket of their own
    PACK = "pack"  # gradients into one flat bucket
    PROPOSE = "propose"  # what ranks agree on before they compress
    COMPRESS = "compress"
    COLLECTIVE = "collective"
    WAIT = "wait"
    EXCHANGE = "exchange"  # a collective, or a wait for one, that the loss function or its backward pass asks for
    DECOMPRESS = "decompress"
    KEEP = "keep"  # a compressor's state for the next step
    COPY = "copy"  # between the device and the host, or into another type
    UNPACK = "unpack"  # a bucket back into gradients
    COMMIT = "commit"  # whether what arrived is finite, so that parameters may change
    ROLL_BACK = "roll back"  # what is done instead where it is not
    CLIP = "clip"  # needs every gradient
    UPDATE = "update"  # the optimizer, for one parameter
    OUTPUT = "output"


BUCKET_LINES = (
    *(Role.PACK, Role.PROPOSE, Role.COMPRESS, Role.COLLECTIVE, Role.WAIT),
    *(Role.KEEP, Role.DECOMPRESS, Role.COPY),
)
"""Roles between a bucket's gradients and their means. Buffers have some of them, too, and no `bucket`."""


class InputKind(Enum):
    """The place where the step finds the value of a graph input."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"  # the optimizer's, of one parameter
    HYPER = "hyper"  # a number of a parameter group, live: schedulers may change it
    BATCH = "batch"
    SUM = "sum"  # of a parameter's gradients over the micro-batches of a group
    COUNT = "count"  # of the elements that a weighted loss is a sum over, in the group so far
    SCALE = "scale"  # of the loss, live: what the gradients of the backward pass are too large by
    FACTOR = "factor"  # what gradients are multiplied by, live: one number for all
    RESIDUAL = "residual"  # what compression left out of a bucket
    COMPRESSOR_STATE = "compressor state"  # what else a bucket's compressor keeps from step to step

    __hash__ = object.__hash__  # Enum's own runs in Python


@dataclass(frozen=True, slots=True)
class Source:
    """The value that an input stands for: `name`, or the `index` of a group, leaf or bucket."""

    kind: InputKind
    name: str = ""
    key: str = ""
    index: int = 0
    slot: int = 0
    """Of a bucket: which of its compressions keeps the value."""

    def __str__(self) -> str:
        key, slot = "." + self.key if self.key else "", f" slot {self.slot}" if self.slot else ""
        if self.kind in (InputKind.SCALE, InputKind.FACTOR, InputKind.COUNT):  # there is one
            return self.kind.value
        return f"{self.kind.value} {self.name or self.index}{key}{slot}"


@dataclass(frozen=True, slots=True)
class FusedUpdate:
    """The operator that does a parameter's whole update in one pass over memory, and its arguments."""

    operator: OpOverload
    states: tuple[str, ...]
    """The keys of the state that it takes lists of, after parameters and gradients; an empty key is an empty list."""
    counter: str = ""
    """The key of the counter of steps, which it takes last; empty if it takes none."""
    numbers: tuple[tuple[str, str | float], ...] = ()
    """Its keywords: each the key of a live number, or a number that stays."""
    group: int = 0
    """The parameter group that the live numbers are of."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Facts about a node; read with `info(node)`."""

    role: Role
    parameter: str | None = None
    bucket: int | None = None
    stage: int = 0
    """Of a bucket's line: so many of the bucket's collectives come before it."""
    slot: int = 0
    """Of a bucket's line: which of the bucket's compressions it belongs to."""
    start: int = 0
    """Of a part of a gradient: the place of its first element in the parameter, laid flat."""
    sent_bytes: int | None = None
    """Of a collective in a bucket's line: what rank 0 counts, since shards may differ."""
    cost_us: float | None = None
    starting_us: float = 0.0
    """The time that a thread spends on launching a collective."""
    load: float = 0.0
    """The number of compute's processors that it takes while it runs."""
    overlap_speed: float = 1.0
    """Its speed while compute runs, if it is a collective and no processor is left to it."""
    launcher_load: float = 0.0
    """The number that its launching thread takes, if that is the pool's."""
    stream: Stream | None = None
    is_aside: bool = False
    """Of a bucket's line: a device runs it on a stream of its own, so that compute stands still for no wait in it."""
    source: Source | None = None
    fused: FusedUpdate | None = None
    """Of a parameter: the operator that may take the place of its traced update."""
    leaves_early: bool | None = None
    """Of a buffer that all ranks take from rank 0: before the first bucket, or after the last. It is the same for every
    capture, or ranks would launch in disorder."""
    work: OperatorWork | None = None
    """A plain operator's work, once annotate_costs has asked; it stays, since nodes do not change their operator."""

    def __str__(self) -> str:
        parts = [self.role.value, self.parameter, f"{self.cost_us:.1f} us" if self.cost_us else None]
        return " ".join(part for part in parts if part)


def info(node: Node) -> NodeInfo:
    """Read the facts about a node; an unlabelled one is a mistake of the compiler."""
    assert KEY in node.meta, f"node {node.name} has no NodeInfo: label_gradients runs first"
    return node.meta[KEY]


def has_info(node: Node) -> bool:
    return KEY in node.meta


def set_info(node: Node, value: NodeInfo) -> Node:
    node.meta[KEY] = value
    return node


def update_info(node: Node, **changes: Any) -> Node:
    """Change some of the facts about a node."""
    # As dataclasses.replace does it, in half the time: passes do this for every node.
    return set_info(node, NodeInfo(**{**dict(zip(_NAMES, _facts(info(node)), strict=True)), **changes}))


_NAMES = tuple(each.name for each in fields(NodeInfo))
_facts = attrgetter(*_NAMES)

ARGUMENTS = {
    InputKind.PARAMETER: "parameters",
    InputKind.BUFFER: "buffers",
    InputKind.STATE: "states",
    InputKind.HYPER: "numbers",
    InputKind.SUM: "sums",
    InputKind.COUNT: "counts",
    InputKind.SCALE: "scales",
    InputKind.FACTOR: "factors",
    InputKind.RESIDUAL: "residuals",
    InputKind.COMPRESSOR_STATE: "compressor_states",
    InputKind.BATCH: "batch",
}
"""The arguments of a step function after its runtime, by the kind of input in each."""


def arguments_of(given: Mapping[InputKind, Sequence[Any]]) -> list[Sequence[Any]]:
    """List a step function's arguments after its runtime; kinds of input that are not given have none."""
    return [given.get(kind, ()) for kind in ARGUMENTS]


_OWN = {"step", "rt", "aten", "math", "operator", "torch", "float", "slice", "complex", *ARGUMENTS.values()}

_FUNCTION = re.compile(r"(region|update|optimizer_step)(_\d+)?")
"""The functions of an emitted module."""


def free_name(name: str) -> str:
    """Make a name usable for a value in emitted source, with an underscore after it if it is reserved."""
    return f"{name}_" if name in _OWN or _FUNCTION.fullmatch(name) else name
