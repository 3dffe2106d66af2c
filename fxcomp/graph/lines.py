"""The kinds of lines (runtime calls) of an emitted step: method, arguments, predicted time and stream.

    %payload_0 = int8_compress(%pack_0, %residual_0, [8], 512)         the node
    payload_0 = rt.compress("payload_0", int8, pack_0, residual_0, (8,))        its line

A new kind needs an operator in `graph/ops.py`, an entry here, a method in `runtime/runtime.py`, a pass that inserts the
node, and a task in `search/plan_tasks.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from fxcomp.compressors import Compressor, compressor_of
from fxcomp.compressors.operators import in_pieces
from fxcomp.graph.edit import collective_kind, value_bytes
from fxcomp.graph.info import Role, info
from fxcomp.graph.ops import (
    ALL_FINITE,
    ALL_GATHER,
    ALL_REDUCE,
    ARRIVE,
    CAST,
    COLLECTIVE_KINDS,
    D2H,
    H2D,
    IN_PLACE,
    KEEP,
    MOVES,
    PACK,
    REDUCE_SCATTER,
    RNG_STATE,
    ROLL_BACK,
    SAVE,
    SEED_RNG,
    SET_RNG_STATE,
    TURN,
    WAIT,
)
from fxcomp.graph.work import is_sequence
from fxcomp.plan.kinds import POOL, Stream
from fxcomp.plan.prices import Prices
from fxcomp.plan.strategy import Device
from fxcomp.runtime.buffers import Numbers
from fxcomp.runtime.stopwatch import Call
from fxcomp.runtime.transfers import Cut

# Arguments: nodes stand for their values


def _as_in_graph(node: Node) -> Sequence[Any]:
    return node.args


def _keywords(node: Node) -> Mapping[str, Any]:
    return {name: before_replacement(value) for name, value in node.kwargs.items() if name != "pieces"}


def _gradients_by_name(node: Node) -> Sequence[Any]:
    gradients: Any = node.args[0]
    names = tuple(str(info(g).parameter) for g in gradients) if info(node).bucket is not None else ()
    starts = tuple(info(g).start for g in gradients)
    return names, tuple(gradients), node.args[1], *([starts] if any(starts) else [])


def _kind_value_cut_level(node: Node) -> Sequence[Any]:
    """Return the arguments of a launch. The cut is 1 for an in-place all_reduce or broadcast."""
    target, arguments = cast("Any", node.target), node.args
    if target in MOVES:
        value, cut, _, level = cast("Any", arguments)
        return collective_kind(node).value, value, tuple(cut), level
    cut = arguments[-2] if target in (ALL_GATHER, REDUCE_SCATTER) else 1
    how = (arguments[1],) if target is ALL_REDUCE and arguments[1] != "sum" else ()
    return collective_kind(node).value, arguments[0], cut, arguments[-1], *how


def _operator_and_arguments(node: Node) -> Sequence[Any]:
    return node.target, *node.args


def _with_device_by_name(node: Node) -> Sequence[Any]:
    return *node.args[:-1], str(node.args[-1])


def _with_compressor(node: Node) -> Sequence[Any]:
    value, second, sizes = cast("tuple[Any, ...]", node.args[:3])
    pieces = in_pieces(sizes, cast("Any", node.kwargs.get("pieces")))
    return compressor_at(node), value, second, pieces[0] if len(pieces) == 1 else pieces


def _residual_own_bucket(node: Node) -> Sequence[Any]:
    left_out, own, bucket = node.args
    return before_replacement(left_out), own, bucket


# Results: the node that names the line's result


def _itself(node: Node) -> Node | None:
    return node


def _nothing(_: Node) -> Node | None:
    return None


def _if_used(node: Node) -> Node | None:
    return node if node.users else None


def _payload(node: Node) -> Node | None:
    return next(user for user in node.users if user.args[1] == 0)


# Prices


def _as_measured(_: Prices, node: Node, __: Device) -> float:
    return float(cast("Any", node.args[1]))


def _packing(prices: Prices, node: Node, _: Device) -> float:
    return prices.pack_us(value_bytes(node))


def _rewriting(prices: Prices, node: Node, _: Device) -> float:
    sources: Any = node.args[0]
    read = sum(map(value_bytes, sources if is_sequence(sources) else (sources,)))
    return prices.pack_us((read + value_bytes(node)) / 2)


def _scaling(prices: Prices, node: Node, _: Device) -> float:
    return prices.pack_us(value_bytes(node)) if node.args[-1] != 1.0 else 0.0


def _looking(prices: Prices, node: Node, _: Device) -> float:
    return sum(prices.pack_us(value_bytes(value)) for value in node.all_input_nodes) / 2  # reads only


def _copying(prices: Prices, node: Node, _: Device) -> float:
    return prices.copy_us(value_bytes(node))


def _proposing(prices: Prices, node: Node, device: Device) -> float:
    return prices.propose_us(compressor_at(node), compressed_elements(node), device)


def _encoding(prices: Prices, node: Node, device: Device) -> float:
    return prices.encode_us(compressor_at(node), compressed_elements(node), device)


def _decoding(prices: Prices, node: Node, device: Device) -> float:
    payloads = int(cast("Any", node.args[1]))
    return prices.decode_us(compressor_at(node), compressed_elements(node), payloads, device)


# The lines


@dataclass(frozen=True, slots=True)
class Line:
    """Kind of line: `result = rt.method("name", arguments)`."""

    method: str
    arguments: Callable[[Node], Sequence[Any]] = _as_in_graph
    price: Callable[[Prices, Node, Device], float] | None = None
    """Predicts the time in µs. None for waits, for negligible times, and for collectives, whose links have prices."""
    stream: Stream = Stream.COMPUTE
    """Stream of the line. COMPUTE replaces a pool if inputs are in device memory; in one host, INTRA replaces INTER."""
    result: Callable[[Node], Node | None] = _itself
    has_buffer: bool = True
    """True if the result is in a buffer, named by the call's first argument."""
    keywords: Callable[[Node], Mapping[str, Any]] = _keywords
    is_undoing: bool = False
    """True if the line runs only in a step that is rolled back."""
    is_free: bool = False
    """True if the line takes a few microseconds, which predictions ignore."""

    @property
    def is_timed(self) -> bool:
        """True if the line's time is compared with a prediction."""
        return not self.is_undoing and not self.is_free and self.method not in ("exchange", "arrive")

    @property
    def is_work(self) -> bool:
        """False for waits, copies between device and host, and roll backs."""
        return not self.is_undoing and not self.is_free and self.method not in ("exchange", "wait", "d2h", "h2d")


