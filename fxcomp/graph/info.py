"""Facts about an FX node, stored under one key of `node.meta`."""

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
    INPUT = "input"
    COMPUTE = "compute"
    ARRIVE = "arrive"  # gradients from a backward pass outside of the graph
    RANDOM_STATE = "random state"  # reads or sets a random generator's state
    COUNT = "count"  # sums a weighted loss's element counts over ranks: collective and wait
    GRADIENT = "gradient"
    PART = "part"  # elements of a gradient, for a separate bucket
    PACK = "pack"  # gradients into one flat bucket
    PROPOSE = "propose"  # values that ranks agree on before they compress
    COMPRESS = "compress"
    COLLECTIVE = "collective"
    WAIT = "wait"
    EXCHANGE = "exchange"  # communication of the loss function or its backward pass
    DECOMPRESS = "decompress"
    KEEP = "keep"  # stores a compressor's state for the next step
    COPY = "copy"  # between device and host, or to another type
    UNPACK = "unpack"  # a bucket back into gradients
    COMMIT = "commit"  # checks that arrived values are finite
    ROLL_BACK = "roll back"  # undoes a step with non-finite values
    CLIP = "clip"  # gradient clipping, which needs every gradient
    UPDATE = "update"  # optimizer of one parameter
    OUTPUT = "output"


BUCKET_LINES = (
    *(Role.PACK, Role.PROPOSE, Role.COMPRESS, Role.COLLECTIVE, Role.WAIT),
    *(Role.KEEP, Role.DECOMPRESS, Role.COPY),
)
"""Roles of the nodes between local gradients and their means over ranks."""


class InputKind(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"  # optimizer state of one parameter
    HYPER = "hyper"  # number of a parameter group that schedulers may change
    BATCH = "batch"
    SUM = "sum"  # gradients summed over the micro-batches of a group
    COUNT = "count"  # elements of a weighted loss in the group's micro-batches so far
    SCALE = "scale"  # factor of the loss, which may change
    FACTOR = "factor"  # factor of all gradients, which may change
    RESIDUAL = "residual"  # compression error of a bucket
    COMPRESSOR_STATE = "compressor state"  # other state of a bucket's compressor

    __hash__ = object.__hash__  # Enum's own is slower


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a graph input: its `name`, or the `index` of its parameter group, batch leaf or bucket."""

    kind: InputKind
    name: str = ""
    key: str = ""
    index: int = 0
    slot: int = 0

    def __str__(self) -> str:
        key, slot = "." + self.key if self.key else "", f" slot {self.slot}" if self.slot else ""
        if self.kind in (InputKind.SCALE, InputKind.FACTOR, InputKind.COUNT):  # there is only one
            return self.kind.value
        return f"{self.kind.value} {self.name or self.index}{key}{slot}"


@dataclass(frozen=True, slots=True)
class FusedUpdate:
    """PyTorch's fused operator for a parameter's whole update."""

    operator: OpOverload
    states: tuple[str, ...]
    """Optimizer-state keys of the operator's list arguments, in order; an empty key stands for an empty list."""
    counter: str = ""
    """Key of the step counter; empty if there is none."""
    numbers: tuple[tuple[str, str | float], ...] = ()
    """Keyword arguments: (name, value). A string value is the key of a number in the parameter group."""
    group: int = 0
    """Index of the parameter group."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    role: Role
    parameter: str | None = None
    bucket: int | None = None
    stage: int = 0
    """Number of the bucket's collectives before this node."""
    slot: int = 0
    """Index of the compression within its bucket."""
    start: int = 0
    """Offset of a part's first element in the flat parameter."""
    sent_bytes: int | None = None
    """Bytes that rank 0 sends in a bucket's collective. All ranks use this number for the price, as shards differ."""
    cost_us: float | None = None
    starting_us: float = 0.0
    """Time that a thread takes to launch a collective, in us."""
    load: float = 0.0
    """Number of processors that the node takes from compute."""
    overlap_speed: float = 1.0
    """Speed of a collective during compute / speed alone, if compute leaves no processor free."""
    launcher_load: float = 0.0
    """Number of processors taken by the pool's launching thread."""
    stream: Stream | None = None
    is_aside: bool = False
    """True if the node runs on the side stream, so that compute does not block."""
    source: Source | None = None
    fused: FusedUpdate | None = None
    """Operator that may replace the traced update of a parameter."""
    leaves_early: bool | None = None
    """True if a buffer is broadcast before the first bucket, False after the last, None if it is not broadcast."""
    work: OperatorWork | None = None

    def __str__(self) -> str:
        parts = [self.role.value, self.parameter, f"{self.cost_us:.1f} us" if self.cost_us else None]
        return " ".join(part for part in parts if part)


def info(node: Node) -> NodeInfo:
    assert KEY in node.meta, f"node {node.name} has no NodeInfo: label_gradients runs first"
    return node.meta[KEY]


def has_info(node: Node) -> bool:
    return KEY in node.meta


def set_info(node: Node, value: NodeInfo) -> Node:
    node.meta[KEY] = value
    return node


def update_info(node: Node, **changes: Any) -> Node:
    # dataclasses.replace takes twice as long
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
"""Argument names of the emitted step function after `rt`, in order."""


def arguments_of(given: Mapping[InputKind, Sequence[Any]]) -> list[Sequence[Any]]:
    return [given.get(kind, ()) for kind in ARGUMENTS]


_OWN = {"step", "rt", "aten", "math", "operator", "torch", "float", "slice", "complex", *ARGUMENTS.values()}

_FUNCTION = re.compile(r"(region|update|optimizer_step)(_\d+)?")
"""Names of functions in an emitted module."""


def free_name(name: str) -> str:
    """Return a name for a value in emitted source; reserved names get an underscore."""
    return f"{name}_" if name in _OWN or _FUNCTION.fullmatch(name) else name


def alike(name: str) -> str:
    """Return a parameter's name without numbers: `blocks.*.up.weight`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
