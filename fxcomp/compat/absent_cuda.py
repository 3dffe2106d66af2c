"""Replacements of torch.cuda, torch.accelerator and related modules for an absent GPU.

The file that calls a function determines the result:

    user's or library's     from the table `_answers`; an error if there is no entry
    torch's                 from torch, or from the table if torch raises
    fxcomp's                from torch

Streams and events do nothing, memory figures are 0, and CUDA's random generator is the CPU's.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
# Replacement functions keep the original arguments.
# ruff: noqa: ARG002, ARG005

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.cuda import gds, nccl, nvtx, profiler, tunable

from fxcomp.compat.source_lines import is_ours, is_scripts, users_line

CUDA = torch.device("cuda", 0)
"""Device of every CUDA tensor, as scripts see it."""

VERSIONS = {torch.backends.cudnn: 92000, nccl: (2, 29, 7)}
"""cuDNN and NCCL versions that torch 2.13 for CUDA 13.0 reports."""

Refusal = Callable[[str], Exception]
"""Function that makes an exception from its message."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a GPU that torch.cuda reports."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int


def names_cuda(given: Any) -> bool:
    """Return whether a device, string or index means CUDA."""
    if isinstance(given, str):
        return given.partition(":")[0] == "cuda"
    return given.type == "cuda" if isinstance(given, torch.device) else type(given) is int


def check_index(given: Any, refusal: Refusal) -> None:
    """Raise `refusal(message)` for a CUDA index above 0."""
    index = torch.device(given).index if isinstance(given, str) and names_cuda(given) else given
    index = given.index if isinstance(given, torch.device) else index
    if isinstance(index, int) and index > 0:
        raise refusal(
            f"CUDA error: invalid device ordinal. {users_line()} uses the GPU with index {index}, but each rank has one"
            " GPU.\n  Use cuda:0 or the rank's LOCAL_RANK, which is 0."
        )


class Event:
    cuda_stream = stream_id = priority = device_index = cuda_event = event_id = 0
    device = CUDA

    def __init__(self, *_: Any, **__: Any): ...

    def __enter__(self) -> Event:
        return self

    def __exit__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    record = wait = wait_event = wait_stream = synchronize = __exit__


class Stream(Event):
    priority_range = staticmethod(lambda: (0, -5))


class _Properties(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{users_line()} reads {name!r} of {self.name}, which --device does not know. It knows"
            f" {', '.join(vars(self))}.\n  Do not use it in job() and the loss, or use getattr with a default."
        )


# fmt: off
_NONE = (
    "init", "synchronize", "empty_cache", "empty_host_cache", "ipc_collect", "set_device", "set_device_index",
    "set_device_idx", "set_stream", "set_sync_debug_mode", "set_per_process_memory_fraction",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "range_end", "mark", "start", "stop", "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats", "preferred_linalg_library", "preferred_blas_library", "_sleep",
    "_record_memory_history", "_dump_snapshot", "_set_allocator_settings",
)
_ZERO = (
    "current_device", "current_device_index", "current_device_idx", "max_memory_allocated", "max_memory_reserved",
    "max_memory_cached", "memory_allocated", "memory_reserved", "memory_cached", "memory_usage", "device_memory_used",
    "utilization", "temperature", "power_draw", "clock_rate", "get_sync_debug_mode", "range_push", "range_pop",
    "range_start",
)
_TEXT = ("memory_summary", "list_gpu_processes", "get_gencode_flags")
_TRUE = ("is_available", "is_initialized", "is_built", "is_flash_attention_available")
_FALSE = ("is_current_stream_capturing", "can_device_access_peer")
_COUNTS = ("memory_stats", "memory_stats_as_nested_dict", "host_memory_stats", "host_memory_stats_as_nested_dict")
_CONTEXTS = ("device", "device_of", "device_index", "stream", "StreamContext")
# fmt: on