_CPU, _ARRIVING = POOL

LAUNCH = Line("launch", _kind_value_cut_level, stream=Stream.INTER)
EXCHANGE = Line("exchange", _operator_and_arguments, result=_if_used, has_buffer=False)
COMPRESS = Line("compress", _with_compressor, _encoding, _CPU, _payload)
PROPOSE = Line("propose", _with_compressor, _proposing, _CPU)
DECOMPRESS = Line("decompress", _with_compressor, _decoding, _ARRIVING)

BY_OPERATOR: dict[Any, Line] = {
    **dict.fromkeys(COLLECTIVE_KINDS, LAUNCH),
    ARRIVE: Line("arrive", price=_as_measured, has_buffer=False),
    WAIT: Line("wait", stream=_ARRIVING, has_buffer=False),
    PACK: Line("pack", _gradients_by_name, _rewriting),
    CAST: Line("cast", _as_in_graph, _rewriting),
    IN_PLACE: Line("in_place", price=_scaling, has_buffer=False),
    TURN: Line("turn", _as_in_graph, _packing, _CPU),
    SAVE: Line("save", _as_in_graph, _packing, _CPU),
    D2H: Line("d2h", price=_copying, stream=Stream.D2H),
    H2D: Line("h2d", price=_copying, stream=Stream.H2D),
    KEEP: Line("keep", _as_in_graph, _packing, _ARRIVING, _nothing, has_buffer=False),
    ALL_FINITE: Line("all_finite", _as_in_graph, _looking, has_buffer=False),
    RNG_STATE: Line("rng_state", _with_device_by_name, has_buffer=False, is_free=True),
    SEED_RNG: Line("seed_rng", _with_device_by_name, result=_nothing, has_buffer=False, is_free=True),
    SET_RNG_STATE: Line("set_rng_state", _with_device_by_name, result=_nothing, has_buffer=False, is_free=True),
}

