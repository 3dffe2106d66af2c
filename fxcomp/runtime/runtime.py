"""Run the lines of an emitted step: calls of Runtime's methods, such as pack, compress, launch and wait.

The main thread runs lines on the compute device. Two pool threads run the lines between `d2h` and `h2d` on the host.
The first runs lines up to the launch, the second all lines from the wait on. Steps reuse all buffers.
`fxcomp/graph/lines.py` lists the lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, operators
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.operators import Segments, as_pieces
from fxcomp.runtime import packing
from fxcomp.runtime.aside import SideStream
from fxcomp.runtime.buffers import AS_WRITTEN, Buffers, Numbers
from fxcomp.runtime.clock import Clock, Waits
from fxcomp.runtime.host_pool import HostCopies, HostPool, OnHost, PoolThread, value_of
from fxcomp.runtime.local_gradients import LocalGradients
from fxcomp.runtime.packing import copy_scaled
from fxcomp.runtime.rider import Rider
from fxcomp.runtime.transfers import Cut
from fxcomp.runtime.transport import Flight, Launch, Transport

T = TypeVar("T")

CPU = torch.device("cpu")


@dataclass(slots=True)
class Counters:
    waits: Waits = field(default_factory=Waits)
    payload_bytes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Input bytes of this rank's collectives, by kind and level of the collective."""
    skipped: bool = False
    """True if the step found a non-finite value, and so changed no parameter."""

    def count(self, kind: str, level: str, sent: int) -> None:
        self.payload_bytes[kind, level] = self.payload_bytes.get((kind, level), 0) + sent


def roll_back(residual: Tensor, own: Tensor | OnHost, bucket: Tensor | OnHost) -> None:
    packing.roll_back(residual, value_of(own), value_of(bucket))


def restore(state: Tensor, saved: Tensor | OnHost) -> None:
    state.copy_(value_of(saved))


