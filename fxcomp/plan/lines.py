"""Operations of a bucket (lines) in order, with their bytes.

    reduce_scatter@intra > compress(int8)@gpu > all_gather@inter > decompress@gpu > all_gather@intra      2x2, bf16

    stage 0   pack   send reduce_scatter
    stage 1   cast   compress   send all_gather      compressors use fp32
    stage 2   decompress   cast   send all_gather    dense values are sent as bf16
    stage 3
    finally   (copy to the device, cast)

`passes/lower_strategies.py` converts lines to nodes, `search/plan_tasks.py` to tasks, `search/least_work.py` to bounds.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fxcomp.plan.interpret import Device
from fxcomp.plan.kinds import Stream
from fxcomp.plan.legs import Decode, Encode, Leg, Route, Send

FP32 = 4
"""Bytes per element of compressors' input and output."""


class LineKind(Enum):
    PACK = "pack"
    CAST = "cast"
    D2H = "d2h"
    H2D = "h2d"
    TURN = "turn"
    PROPOSE = "propose"
    AGREE = "agree"
    COMPRESS = "compress"
    SEND = "send"
    DECOMPRESS = "decompress"

    __hash__ = object.__hash__


class BucketLine(NamedTuple):
    kind: LineKind
    stream: Stream
    """Stream that runs the operation, or starts a collective."""
    size: int
    """Bytes that determine the price. Pack and cast: mean of bytes read and written. Copy and turn (reordering): bytes
    moved. Gather: the largest input of a rank. Other collectives: the input. Others: the result.
    """
    leg: Leg | None = None
    of: Encode | None = None
    """Encode leg of the payload or proposal; None for dense values."""

    @property
    def encode(self) -> Encode:
        assert isinstance(self.leg, Encode), f"{self.kind.value} compresses nothing"
        return self.leg

    @property
    def send(self) -> Send:
        assert isinstance(self.leg, Send), f"{self.kind.value} sends nothing"
        return self.leg

    @property
    def decode(self) -> Decode:
        assert isinstance(self.leg, Decode), f"{self.kind.value} decompresses nothing"
        return self.leg


Stages = tuple[tuple[BucketLine, ...], ...]


def lines_of(route: Route) -> Stages:
    """Return the lines of each stage, then the lines that bring the mean to the device in the gradients' type."""
    return _LineWriter(route).stages()


def sent(stages: Stages) -> list[BucketLine]:
    """Return the lines of collectives in order; sizes may differ between ranks."""
    return [line for stage in stages for line in stage if line.kind in (LineKind.SEND, LineKind.AGREE)]


class _LineWriter:
    """Writes the lines and tracks the tensor's device and size."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.dense = route.element_type.itemsize
        self.itemsize = FP32 if route.packs_fp32 else self.dense
        self.held = self.itemsize * len(route.whole)
        self.payload_of: Encode | None = None
        self.proposal: Encode | None = None
        self.on_pool = False
        """True while the pool holds the tensor and launches its collectives."""
        self.lines: list[BucketLine] = []

    def stages(self) -> Stages:
        found: list[tuple[BucketLine, ...]] = []
        self._add(LineKind.PACK, (self.dense * len(self.route.whole) + self.held) // 2)
        for legs in self.route.stages:
            for leg in legs:
                self._leg(leg)
            found.append(tuple(self.lines))
            self.lines.clear()
        self._bring_to(Device.GPU)
        self._cast(self.dense)
        return (*found, tuple(self.lines))

    def _leg(self, leg: Leg) -> None:
        match leg:
            case Encode():
                self._cast(FP32)
                self._bring_to(leg.device)
                self._encode(leg)
            case Decode():
                self._bring_to(leg.device)
                self.held = FP32 * leg.elements
                self._add(LineKind.DECOMPRESS, self.held, leg, Stream.CPU_ARRIVING if self.on_pool else Stream.COMPUTE)
                self.itemsize, self.payload_of = FP32, None
            case Send():
                if leg.slot is None:
                    self._bring_to(Device.GPU)
                    if leg.ranks > 1:
                        self._cast(self.dense)
                self._send(leg)

    def _bring_to(self, device: Device) -> None:
        to_pool = device is Device.CPU
        if self.on_pool != to_pool:
            self.on_pool = to_pool
            kind, stream = (LineKind.D2H, Stream.D2H) if to_pool else (LineKind.H2D, Stream.H2D)
            self._add(kind, self.held, stream=stream)

    def _cast(self, itemsize: int) -> None:
        if self.itemsize != itemsize:
            read, self.held = self.held, self.held // self.itemsize * itemsize
            self.itemsize = itemsize
            self._add(LineKind.CAST, (read + self.held) // 2, stream=Stream.COMPUTE)

    def _encode(self, leg: Encode) -> None:
        if leg.is_proposal:
            self.proposal = leg
            self._add(LineKind.PROPOSE, sum(map(leg.compressor.proposal_bytes, leg.segments)), leg)
            return
        self.held = leg.payload_elements * leg.compressor.payload_dtype.itemsize
        self._add(LineKind.COMPRESS, self.held, leg)
        self.payload_of = leg

    def _send(self, leg: Send) -> None:
        if self.proposal is not None:
            made, self.proposal = self.proposal, None
            proposed = sum(map(made.compressor.proposal_bytes, made.segments))
            self.lines.append(BucketLine(LineKind.AGREE, self._thread, proposed, leg, made))
            return
        if leg.ranks == 1:
            held = self.held if leg.slot is not None else self.held // self.itemsize * self.dense
            self._add(LineKind.SEND, leg.works_on(held), leg)
            return
        if leg.turned is not None:
            self._add(LineKind.TURN, self.held, leg)
        self._add(LineKind.SEND, leg.works_on(self.held), leg)
        self.held = leg.leaves(self.held)

    @property
    def _thread(self) -> Stream:
        return Stream.CPU if self.on_pool else Stream.COMPUTE

    def _add(self, kind: LineKind, size: int, leg: Leg | None = None, stream: Stream | None = None) -> None:
        self.lines.append(BucketLine(kind, stream or self._thread, size, leg, self.payload_of))
