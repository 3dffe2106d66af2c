"""What emitted code calls: packing, compressing, launching and waiting, with every buffer kept from step to step.

The main thread plays the device, and a pool of one thread plays the host's processor: work handed over with `d2h` runs
there, in order, until `h2d` takes it back. Nothing here knows a plan; the emitted lines say what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, kernels
from fxcomp.runtime.clock import clock_of
from fxcomp.runtime.float_state import as_caller_computes
from fxcomp.runtime.packing import packed_dtype, packed_sizes, slots
from fxcomp.runtime.transfers import Transfers
from fxcomp.runtime.transport import Transport, Work

T = TypeVar("T")

CPU = torch.device("cpu")

GradientCheck = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective under way; `output` is valid once `work` is done."""

    name: str
    output: Tensor
    work: Work


@dataclass(frozen=True, slots=True)
class OnHost:
    """A value that the pool is computing."""

    future: Future[Tensor]


@dataclass(frozen=True, slots=True)
class HostFlight:
    """A collective that the pool has launched or will launch."""

    future: Future[Flight]


@dataclass(slots=True)
class Counters:
    """What one step did."""

    waits: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    """Where it stood still for the network: two looks at the device's clock each."""
    payload_bytes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Bytes that this rank put into collectives, by kind and level."""
    skipped: bool = False
    """Whether something that arrived was not finite."""


class Runtime:
    """Runs the lines of an emitted step. One for each step function: its buffers are keyed by the lines' names."""

    def __init__(self, transport: Transport, device: torch.device):
        self.transport = transport
        self.clock = clock_of(device)
        self._device = device
        self._transfers = Transfers(device)
        self.counters = Counters()
        self.on_gradient: GradientCheck | None = None
        self.on_update: Callable[[Tensor], None] | None = None
        self.watch_pool: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None
        """Puts a clock around what the pool does, in a step that is timed."""
        self.undelivered: dict[str, Tensor] = {}
        """What another plan left out of parameters' gradients, flat: packing adds it, until somebody clears it."""
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._slots: dict[tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]], list[Tensor]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._failures: list[BaseException] = []
        """What was raised on the pool's thread: the result may be one that nobody reads."""

    # Lines of an emitted step

    def pack(self, name: str, parameters: Sequence[str], gradients: Sequence[Tensor], scale: float) -> Tensor:
        """Copy gradients into one flat bucket, scaled."""
        self.see(parameters, gradients)
        types = tuple((gradient.shape, gradient.dtype) for gradient in gradients)
        flat = self._buffer(name, sum(packed_sizes(gradients)), packed_dtype(gradients), gradients[0].device)
        parts = self._slots.get((name, types))
        if parts is None:
            parts = self._slots[name, types] = slots(flat, gradients)
        for slot, gradient in zip(parts, gradients, strict=True):
            if scale == 1.0:
                slot.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=slot)
        if self.undelivered:
            for parameter, slot in zip(parameters, parts, strict=False):
                if parameter in self.undelivered:
                    slot.add_(self.undelivered[parameter].view(slot.shape), alpha=scale)
        return flat

    def pad(self, name: str, bucket: Tensor, ranks: int) -> Tensor:
        """Lengthen a bucket with zeros until it splits evenly."""
        padded = self._buffer(name, bucket.numel() + -bucket.numel() % ranks, bucket.dtype, bucket.device)
        padded[: bucket.numel()].copy_(bucket)
        padded[bucket.numel() :].zero_()
        return padded

    def accumulate(self, bucket: Tensor | OnHost, velocity: Tensor, momentum: float) -> Tensor | OnHost:
        """Make bucket and velocity momentum · velocity + bucket, in place; the velocity only where that is finite."""

        def run(value: Tensor) -> Tensor:
            if _have_kernel(value, velocity):
                kernels.run("fxcomp_accumulate", value, velocity, float(momentum), value.numel())
            else:
                torch.add(velocity * momentum, value, out=value)
                torch.where(value.isfinite(), value, velocity, out=velocity)
            return value

        return self._then(run, bucket)

    def mask_velocity(self, velocity: Tensor, bucket: Tensor | OnHost, residual: Tensor) -> None:
        """Forget the velocity where the bucket's value was sent, so that nothing is left out of it."""

        def run(value: Tensor) -> Tensor:
            if _have_kernel(value, velocity, residual):
                kernels.run("fxcomp_mask_velocity", value, velocity, residual, value.numel())
                return velocity
            return velocity.masked_fill_((residual == 0) & value.isfinite(), 0.0)

        self._then(run, bucket)

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
        """Make what the ranks reduce to an agreement before they compress."""

        def run(value: Tensor) -> Tensor:
            elements = compressor.proposal_elements(segments)
            proposal = self._buffer(name, elements, compressor.facts.proposal_dtype, value.device)
            compressor.propose(value, residual, segments, state, proposal)
            return proposal

        return self._then(run, bucket)

    def compress(
        self,
        name: str,
        compressor: Compressor,
        bucket: Tensor | OnHost,
        residual: Tensor | None,
        segments: Sequence[int],
        *,
        state: Tensor | None = None,
        agreed: Tensor | OnHost | None = None,
    ) -> Tensor | OnHost:
        """Fill a payload; residual and state change in place."""

        def run(value: Tensor, agreement: Tensor | None = None) -> Tensor:
            elements = compressor.payload_elements(segments)
            payload = self._buffer(name, elements, compressor.payload_dtype, value.device)
            compressor.encode(value, residual, payload, segments, state, agreement)
            return payload

        return self._then(run, bucket) if agreed is None else self._then(run, bucket, agreed)

    def launch(
        self, name: str, kind: str, value: Tensor | OnHost, ranks: int, level: str, how: str = "sum"
    ) -> Flight | HostFlight:
        """Start a collective and return at once. `how` is what an all_reduce makes of the ranks' values: sum or max."""
        if isinstance(value, OnHost):
            given = value.future
            return HostFlight(self._submit(lambda: self._launch(name, kind, given.result(), ranks, level, how, "pool")))
        return self._launch(name, kind, value, ranks, level, how, "main")

    def wait(self, flight: Flight | HostFlight) -> Tensor | OnHost:
        """The collective's result; time spent here is exposed communication."""
        if isinstance(flight, HostFlight):
            given = flight.future
            return OnHost(self._submit(lambda: _finish(given.result())))
        start = self.clock.look()
        output = _finish(flight)
        self.counters.waits.append((start, self.clock.look()))
        return output

    def decompress(
        self,
        name: str,
        compressor: Compressor,
        payloads: Tensor | OnHost,
        ranks: int,
        segments: Sequence[int],
        *,
        agreed: Tensor | OnHost | None = None,
        state: Tensor | None = None,
    ) -> Tensor | OnHost:
        """The mean of what the ranks' payloads stand for, flat fp32."""

        def run(value: Tensor, agreement: Tensor | None = None) -> Tensor:
            mean = self._buffer(name, sum(segments), torch.float32, value.device)
            compressor.decode(value, ranks, segments, mean, agreement, state)
            return mean

        return self._then(run, payloads) if agreed is None else self._then(run, payloads, agreed)

    def keep(self, state: Tensor, payload: Tensor | OnHost) -> None:
        """Make a summed payload a compressor's next state, where it is finite."""

        def run(value: Tensor) -> Tensor:
            return state.copy_(torch.where(value.isfinite(), value, state))

        self._then(run, payload)

    def d2h(self, name: str, value: Tensor) -> OnHost:
        """Hand a value to the host's pool."""
        pinned = functools.partial(self._buffer, name, value.numel(), value.dtype, CPU, pinned=True)
        return OnHost(self._submit(self._transfers.to_host(value, pinned)))

    def h2d(self, name: str, value: OnHost) -> Tensor:
        """Take a value back from the pool; time spent here is exposed communication."""
        start = self.clock.look()
        result = value.future.result()
        buffer = functools.partial(self._buffer, name, result.numel(), result.dtype, self._device)
        there = self._transfers.to_device(result, buffer)
        self.counters.waits.append((start, self.clock.look()))
        return there

    def save(self, name: str, value: Tensor | OnHost) -> Tensor | OnHost:
        """Copy what will be overwritten."""

        def run(now: Tensor) -> Tensor:
            return self._buffer(name, now.numel(), now.dtype, now.device).copy_(now)

        return self._then(run, value)

    def all_finite(self, values: Sequence[Tensor]) -> bool:
        """Whether parameters may change. Every rank sees the same values, and so finds the same."""
        self.counters.skipped = not all(map(_is_finite, values))
        return not self.counters.skipped

    def roll_back(self, residual: Tensor, own: Tensor | OnHost, bucket: Tensor | OnHost) -> None:
        """Make a residual what it was before the bucket was added and the own payload taken off."""
        before = _now(own).add_(residual).sub_(_now(bucket))
        torch.where(before.isfinite(), before, residual, out=residual)

    def restore(self, state: Tensor, saved: Tensor | OnHost) -> None:
        """Put a state back."""
        state.copy_(_now(saved))

    def exchange(self, operator: Callable[..., T], *arguments: Any) -> T:
        """Run a collective of the loss function's own; time spent here is exposed communication."""
        start = self.clock.look()
        result = operator(*arguments)
        self.counters.waits.append((start, self.clock.look()))
        return result

    def see(self, parameters: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Show local gradients to whoever checks them."""
        if self.on_gradient is not None and parameters:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self.on_gradient(parameter, gradient)

    def complete(self, parameters: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Show gradients that no bucket carries, and add what waited for them: one rank alone has no buckets."""
        self.see(parameters, gradients)
        if not self.undelivered:
            return list(gradients)
        return [
            gradient + self.undelivered[name].view(gradient.shape) if name in self.undelivered else gradient
            for name, gradient in zip(parameters, gradients, strict=True)
        ]

    def before_update(self, loss: Tensor) -> None:
        """The last line before parameters change: every gradient has been seen."""
        if self.on_update is not None:
            self.on_update(loss)

    # Behind the lines

    def take_counters(self) -> Counters:
        """What was counted since the last call."""
        counted, self.counters = self.counters, Counters()
        return counted

    def finish(self) -> None:
        """Wait until the pool has done all of a step, and raise what was raised there, whoever reads its results."""
        if self._last is not None:
            wait([self._last])  # one thread: what was handed over before is done, too
            self._last = None
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    def settle(self) -> None:
        """Bring a step to its end that all ranks have left at the same line: nothing of it goes on afterwards."""
        if self._last is not None:
            wait([self._last])
        self.transport.settle()
        self._last, self._failures = None, []
        self.take_counters()

    def drop(self) -> None:
        """Leave a step alone in which something was raised: what goes on of it touches nothing that is used again."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._last, self._failures = None, []
        self.forget_buffers()
        self.take_counters()

    def forget_buffers(self) -> None:
        """Give back the memory of lines that will not run again. No line may be running."""
        self._buffers.clear()
        self._slots.clear()

    def close(self) -> None:
        """End the pool's thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _launch(self, name: str, kind: str, value: Tensor, ranks: int, level: str, how: str, lane: str) -> Flight:
        key = (kind, level)
        self.counters.payload_bytes[key] = self.counters.payload_bytes.get(key, 0) + value.nbytes
        if kind == "all_reduce":
            return Flight(name, value, self.transport.all_reduce(value, level, lane, how))
        if kind == "broadcast":
            return Flight(name, value, self.transport.broadcast(value, 0, level, lane))
        if kind == "all_gather":
            out = self._buffer(name, ranks * value.numel(), value.dtype, value.device)
            return Flight(name, out, self.transport.all_gather(value, out, level, lane))
        assert kind == "reduce_scatter", f"unknown collective {kind}"
        out = self._buffer(name, value.numel() // ranks, value.dtype, value.device)
        return Flight(name, out, self.transport.reduce_scatter(value, out, level, lane))

    def _then(self, run: Callable[..., Tensor], *values: Tensor | OnHost) -> Tensor | OnHost:
        """Do it now, or on the pool behind what makes the values."""
        if any(isinstance(value, OnHost) for value in values):
            return OnHost(self._submit(lambda: run(*map(_now, values))))
        return run(*values)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        # One thread: what is submitted runs in order, so collectives leave in the same order on every rank.
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fxcomp-pool")
        work = as_caller_computes(work if self.watch_pool is None else self.watch_pool(work))
        failures = self._failures

        def run() -> T:
            try:
                return work()
            except BaseException as error:
                failures.append(error)
                raise

        future = self._last = self._pool.submit(run)
        return future

    def _buffer(
        self, name: str, elements: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> Tensor:
        key = (name, elements, dtype)  # another capture may use the name for another size
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(elements, dtype=dtype, device=device, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer


def _now(value: Tensor | OnHost) -> Tensor:
    return value.future.result() if isinstance(value, OnHost) else value


def _have_kernel(*values: Tensor) -> bool:
    """Whether values are what kernels take."""
    size = values[0].numel()
    return all(
        v.dtype is torch.float32 and v.numel() == size and v.is_contiguous() and kernels.can_run_on(v) for v in values
    )


def _is_finite(value: Tensor) -> bool:
    if _have_kernel(value):
        return bool(kernels.run("fxcomp_all_finite", value, value.numel()))
    return bool(value.isfinite().all())


def _finish(flight: Flight) -> Tensor:
    flight.work.wait()
    return flight.output