class Runtime:
    """Lines of one step function. Step functions share no Runtime, because buffers are keyed by line name."""

    def __init__(self, transport: Transport, device: torch.device):
        self.transport = transport
        self.clock = Clock(device)
        self._device = device
        self._copies = HostCopies(device)
        self.counters = Counters()
        self.gradients = LocalGradients()
        self.complete, self.before_update = self.gradients.complete, self.gradients.before_update
        self.numbers: Numbers = AS_WRITTEN
        self.rider: Rider | None = None
        self.pool = HostPool()
        self.side = SideStream(device)
        self.aside = self.side.aside
        self.buffers = Buffers(pins=self._copies.pins)

    # Lines of an emitted step

    def pack(
        self,
        name: str,
        parameters: Sequence[str],
        gradients: Sequence[Tensor],
        scale: float,
        starts: Sequence[int] = (),
        *,
        dtype: torch.dtype | None = None,
        factor: Tensor | None = None,
        applies: bool = True,
    ) -> Tensor:
        """Copy gradients into one flat bucket, scaled, and cast to `dtype` if given.

        `starts` holds the first element of each gradient part; empty means all 0. `factor` multiplies gradients, but
        not the residuals of a dropped plan. With `applies=False` only the gradients passed to checks are multiplied,
        because a later line multiplies the mean.
        """
        self.gradients.see(parameters, gradients, starts, factor)
        flat, parts = self.buffers.take_packed(name, gradients, dtype)
        copy_scaled(gradients, scale, parts, flat, factor if applies else None)
        self.gradients.add_owed(parameters, parts, starts, scale)
        return flat

    def cast(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a bucket. Compressors take fp32, and dense values are sent in the gradients' dtype."""
        return self.buffers.take(name, value.numel(), dtype, value.device).copy_(value)

    def in_place(self, flat: Tensor, start: int, stop: int, scale: float) -> Tensor:
        """Scale a slice of a flat buffer in place and return it."""
        value = flat[start:stop]
        return value if scale == 1.0 else value.mul_(scale)

    def turn(self, name: str, payloads: Tensor | OnHost, outer: int, sizes: Sequence[int]) -> Tensor | OnHost:
        """Transpose `outer` rows of parts: the result has all rows of part 0, then all rows of part 1.

        `sizes` holds the elements of each part in a row.
        """
        sizes = self.numbers.sizes.get(name, sizes)
        buffer = functools.partial(self.buffers.like, name)
        return self.pool.after(packing.turn, payloads, outer, sizes, buffer)

    def propose(
        self,
        name: str,
        compressor: Compressor,
        bucket: Tensor | OnHost,
        residual: Tensor | None,
        segments: Sequence[int],
        *,
        state: Tensor | None = None,
    ) -> Tensor | OnHost:
        """Compute the proposal that ranks reduce to an agreement (scales or a basis) before they compress."""
        compressor = self.numbers.compressors.get(name, compressor)

        def run(value: Tensor) -> Tensor:
            elements = compressor.proposal_elements(segments)
            proposal = self.buffers.take(name, elements, compressor.facts.proposal_dtype, value.device)
            compressor.propose(value, residual, segments, state, proposal)
            return proposal

        return self.pool.after(run, bucket)

    def compress(
        self,
        name: str,
        compressor: Compressor,
        bucket: Tensor | OnHost,
        residual: Tensor | None,
        segments: Segments,
        *,
        state: Tensor | None = None,
        agreed: Tensor | OnHost | None = None,
    ) -> Tensor | OnHost:
        """Compress a bucket into a payload, piece by piece. Updates `residual` and `state` in place."""
        compressor = self.numbers.compressors.get(name, compressor)
        parts = as_pieces(segments)

        def run(value: Tensor, agreement: Tensor | None) -> Tensor:
            elements = operators.payload_elements(compressor, parts)
            payload = self.buffers.take(name, elements, compressor.payload_dtype, value.device)
            given = EncoderInput(value, residual, tuple(chain.from_iterable(parts)), state, agreement)
            operators.encode(compressor, given, payload, parts)
            return payload

        return self.pool.after(run, bucket, agreed)

    def launch(
        self, name: str, kind: str, value: Tensor | OnHost, cut: Cut, level: str, how: str = "sum"
    ) -> Flight | Future[Flight]:
        """Start a collective without waiting for it.

        `cut` is each rank's element count (`runtime/transfers.py`), or 1 for an all_reduce and an in-place broadcast.
        `how` is the reduction of an all_reduce: sum, avg or max.
        """
        cut, rider = self.numbers.cuts.get(name, cut), self.rider
        rides = functools.partial(rider.start, self.buffers) if rider and name in rider.carriers else None
        if isinstance(value, Future):
            launch = Launch(name, kind, cut, level, how, "pool", rides)
            return self.pool.submit(functools.partial(self._start, launch), value)
        return self._start(Launch(name, kind, cut, level, how, "main", rides), value)

    def wait(self, flight: Flight | Future[Flight]) -> Tensor | OnHost:
        """Return the result of a collective.

        If the pool launched it, return a future at once. Otherwise wait, and record the wait as exposed.
        """
        if isinstance(flight, Future):  # launched by the pool
            return self.pool.arriving(lambda: flight.result().finish())
        return self._exposed(flight.finish)

    def join(self, *values: Tensor) -> None:
        """Make the compute stream wait for the side stream. Meanwhile, network waits of the side stream are exposed."""
        start = self.clock.look()
        self.side.join(*values)
        self.counters.waits.for_aside.append((start, self.clock.look()))

    def decompress(
        self,
        name: str,
        compressor: Compressor,
        payloads: Tensor | OnHost,
        ranks: int,
        segments: Segments,
        *,
        agreed: Tensor | OnHost | None = None,
        state: Tensor | None = None,
    ) -> Tensor | OnHost:
        """Decode the mean of the ranks' payloads, piece by piece, as flat fp32."""
        compressor = self.numbers.compressors.get(name, compressor)
        parts = as_pieces(segments)
        sizes = tuple(chain.from_iterable(parts))

        def run(value: Tensor, agreement: Tensor | None) -> Tensor:
            mean = self.buffers.take(name, sum(sizes), torch.float32, value.device)
            operators.decode(compressor, DecoderInput(value, ranks, sizes, agreement, state), mean, parts)
            return mean

        return self.pool.after(run, payloads, agreed, on=PoolThread.ARRIVING)

    def keep(self, state: Tensor, payload: Tensor | OnHost) -> None:
        """Copy the finite values of a summed payload into a compressor's state."""
        self.pool.after(packing.keep, state, payload, on=PoolThread.ARRIVING)

    def d2h(self, name: str, value: Tensor) -> OnHost:
        buffer = functools.partial(self.buffers.take, name, value.numel(), value.dtype, CPU)
        return self.pool.submit(self._copies.to_host(value, buffer))

    def h2d(self, name: str, value: OnHost) -> Tensor:
        """Copy a value from the pool to the device. Waiting for the pool is exposed communication."""

        def take_back() -> Tensor:
            result = value.result()
            buffer = functools.partial(self.buffers.take, name, result.numel(), result.dtype, self._device)
            return self._copies.to_device(result, buffer)

        return self._exposed(take_back)

    def save(self, name: str, value: Tensor | OnHost) -> Tensor | OnHost:
        """Copy a value that will be overwritten."""
        return self.pool.after(functools.partial(self.buffers.copy, name), value)

    def all_finite(self, values: Sequence[Tensor]) -> bool:
        """Return whether all values are finite, so that parameters may change. All ranks get the same result.

        If a value is not finite, wait for the pool first, because the step then rolls back the pool's changes.
        """
        self.counters.skipped = not packing.all_finite(values)
        if self.counters.skipped:
            self.pool.wait()
        return not self.counters.skipped

    def exchange(self, operator: Callable[..., T], *arguments: Any) -> T:
        """Run a collective of the loss function. Its time is exposed communication."""
        return self._exposed(lambda: operator(*arguments))

    roll_back, restore = staticmethod(roll_back), staticmethod(restore)
    rng_state = staticmethod(packing.rng_state)
    set_rng_state = staticmethod(packing.set_rng_state)
    seed_rng = staticmethod(packing.seed_rng)

    # Other methods

    def take_counters(self) -> Counters:
        counted, self.counters = self.counters, Counters()
        return counted

    def finish(self) -> None:
        """Wait until the pool has finished the step, and raise the pool's first error."""
        self.pool.finish()

    def settle(self) -> None:
        """Wait for all work in flight, after all ranks left the step at the same line."""
        self.pool.wait()
        self.transport.settle()
        self.pool.settle()
        self.side.meet()
        self.take_counters()

    def drop(self) -> None:
        """Abandon a step that raised. The next step gets new buffers, because unfinished work may use the old ones."""
        self.pool.drop()
        self.forget_buffers()
        self.take_counters()

    def forget_buffers(self) -> None:
        """Free the buffers. No line may be running."""
        self.side.meet()
        self.buffers.clear()

    def close(self) -> None:
        self.pool.close()

    def _exposed(self, work: Callable[[], T]) -> T:
        waits = self.counters.waits
        start = self.clock.look()
        result = work()
        (waits.network_aside if self.side.is_used else waits.for_network).append((start, self.clock.look()))
        return result

    def _start(self, launch: Launch, value: Tensor) -> Flight:
        self.counters.count(launch.kind, launch.level, value.nbytes)
        return launch.start(value, self.transport, self.buffers.take)
