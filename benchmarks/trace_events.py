"""Read one rank's Chrome trace, as torch.profiler writes it.

- collectives: gloo's (`gloo:all_reduce` with the shapes of its inputs) and NCCL's kernels (`ncclDevKernel_...` with
  `Collective name`, `In msg nelems`, `dtype`, `Group size`), a sample each;
- operators with the shapes of their inputs (`aten::mm`, from `record_shapes=True`), by their own time on the CPU or by
  their kernels' on a GPU.

Other events are counted and listed; sends and receives too, whose times only say when they were asked for.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch._ops import OpOverloadPacket

from fxcomp.cluster.link import MOST_RANKS
from fxcomp.errors import BadOption
from fxcomp.plan.kinds import CollectiveKind

_K = CollectiveKind
_COLLECTIVES = {
    # gloo's names, without `gloo:`
    "all_reduce": _K.ALL_REDUCE,
    "all_gather": _K.ALL_GATHER,
    "reduce_scatter": _K.REDUCE_SCATTER,
    "broadcast": _K.BROADCAST,
    "all_to_all": _K.ALL_TO_ALL,
    "reduce": _K.REDUCE,
    "gather": _K.GATHER,
    # NCCL's, as ProcessGroupNCCL records them
    "allreduce": _K.ALL_REDUCE,
    "_allgather_base": _K.ALL_GATHER,
    "allgather": _K.ALL_GATHER,
    "allgather_into_tensor_coalesced": _K.ALL_GATHER,
    "_reduce_scatter_base": _K.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _K.REDUCE_SCATTER,
    "alltoall": _K.ALL_TO_ALL,
    "all_to_allv": _K.ALL_TO_ALL,
}
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "int": 4, "byte": 1, "char": 1, "bool": 1}
_TYPES = {
    "float": ("f32", 4),
    "double": ("f64", 8),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("f16", 2),
    "long int": ("i64", 8),
    "long": ("i64", 8),
    "int": ("i32", 4),
    "unsigned char": ("u8", 1),
    "bool": ("b8", 1),
}
"""The profiler's names of types: ours, and bytes."""


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """One collective on one rank."""

    kind: CollectiveKind
    ranks: tuple[int, ...] | None
    size: int
    us: float


@dataclass(slots=True)
class RankTrace:
    """One rank's trace, read."""

    rank: int
    world_size: int
    host: str
    hardware: str
    collectives: list[TracedCollective] = field(default_factory=list[TracedCollective])
    operators: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    recognised: Counter[str] = field(default_factory=Counter[str])
    unknown: Counter[str] = field(default_factory=Counter[str])
    unknown_us: Counter[str] = field(default_factory=Counter[str])


def read_trace(path: Path) -> RankTrace:
    data = _loaded(path)
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise BadOption(f"{path} is not a Chrome trace: it has no list of traceEvents")
    info = _mapping(data.get("distributedInfo"))
    devices: Any = data.get("deviceProperties") or [{}]
    trace = RankTrace(
        rank=_number(info.get("rank")) or 0,
        world_size=_number(info.get("world_size")) or 1,
        host=_printable(data.get("host_name", "")),
        hardware=_printable(_mapping(devices[0]).get("name", "")) if isinstance(devices, list) else "",
    )
    if trace.world_size > MOST_RANKS:
        raise BadOption(f"{path} is of a job of {trace.world_size} ranks; a job may have {MOST_RANKS:,}")
    spans = [event for event in map(_mapping, cast(list[Any], events)) if event.get("ph") == "X"]
    spans.sort(key=lambda event: _when(event.get("ts")))
    kernels = _kernel_times(spans)
    known_groups = _groups(info)
    for event in spans:
        _add(trace, event, kernels, known_groups)
    return trace


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        data = json.loads(text)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise BadOption(f"cannot read the trace {path}: {error}") from None
    return {"traceEvents": data} if isinstance(data, list) else _mapping(data)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _number(value: Any) -> int | None:
    """Read a count, a size or a rank; None for what cannot be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None


def _when(value: Any) -> float:
    """Read a time stamp; 0 for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _LARGEST else 0.0


def _duration_us(value: Any) -> float:
    """Read an event's duration; 0 for what no event takes."""
    us = _when(value)
    return us if _SHORTEST_US <= us <= _LONGEST_US else 0.0


_LARGEST = 10**17  # of what is counted; in bytes a cost table still takes it (assumed: nothing real comes near it)
_SHORTEST_US, _LONGEST_US = 1e-6, 1e12
"""An event takes longer than light needs for a hair's breadth, and less than some days (assumed)."""


def _printable(value: Any) -> str:
    """Replace what a terminal cannot show."""
    return "".join(one if one.isprintable() else "?" for one in str(value))