def _answers(facts: DeviceFacts) -> dict[str, Callable[..., Any]]:
    major, minor = facts.capability
    properties = _Properties(
        name=facts.name, major=major, minor=minor, total_memory=facts.memory_bytes, warp_size=32,
        multi_processor_count=facts.multiprocessors, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip
    constants: dict[str, Any] = {
        **dict.fromkeys(_NONE), **dict.fromkeys(_ZERO, 0), **dict.fromkeys(_TEXT, ""),
        **dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False),
        **dict.fromkeys(("mem_get_info", "get_memory_info"), (facts.memory_bytes, facts.memory_bytes)),
        "device_count": 1, "current_accelerator": torch.device("cuda"), "get_device_name": facts.name,
        "get_device_capability": facts.capability, "get_device_properties": properties, "memory_snapshot": [],
        "get_arch_list": [f"sm_{major}{minor}"], "is_tf32_supported": major >= 8, "get_allocator_backend": "native",
        "get_per_process_memory_fraction": 1.0,
    }  # fmt: skip
    return {
        **{name: lambda *_, value=value, **__: value for name, value in constants.items()},
        **dict.fromkeys(_COUNTS, lambda device=None: defaultdict(int)),
        **dict.fromkeys(_CONTEXTS, lambda *_, **__: nullcontext()),
        **dict.fromkeys(("current_stream", "default_stream"), Stream),
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all"), lambda seed: torch.default_generator.manual_seed(seed) and None
        ),
        **dict.fromkeys(("seed", "seed_all"), lambda: torch.default_generator.seed() and None),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state": lambda new_state, device=None: torch.default_generator.set_state(new_state) and None,
        "set_rng_state_all": lambda new_states: torch.default_generator.set_state(new_states[0]) and None,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
    }


def cuda_instead(facts: DeviceFacts, refusal: Refusal) -> dict[Any, dict[str, Any]]:
    """Map modules, such as torch.cuda, to replacement attributes."""
    cuda, answers, public = vars(torch.cuda), _answers(facts), torch.cuda.__all__

    def answering(name: str, original: Any, answer: Any, of: str = "torch.cuda") -> Callable[..., Any]:
        return _answering(name, original, answer, refusal, of)

    here = {name: answering(name, cuda[name], answers.get(name)) for name in public if _acts(cuda[name])}
    here |= {name: getattr(torch, name) for name in public if name.endswith("Tensor")}
    here |= {"Stream": Stream, "Event": Event, "default_generators": (torch.default_generator,)}
    made: dict[Any, dict[str, Any]] = {torch.cuda: here}
    for part in (cuda[name] for name in ("memory", "random", "streams", "graphs")):  # re-exported by torch.cuda
        made[part] = {name: value for name, value in here.items() if vars(part).get(name, part) is cuda[name]}
    for part in (nvtx, profiler, nccl, gds, tunable, torch.accelerator, torch.backends.cudnn, torch.backends.cuda):
        names = [name for name in answers if hasattr(part, name)]
        made[part] = {name: answering(name, getattr(part, name), answers[name]) for name in names}
    for part, version in VERSIONS.items():
        made[part]["version"] = answering("version", part.version, lambda value=version: value)
    for part in (torch.cuda, torch.cuda.memory, nccl, gds, tunable):  # functions not in __all__
        own = {name: each for name, each in vars(part).items() if isinstance(each, FunctionType)}
        rest = {name: each for name, each in own.items() if each.__module__ == part.__name__ and name not in made[part]}
        made[part] |= {name: answering(name, each, answers.get(name), part.__name__) for name, each in rest.items()}
    find = torch.get_device_module
    found = answering("get_device_module", find, lambda device=None: torch.cuda if device is None else find(device))
    kinds = {each.__name__: answering(each.__name__, getattr(torch, each.__name__), each) for each in (Stream, Event)}
    return {**made, torch: {"get_device_module": found, **kinds}, torch.version: {"cuda": torch.version.cuda or "13.0"}}


def _acts(value: Any) -> bool:
    """Return whether an attribute of torch.cuda needs the GPU."""
    return callable(value) and not (isinstance(value, type) and issubclass(value, (Exception, torch.TypedStorage)))


def _answering(name: str, original: Any, answer: Any, refusal: Refusal, of: str) -> Callable[..., Any]:
    """Return a function that calls `original` or `answer`, depending on the calling file."""
    code = getattr(original, "__code__", None)
    takes_device = name == "device" or (code is not None and code.co_varnames[:1] == ("device",))

    def respond(asker: FrameType, args: Any, kwargs: Any) -> Any:
        if is_scripts(asker) and answer is None:
            raise refusal(
                f"{of}.{name} is called at {users_line()}, which --device does not imitate for a GPU that is not"
                " here.\n  Do not use it in job() and the loss: it has no part in the captured step."
            )
        if is_scripts(asker):
            check_index(kwargs.get("device", args[0] if args and takes_device else None), refusal)
            return answer(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except (AssertionError, AttributeError, RuntimeError):
            if answer is None or is_ours(asker):
                raise
            return answer(*args, **kwargs)

    if isinstance(original, type):  # annotations use the class
        return type(name, (), {"__new__": lambda _, *args, **kwargs: respond(sys._getframe(1), args, kwargs)})
    return lambda *args, **kwargs: respond(sys._getframe(1), args, kwargs)
