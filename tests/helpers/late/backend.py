"""Make the late device known to torch: its tensors, its operators, and a module like `torch.cuda`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from helpers.late.build import library
from helpers.late.machine import DEVICES, MACHINE, Job, Machine
from helpers.late.memory import new_tensor, on_host

NAME = "late"
DEVICE = f"{NAME}:1"
"""The one that tests train on; the other is the current one."""

_libraries: list[torch.library.Library] = []


def is_late(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# What C++ asks


_TYPES: dict[str, tuple[Any, ...]] = {
    "record": (None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    "block": (None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    "is_over": (ctypes.c_int, ctypes.c_int64),
    "wait_for": (None, ctypes.c_int64),
    "forget": (None, ctypes.c_int64),
    "wait_for_stream": (None, ctypes.c_int64, ctypes.c_int),
    "wait_for_device": (None, ctypes.c_int),
    "is_idle": (ctypes.c_int, ctypes.c_int64, ctypes.c_int),
    "elapsed_ms": (ctypes.c_double, ctypes.c_int64, ctypes.c_int64),
    "used_on": (None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    "allocate": (ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64),
    "release": (None, ctypes.c_int64),
}


class _Calls(ctypes.Structure):
    _fields_ = [(name, ctypes.CFUNCTYPE(*types)) for name, types in _TYPES.items()]


def _answers(machine: Machine) -> dict[str, Callable[..., Any]]:
    events = machine.events

    def wait_for(event: int) -> None:
        mark = events.get(event)
        machine.wait(lambda: mark is None or mark.done, "an event")

    return {
        "record": machine.record,
        "block": machine.block,
        "is_over": lambda event: int(event not in events or events[event].done),
        "wait_for": wait_for,
        "forget": lambda event: events.pop(event, None) and None,
        "wait_for_stream": lambda stream, device: machine.wait_for_lane(machine.lane(device, stream), "a stream"),
        "wait_for_device": machine.wait_for_device,
        "is_idle": lambda stream, device: int(not machine.lane(device, stream).jobs),
        "elapsed_ms": lambda first, last: 1e3 * (events[last].at_s - events[first].at_s),
        "used_on": machine.used_on,
        "allocate": machine.allocate,
        "release": machine.free,
    }


# What Python asks


class LateModule(ModuleType):
    """`torch.late`, which has what the product uses of `torch.cuda`."""

    Event = functools.partial(torch.Event, NAME)

    def __init__(self, guard: ctypes.CDLL) -> None:
        super().__init__("torch.late")
        self._guard = guard

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=_device(device), priority=priority)

    def current_stream(self, device: Any = None) -> torch.Stream:
        index = self.index(device)
        return torch.Stream(stream_id=self._guard.late_current_stream(index), device_index=index, device_type=20)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Generator[None]:
        if stream is None:
            yield
            return
        index, device = stream.device.index, self.current_device()
        before = self._guard.late_current_stream(index)
        self._guard.late_set_current_device(index)
        self._guard.late_set_current_stream(index, stream.stream_id)
        try:
            yield
        finally:
            self._guard.late_set_current_stream(index, before)
            self._guard.late_set_current_device(device)

    def index(self, device: Any = None) -> int:
        index = _device(device).index
        return self.current_device() if index is None else index

    def current_device(self) -> int:
        return self._guard.late_current_device()

    def set_device(self, device: Any) -> None:
        self._guard.late_set_current_device(self.index(device))

    def device_count(self) -> int:
        return DEVICES

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Have no generator."""
        del seed

    def synchronize(self, device: Any = None) -> None:
        MACHINE.wait_for_device(self.index(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _device(device: Any) -> torch.device:
    return torch.device(NAME if device is None else f"{NAME}:{device}" if isinstance(device, int) else device)


# Operators


def enqueue(run: Callable[[], Any], device: int) -> Job:
    """Give work to the current stream of a device."""
    return MACHINE.give(device, torch.late.current_stream(device).stream_id, Job(run))


def empty(size: Sequence[int], dtype: Any, device: Any, stride: Sequence[int] | None = None) -> Tensor:
    index = torch.late.index(device)
    return new_tensor(MACHINE, size, dtype or torch.get_default_dtype(), index, stride)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    stride = None
    if memory_format not in (None, torch.contiguous_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return empty(size, dtype, device, stride)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return empty(size, dtype, device, stride)


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or device and host: the host waits unless its memory is pinned and it would not."""
    device = (to if is_late(to) else source).device.index
    target, given = (on_host(MACHINE, each) if is_late(each) else each for each in (to, source))
    job = enqueue(lambda: target.copy_(given), device)
    host = next((each for each in (to, source) if not is_late(each)), None)
    if host is not None and not (non_blocking and host.is_pinned()):
        MACHINE.wait(lambda: job.done, "a copy of pageable memory" if non_blocking else "a copy")
    return to


def _record_stream(value: Tensor, stream: torch.Stream) -> None:
    MACHINE.used_on(value.untyped_storage().data_ptr(), stream.stream_id, stream.device.index)


def _item(value: Tensor) -> Any:
    job = enqueue(lambda: None, value.device.index)
    MACHINE.wait(lambda: job.done, "item")
    return on_host(MACHINE, value).item()


def _shape_is_known(op: Any, args: Any, kwargs: Any) -> Any:
    """The results' shapes, from torch's own functions for them."""

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    with torch.no_grad():
        return op(*pytree.tree_map(meta, args), **pytree.tree_map(meta, kwargs))


_READS = {
    *(torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default, torch.ops.aten.equal.default),
    *(torch.ops.aten._unique2.default, torch.ops.aten.unique_dim.default),
}
"""Operators whose result the host must know."""


def run_late(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Give an operator to the current stream; its results' memory is taken at once."""
    args = tuple(
        torch.tensor(each) if place in _tensors_of(op) and isinstance(each, int | float) else each
        for place, each in enumerate(args)
    )
    flat, spec = pytree.tree_flatten((args, kwargs))
    index = next((each.device.index for each in flat if is_late(each)), None)
    if index is None:
        index = next(torch.late.index(each) for each in flat if isinstance(each, torch.device))

    _give_memory(op, args, kwargs, index)

    def here(value: Any) -> Any:
        if is_late(value):
            return on_host(MACHINE, value)
        if isinstance(value, Tensor):  # a number, or what CUDA would copy
            assert value.dim() == 0, f"{op} is given memory of the host and of the device"
            return value.clone()
        return torch.device("cpu") if isinstance(value, torch.device) else value

    cpu_args, cpu_kwargs = pytree.tree_unflatten([here(each) for each in flat], spec)
    if op in _READS:
        job = enqueue(lambda: None, index)
        MACHINE.wait(lambda: job.done, str(op))
        result = op(*cpu_args, **cpu_kwargs)
        return pytree.tree_map_only(Tensor, lambda each: each.to(f"{NAME}:{index}"), result)
    returns = op._schema.returns
    changed = [_changed(op, each, args, kwargs) for each in returns]
    if all(each is not None for each in changed):
        enqueue(lambda: op(*cpu_args, **cpu_kwargs), index)
        return changed[0] if len(changed) == 1 else tuple(changed) if changed else None
    shapes = _shape_is_known(op, args, kwargs)
    shapes = (shapes,) if len(returns) == 1 else shapes
    made = [
        pytree.tree_map_only(Tensor, lambda each: empty(each.shape, each.dtype, index, each.stride()), shape)
        if given is None
        else given
        for shape, given in zip(shapes, changed, strict=True)
    ]
    places = [
        pytree.tree_map_only(Tensor, lambda each: on_host(MACHINE, each), each) if given is None else None
        for each, given in zip(made, changed, strict=True)
    ]

    def run() -> None:
        results = op(*cpu_args, **cpu_kwargs)
        for place, result in zip(places, (results,) if len(returns) == 1 else results, strict=True):
            for to, value in zip(pytree.tree_leaves(place), pytree.tree_leaves(result), strict=False):
                if isinstance(to, Tensor):
                    to.copy_(value)

    enqueue(run, index)
    return made[0] if len(made) == 1 else tuple(made)


@functools.cache
def _tensors_of(op: Any) -> frozenset[int]:
    """The arguments that are tensors, by their places: numbers come in some of them."""
    places = enumerate(op._schema.arguments)
    return frozenset(place for place, each in places if isinstance(each.type, torch.TensorType))


def _give_memory(op: Any, args: Any, kwargs: Any, index: int) -> None:
    """Give empty results that an operator fills the memory that they need: it would make room itself."""
    outs = [each.name for each in op._schema.arguments if each.kwarg_only and each.alias_info is not None]
    if any(is_late(kwargs.get(name)) and kwargs[name].numel() == 0 for name in outs):
        shapes = _shape_is_known(op, args, kwargs)
        for name, shape in zip(outs, (shapes,) if len(outs) == 1 else shapes, strict=True):
            kwargs[name].set_(empty(shape.shape, shape.dtype, index, shape.stride()))


def _changed(op: Any, returned: Any, args: Any, kwargs: Any) -> Any:
    """The argument that an operator returns, changed."""
    if returned.alias_info is None:
        return None
    names = returned.alias_info.before_set
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == names:
            return kwargs.get(argument.name) if argument.kwarg_only else args[place]
    raise AssertionError(f"{op} returns an alias of nothing")


_AS_ON_CPU = (
    "as_strided",
    "view",
    "_reshape_alias",
    "set_.source_Storage_storage_offset",
    "unfold",
    "set_.source_Tensor",
)
"""Their kernels for the CPU change what a tensor says of itself, and touch no memory."""


def _as_on_cpu(op: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def start() -> Machine:
    """Make the device known to torch, in this process."""
    if _libraries:
        return MACHINE
    guard = library()
    answers = _answers(MACHINE)
    calls = _Calls(**{name: dict(_Calls._fields_)[name](answers[name]) for name in _TYPES})
    start.kept = guard, calls  # C++ calls them as long as there is a process
    guard.late_current_stream.restype = ctypes.c_int64
    guard.late_set_current_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    guard.late_begin(ctypes.byref(calls))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, LateModule(guard))
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    aten = torch.library.Library("aten", "IMPL", "PrivateUse1")
    aten.impl("empty.memory_format", _empty)
    aten.impl("empty_strided", _empty_strided)
    aten.impl("copy_", _copy)
    aten.impl("_local_scalar_dense", _item)
    aten.impl("record_stream", _record_stream)
    for name in _AS_ON_CPU:
        packet, _, overload = name.partition(".")
        aten.impl(name, _as_on_cpu(getattr(getattr(torch.ops.aten, packet), overload or "default")))
    others = torch.library.Library("_", "IMPL")
    others.fallback(run_late, "PrivateUse1")
    _libraries.extend((aten, others))
    MACHINE.start()
    return MACHINE


@contextmanager
def schedule(seed: int) -> Generator[Machine]:
    """Run what is inside by one schedule, to its end."""
    machine = start()
    machine.begin(seed)
    yield machine
    machine.drain()