def _groups(info: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """Read the ranks of every process group with more than one."""
    configs: Any = info.get("pg_config")
    listed: list[Any] = cast(list[Any], configs) if isinstance(configs, list) else []
    found = {_ranks(_mapping(config).get("ranks")) for config in listed}
    return {ranks for ranks in found if ranks is not None and len(ranks) > 1}


def _ranks(value: Any) -> tuple[int, ...] | None:
    """Read ranks from a list, or from the text of one: `[0, 1]`."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[0-9, ]+\]", value):
            return None
        value = [int(digits) if len(digits) < 10 else None for digits in re.findall(r"[0-9]+", value)]
    if not isinstance(value, list):
        return None
    numbers = [number for one in cast(list[Any], value) if (number := _number(one)) is not None]
    is_group = len(set(numbers)) == len(cast(list[Any], value)) > 0
    return tuple(numbers) if is_group else None


def _kernel_times(spans: Sequence[Mapping[str, Any]]) -> dict[Any, float]:
    """Sum µs on the device by the external id of the operator that started it."""
    times: defaultdict[Any, float] = defaultdict(float)
    for event in spans:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            mark = _mapping(event.get("args")).get("External id")
            if isinstance(mark, int):
                times[mark] += _duration_us(event.get("dur"))
    return times


def _add(
    trace: RankTrace, event: Mapping[str, Any], kernels: Mapping[Any, float], groups: set[tuple[int, ...]]
) -> None:
    """Make a sample of an event, or count it as unknown."""
    name, args, us = str(event.get("name", "")), _mapping(event.get("args")), _duration_us(event.get("dur"))
    sample = _collective(event, name, args, us, groups, trace.world_size)
    if sample is not None:
        trace.collectives.append(sample)
        trace.recognised[sample.kind.value] += 1
        return
    key = _operator(name, args) if event.get("cat") == "cpu_op" else None
    if key is not None and us > 0:
        mark = args.get("External id")
        own_us = kernels.get(mark, 0.0) if kernels and isinstance(mark, int) else us
        if own_us > 0:
            trace.operators.setdefault(key, []).append(own_us)
            trace.recognised["operators"] += 1
            return
    if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and isinstance(args.get("External id"), int):
        return  # counted with the operator that started it
    trace.unknown[_shortened(name)] += 1
    trace.unknown_us[_shortened(name)] += round(us)


def _shortened(name: str) -> str:
    name = _printable(name)
    return re.split(r"[(<:]", name.replace("::", "."))[0][:40] if name.startswith("void") else name[:40]


def _collective(
    event: Mapping[str, Any],
    name: str,
    args: Mapping[str, Any],
    us: float,
    groups: set[tuple[int, ...]],
    world_size: int,
) -> TracedCollective | None:
    if us <= 0:
        return None
    if name.startswith("gloo:") and event.get("cat") == "user_annotation":
        kind = _COLLECTIVES.get(name.removeprefix("gloo:"))
        tensors = list(_tensors(args))
        size = sum(count * width for _, count, width in tensors[:1])
        # gloo does not say whose collective it is: known only where all groups have the same ranks.
        ranks = next(iter(groups)) if len(groups) == 1 else tuple(range(world_size)) if not groups else None
        return TracedCollective(kind, ranks, size, us) if kind is not None and size else None
    if name.startswith("ncclDevKernel") and event.get("cat") == "kernel":
        kind = _COLLECTIVES.get(str(args.get("Collective name")))
        count, width = _number(args.get("In msg nelems")), _BYTES.get(str(args.get("dtype")).lower())
        if kind is None or not count or width is None or count * width > _LARGEST:
            return None
        ranks = _ranks(args.get("Process Group Ranks"))
        if ranks is None and _number(args.get("Group size")) == world_size:
            ranks = tuple(range(world_size))
        return TracedCollective(kind, ranks, count * width, us)
    return None


def _tensors(args: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield each tensor among the inputs: its type as text, its elements, and bytes of one."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return
    for shape, name in zip(cast(list[Any], dims), cast(list[Any], types), strict=False):
        known = _TYPES.get(name) if isinstance(name, str) else None
        sizes = [_number(size) for size in cast(list[Any], shape)] if isinstance(shape, list) else [None]
        if known is None or None in sizes:
            continue
        count = math.prod(size for size in sizes if size is not None)
        if count > _LARGEST:
            continue
        yield f"{known[0]}[{','.join(map(str, sizes))}]", count, known[1]


def _operator(name: str, args: Mapping[str, Any]) -> str | None:
    """Write the key under which a table files an operator, `aten.mm f32[512,384] f32[384,384]`; None without shapes."""
    if not name.startswith("aten::"):
        return None
    shapes = [text for text, _, _ in _tensors(args)]
    types: Any = args.get("Input type")
    if not shapes or not isinstance(types, list):
        return None
    text = _overload(name.removeprefix("aten::"), tuple(map(str, cast(list[Any], types))))
    return None if text is None else " ".join([text, *shapes])


def _overload(name: str, types: tuple[str, ...]) -> str | None:
    """Find the overload that takes inputs of these types: `aten.add.Tensor`. The profiler names the operator alone."""
    # The namespace has attributes that are no operators, like __file__; names of another form it may not even take.
    found = getattr(torch.ops.aten, name, None) if re.fullmatch(r"[A-Za-z0-9_]+", name) else None
    if not isinstance(found, OpOverloadPacket):
        return None
    packet = cast("Any", found)
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        if any(argument.is_out for argument in arguments) or len(types) > len(arguments):
            continue
        if all(_takes(str(argument.type), given) for argument, given in zip(arguments, types, strict=False)):
            return f"aten.{name}" if overload == "default" else f"aten.{name}.{overload}"
    return None


def _takes(expected: str, given: str) -> bool:
    """Return whether an argument of a schema's type may be what the profiler calls `given`."""
    is_tensor = expected in ("Tensor", "Optional[Tensor]")
    if given in _TYPES:
        return is_tensor
    if given == "TensorList":
        return expected.startswith("List[") and "Tensor" in expected
    if given == "Scalar":
        return expected in ("number", "int", "float", "bool") or (expected.startswith("Optional[") and not is_tensor)
    return expected != "Tensor"