COUNT = Line("launch", _kind_value_cut_level, stream=Stream.INTER, is_free=True)
"""Launch for a weighted loss's element count, without a price."""

BY_ROLE = {Role.EXCHANGE: EXCHANGE, Role.PROPOSE: PROPOSE, Role.COMPRESS: COMPRESS, Role.DECOMPRESS: DECOMPRESS}

_DECOMPRESS_OWN = replace(DECOMPRESS, price=None, stream=Stream.COMPUTE, is_undoing=True)

UNDOING: dict[Any, Line] = {
    ROLL_BACK: Line("roll_back", _residual_own_bucket, result=_nothing, has_buffer=False, is_undoing=True),
    torch.ops.aten.copy_.default: Line("restore", result=_nothing, has_buffer=False, is_undoing=True),
}

TIMED_METHODS = tuple(
    dict.fromkeys(line.method for line in (*BY_OPERATOR.values(), *BY_ROLE.values()) if line.is_timed)
)


def line_of(node: Node) -> Line | None:
    """Return a node's kind of line; None for plain operators and getitem nodes."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    role, target = info(node).role, cast("Any", node.target)
    if role is Role.ROLL_BACK:
        return UNDOING.get(target, _DECOMPRESS_OWN)
    if role is Role.COUNT and target is not WAIT:
        return COUNT
    return BY_ROLE.get(role) or BY_OPERATOR.get(target)


def timed_lines(pieces: Iterable[Any]) -> Iterator[tuple[Node, Call, Line]]:
    """Yield (node, call, kind) of the timed lines of a step.

    A call is a method and the index among the step's calls of this method.
    """
    counts: dict[str, int] = {}
    for piece in pieces:
        line = line_of(piece) if isinstance(piece, Node) else None
        if not isinstance(piece, Node) or line is None or line.is_undoing:
            continue
        counts[line.method] = counts.get(line.method, -1) + 1
        if line.is_timed:
            yield piece, (line.method, counts[line.method]), line


def numbers_of(gm: GraphModule) -> Numbers:
    """Return the compressors, cuts and sizes of a program's lines, which can change without a new program."""
    compressors: dict[str, Compressor] = {}
    cuts: dict[str, Cut] = {}
    sizes: dict[str, Sequence[int]] = {}
    for node in gm.graph.nodes:
        line = line_of(node)
        result = line.result(node) if line is not None else None
        if line is None or result is None:
            continue
        arguments: Sequence[Any] = line.arguments(node)
        match line.method:
            case "propose" | "compress" | "decompress":
                compressors[result.name] = arguments[0]
            case "launch":
                cuts[result.name] = arguments[2]
            case "turn":
                sizes[result.name] = tuple(arguments[2])
            case _:
                pass
    return Numbers(compressors, cuts, sizes)


def compressor_at(node: Node) -> Compressor:
    target, arguments = cast("Any", node.target), cast("Any", node.args)
    return compressor_of(target, arguments[3:])


def compressed_elements(node: Node) -> int:
    sizes: Any = node.args[2]
    return sum(sizes)


def before_replacement(value: Any) -> Any:
    """Return the residual or state that a compress node replaces, if `value` is the replacement; else `value`."""
    if not isinstance(value, Node) or value.target is not operator.getitem or info(value).role is not Role.COMPRESS:
        return value
    compress, place = cast("tuple[Node, int]", value.args)
    return compress.args[1] if place == 1 else compress.kwargs["state"]
