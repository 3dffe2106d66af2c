"""Checks of a GPU that is not here, run in a process of their own: they patch torch widely.

python -m tests.helpers.imagined      prints what each check raised, as JSON by its name
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch._dynamo  # it patches torch where it is imported
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch._prims_common import is_cpu_scalar_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

import fxcomp
from fxcomp import compat
from fxcomp.capture.batch_type import batch_type
from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.cost.devices import preset_named
from fxcomp.errors import FxcompError, Unsupported
from fxcomp.frontends.what_if import WhatIf, capture_job, imagining, rewritten, what_if
from fxcomp.pipeline import Compiler
from fxcomp.planning.device_use import device_use
from fxcomp.search.choose import uniform

CUDA = torch.device("cuda", 0)
FACTS = preset_named("h100").facts
CHECKS: dict[str, Callable[[], None]] = {}
WHERE = Cluster.parse("2x1", intra=Link.parse("100gbit"), inter=Link.parse("10gbit"))


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check."""
    CHECKS[function.__name__] = function
    return function


def job_file(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check that runs as a job file does."""

    def run() -> None:
        with imagining("h100"):
            function()

    CHECKS[function.__name__] = run
    return run


# Devices of tensors


@job_file
def a_script_sees_cuda_and_torch_and_fxcomp_the_real_device() -> None:
    for x in (torch.zeros(()), torch.zeros((), device="cuda"), nn.Parameter(torch.zeros(()))):
        assert x.device == CUDA
        assert x.device.type == "cuda"
        assert x.is_cuda
        assert not x.is_cpu
        assert x.get_device() == 0
        assert is_cpu_scalar_tensor(x)  # a file of torch's
    kind, _ = batch_type(torch.zeros(2))  # a file of fxcomp's
    assert kind.leaves[0].device == "cpu"
    on_meta = torch.zeros(2, device="meta")
    assert on_meta.device == CUDA
    assert on_meta.is_meta
    assert batch_type(on_meta)[0].leaves[0].device == "meta"


@job_file
def every_form_of_a_device_is_taken() -> None:
    x, layer = torch.zeros(2, 3), nn.Linear(3, 3)
    devices: tuple[Any, ...] = ("cuda", "cuda:0", torch.device("cuda"), CUDA, 0)
    for device in devices:
        made = (
            *(torch.empty(2, device=device), torch.tensor([1.0], device=device), torch.arange(3, device=device)),
            *(torch.zeros_like(x, device=device), x.new_ones(2, device=device), torch.as_tensor([1], device=device)),
            *(torch.rand(2, device=device, dtype=torch.half), torch.randperm(3, device=device)),
            *(x.to(device), x.to(device, torch.half), x.to(device=device, non_blocking=True), x.cuda(device)),
            *(layer.to(device).weight, copy.deepcopy(layer).cuda(device).weight),
            *(nn.Linear(3, 3, device=device).weight, x.pin_memory().to(device, non_blocking=True)),
        )
        assert all(each.device == CUDA for each in made)
    assert torch.device(0) == torch.device(torch.cuda.current_device()) == CUDA
    assert torch.device("cpu").type == torch.device(type="cpu").type == "cpu"
    assert torch.empty(2, pin_memory=True).shape == (2,)
    assert x.cuda().cuda(non_blocking=True).shape == (2, 3)
    assert x.to(torch.half).dtype is torch.half
    assert x.to(torch.ones(1).double()).dtype is torch.double
    assert x.type("torch.cuda.DoubleTensor").dtype is torch.double
    assert isinstance(x, torch.cuda.FloatTensor)
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, 3)])
    assert packed.to("cuda").data.is_cuda
    assert packed.cuda().data.is_cuda


@job_file
def lazy_modules_move_before_their_first_call() -> None:
    for move in (lambda lazy: lazy.cuda(), lambda lazy: lazy.to("cuda"), lambda lazy: lazy.to(CUDA).half().float()):
        model = move(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
        assert model[0].weight.is_cuda
        assert model(torch.zeros(2, 4, device="cuda")).is_cuda
        assert model[0].weight.shape == (3, 4)


@job_file
def the_index_of_a_gpu_that_is_not_there_is_refused() -> None:
    x = torch.zeros(2)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.cuda(3), lambda: x.to("cuda:3"), lambda: x.to(torch.device("cuda", 3)), lambda: x.to(3),
        lambda: torch.zeros(2, device="cuda:3"), lambda: torch.zeros(2, device=3), lambda: nn.Linear(2, 2).cuda(3),
        lambda: nn.Linear(2, 2).to("cuda:3"), lambda: nn.Linear(2, 2).to(3), lambda: torch.cuda.set_device(3),
        lambda: torch.cuda.get_device_name(3), lambda: torch.cuda.get_device_properties("cuda:3"),
        lambda: torch.cuda.device(3), lambda: torch.cuda.synchronize(device=3), lambda: torch.Generator("cuda:3"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(Unsupported, match=r"invalid device ordinal.*imagined.py:\d+.*\n.*Use cuda:0"):
            call()


@job_file
def a_move_copies_the_hosts_tensors_and_leaves_parameters() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert x.cuda().data_ptr() != x.data_ptr()
    assert x[:, :-1].cuda().is_contiguous()
    parameter = nn.Parameter(x)
    assert parameter.cuda() is parameter
    assert parameter.to("cuda") is parameter


@job_file
def a_tensor_without_memory_stays_without() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    assert model.cuda().weight.is_meta
    assert model.to("cuda").weight.is_meta
    assert model.weight.device == CUDA
    assert torch.zeros_like(model.weight, device="cuda").is_meta
    assert not torch.zeros(3, device="cuda").is_meta
    assert model.to_empty(device="cuda").weight.is_meta
    assert (model.weight * torch.ones(3, 3, device=model.weight.device)).is_meta
    assert model(model.weight).is_meta


@job_file
def default_devices_work() -> None:
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        assert torch.get_default_device() == CUDA
        with torch.device("cpu"):
            assert torch.get_default_device() == torch.device("cpu")
    torch.set_default_device("cuda")
    assert torch.zeros(3).is_cuda
    assert torch.tensor([1]).is_cuda
    assert torch.get_default_device() == CUDA
    with torch.device("meta"):
        assert torch.zeros(3).is_meta


@job_file
def generators_and_files_of_cuda_work() -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.randn(3, generator=generator, device="cuda").is_cuda
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    drawn = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(before)
    assert torch.equal(drawn, torch.rand(2, device="cuda"))
    with torch.random.fork_rng(devices=[0]):
        torch.rand(2)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    saved = io.BytesIO()
    torch.save({"a": torch.ones(2, device="cuda")}, saved)
    places: tuple[Any, ...] = (None, "cuda", "cuda:0", CUDA, {"cuda:1": "cuda:0"}, lambda s, _: s.cuda(0), "cpu")
    for place in places:
        saved.seek(0)
        assert torch.load(saved, map_location=place)["a"].sum() == 2


# torch.cuda

ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available()": True,
    "torch.cuda.is_initialized()": True,
    "torch.cuda.init()": None,
    "torch.cuda.device_count()": 1,
    "torch.cuda.current_device()": 0,
    "torch.cuda.set_device(0)": None,
    "torch.cuda.set_device('cuda:0')": None,
    "torch.cuda.get_device_name()": FACTS.name,
    "torch.cuda.get_device_name(0)": FACTS.name,
    "torch.cuda.get_device_capability()": (9, 0),
    "torch.cuda.get_device_properties(0).total_memory": FACTS.memory_bytes,
    "torch.cuda.get_device_properties('cuda').multi_processor_count": 132,
    "torch.cuda.get_device_properties(0).major": 9,
    "torch.cuda.get_arch_list()": ["sm_90"],
    "torch.cuda.is_bf16_supported()": True,
    "torch.cuda.is_tf32_supported()": True,
    "torch.cuda.mem_get_info()": (FACTS.memory_bytes, FACTS.memory_bytes),
    "torch.cuda.synchronize()": None,
    "torch.cuda.empty_cache()": None,
    "torch.cuda.ipc_collect()": None,
    "torch.cuda.memory_allocated()": 0,
    "torch.cuda.max_memory_allocated('cuda')": 0,
    "torch.cuda.memory.max_memory_allocated()": 0,
    "torch.cuda.memory_reserved()": 0,
    "torch.cuda.max_memory_reserved()": 0,
    "torch.cuda.memory_stats()['allocated_bytes.all.peak']": 0,
    "torch.cuda.memory_summary()": "",
    "torch.cuda.memory_snapshot()": [],
    "torch.cuda.reset_peak_memory_stats()": None,
    "torch.cuda.set_per_process_memory_fraction(0.5)": None,
    "torch.cuda.utilization()": 0,
    "torch.cuda.manual_seed(1)": None,
    "torch.cuda.manual_seed_all(1)": None,
    "torch.cuda.random.manual_seed(7)": None,
    "torch.cuda.initial_seed()": 7,
    "torch.cuda._sleep(1000)": None,
    "torch.cuda.memory._record_memory_history(max_entries=100)": None,
    "torch.cuda.memory._dump_snapshot('trace.pickle')": None,
    "torch.zeros(2).type()": "torch.cuda.FloatTensor",
    "torch.zeros(2).cuda().type(torch.half).type()": "torch.cuda.HalfTensor",
    "torch.get_device(torch.zeros(2))": 0,
    "getattr(torch.cuda.get_device_properties(0), 'L2_cache_size', None)": None,
    "torch.cuda.seed()": None,
    "torch.cuda.seed_all()": None,
    "torch.cuda.default_generators[0].device.type": "cpu",
    "torch.cuda.is_current_stream_capturing()": False,
    "torch.cuda.current_stream().query()": True,
    "torch.cuda.default_stream().synchronize()": None,
    "torch.cuda.current_stream().wait_stream(torch.cuda.Stream())": None,
    "torch.cuda.Stream(priority=-1).record_event().query()": True,
    "torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event())": 0.0,
    "isinstance(torch.cuda.current_stream(), torch.cuda.Stream)": True,
    "torch.cuda.current_stream().wait_event(torch.cuda.Event())": None,
    "torch.cuda.set_stream(torch.cuda.Stream())": None,
    "torch.cuda.Stream.priority_range()": (0, -5),
    "torch.cuda.current_stream().stream_id": 0,
    "torch.Stream(device='cuda').wait_event(torch.Event('cuda'))": None,
    "torch.zeros(2).record_stream(torch.cuda.current_stream())": None,
    "torch.cuda.nvtx.range_push('forward')": 0,
    "torch.cuda.nvtx.range_pop()": 0,
    "torch.cuda.nvtx.mark('here')": None,
    "torch.cuda.profiler.start()": None,
    "torch.cuda.nccl.version() > (2, 10)": True,
    "torch.cuda.amp.GradScaler().is_enabled()": True,
    "torch.amp.GradScaler().is_enabled()": True,
    "torch.amp.GradScaler('cuda', enabled=False).is_enabled()": False,
    "torch.accelerator.is_available()": True,
    "torch.accelerator.current_accelerator()": torch.device("cuda"),
    "torch.accelerator.device_count()": 1,
    "torch.accelerator.current_device_index()": 0,
    "torch.accelerator.set_device_index(0)": None,
    "torch.accelerator.synchronize()": None,
    "torch.backends.cudnn.is_available()": True,
    "torch.backends.cudnn.version() >= 91501": True,  # from there on, attention is cuDNN's
    "torch.backends.cuda.is_built()": True,
    "torch.backends.cuda.is_flash_attention_available()": True,
    "torch.backends.cuda.preferred_linalg_library('cusolver')": None,
    "torch.backends.cuda.preferred_blas_library('cublaslt')": None,
    "torch.version.cuda >= '13.0'": True,
    "torch.get_device_module() is torch.cuda": True,
    "torch.get_device_module('cuda') is torch.cuda": True,
    "torch.get_device_module('cpu') is torch.cpu": True,
    "issubclass(torch.cuda.OutOfMemoryError, RuntimeError)": True,
    "torch.distributed.is_nccl_available()": True,
    "os.environ['LOCAL_RANK']": "0",
}
"""Expressions of scripts, and their values on an H100."""


@job_file
def names_of_torch_cuda_answer_for_the_device() -> None:
    found = {text: eval(text, {"torch": torch, "os": os}) for text in ANSWERS}
    assert found == ANSWERS, {text: value for text, value in found.items() if value != ANSWERS[text]}


@job_file
def contexts_of_torch_cuda_do_nothing() -> None:
    stream = torch.cuda.Stream()
    contexts = (torch.cuda.device(0), torch.cuda.stream(stream), torch.cuda.nvtx.range("x"), stream)
    for context in (*contexts, torch.cuda.device_of(torch.zeros(2)), torch.cuda.StreamContext(stream)):
        with context:
            pass


@job_file
def names_that_are_imported_answer_too() -> None:
    from torch.cuda import device_count, is_available, manual_seed
    from torch.cuda.memory import max_memory_allocated

    assert device_count() == 1
    assert is_available()
    assert manual_seed(2) is None
    assert max_memory_allocated() == 0


REFUSED = (
    "cudart",
    "_lazy_init",
    "_get_device",
    "CUDAGraph",
    "graph",
    "make_graphed_callables",
    "MemPool",
    "caching_allocator_alloc",
)


@job_file
def other_names_of_torch_cuda_are_refused_by_name() -> None:
    for name in REFUSED:
        with pytest.raises(Unsupported, match=rf"torch\.cuda\.{name} is called at imagined.py:\d+(.|\n)*Do not use it"):
            getattr(torch.cuda, name)()


@job_file
def functions_of_other_modules_of_torch_cuda_are_refused_by_name() -> None:
    for name in ("tunable.enable", "gds.gds_register_buffer", "memory._snapshot", "nccl.all_reduce"):
        with pytest.raises(Unsupported, match=rf"torch\.cuda\.{name} is called at imagined.py:\d+"):
            attrgetter(name)(torch.cuda)()


@job_file
def an_unknown_property_of_the_gpu_is_named() -> None:
    with pytest.raises(
        AttributeError, match=r"imagined.py:\d+ reads 'L2_cache_size' of NVIDIA H100.*\n.*Do not use it"
    ):
        str(torch.cuda.get_device_properties(0).L2_cache_size)


@job_file
def a_thread_of_the_script_sees_the_gpu_too() -> None:
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(lambda: torch.zeros(2, device="cuda") + torch.randn(2, pin_memory=True).cuda()).result()
    assert made.is_cuda


@check
def a_thread_that_outlives_the_scope_sees_torch_as_it_is() -> None:
    with ThreadPoolExecutor(1) as threads:
        with imagining("h100"):
            assert threads.submit(lambda: torch.zeros(2, device="cuda").is_cuda).result()
        with pytest.raises((AssertionError, RuntimeError)):
            threads.submit(lambda: torch.zeros(2, device="cuda")).result()


@job_file
def a_device_mesh_of_one_gpu_is_made() -> None:
    dist.init_process_group("nccl")
    assert init_device_mesh("cuda", (1,), mesh_dim_names=("ranks",)).size() == 1


@job_file
def classes_of_torch_cuda_stay_classes() -> None:
    for name in ("CUDAGraph", "Stream", "Event", "device", "StreamContext", "graph", "MemPool"):
        assert isinstance(getattr(torch.cuda, name), type)
        assert not isinstance(3, getattr(torch.cuda, name) | None)


@job_file
def every_public_call_of_torch_cuda_is_answered_or_refused() -> None:
    foreign: list[str] = []
    for name in torch.cuda.__all__:
        value = getattr(torch.cuda, name)
        if not callable(value) or name.endswith(("Storage", "Tensor")) or isinstance(value, type):
            continue
        try:
            value()
        except (Unsupported, TypeError):  # a TypeError: arguments are missing
            pass
        except Exception as error:
            foreign.append(f"{name}: {type(error).__name__}: {error}")
    assert not foreign, foreign


# Optimizers, scalers, ranks, wrappers


@job_file
def fused_and_capturable_optimizers_take_cuda_and_meta_tensors() -> None:
    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adagrad, {"fused": True}), (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.Adam, {"capturable": True, "foreach": True}), (torch.optim.RMSprop, {"capturable": True}),
    )  # fmt: skip
    for kind, options in kinds:
        for device in ("cuda", "meta"):
            parameter = nn.Parameter(torch.ones(3, device=device))
            optimizer = kind([parameter], lr=0.1, **options)
            if device == "cuda":
                parameter.grad = torch.ones(3, device="cuda")
                optimizer.step()
                assert bool((parameter < 1).all())


@job_file
def optimizers_are_compiled_to_torch_script() -> None:
    scripted = importlib.reload(importlib.import_module("torch.distributed.optim.functional_adam"))
    torch.jit.script(scripted._FunctionalAdam)  # as the import of torch.distributed.optim does
    importlib.reload(importlib.import_module("torch.distributed.optim"))


@job_file
def a_scaled_loop_runs_in_the_job_file() -> None:
    model, scaler = nn.Linear(3, 1).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler.scale(model(torch.ones(2, 3, device="cuda")).mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0


@job_file
def a_process_group_is_a_group_of_one() -> None:
    dist.init_process_group("nccl", init_method="env://", device_id=CUDA)
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    dist.barrier(device_ids=[0])
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, 3)
    group = dist.new_group([0], backend="nccl")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "nccl")
    assert x.tolist() == [1, 1]
    assert gathered == [3]
    assert dist.get_world_size(group) == 1


@job_file
def synchronised_batch_norm_in_a_group_of_one_is_batch_norm() -> None:
    dist.init_process_group("nccl")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).cuda()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(2, 3, 8, 8, device="cuda")
    assert torch.equal(DDP(synchronised, device_ids=[0])(x), plain(x))
    assert torch.equal(synchronised[1].running_mean, plain[1].running_mean)


@job_file
def wrapped_and_compiled_models_call_what_they_wrap() -> None:
    model, x = nn.Linear(3, 3).cuda(), torch.ones(2, 3, device="cuda")
    wrapped = DDP(model, device_ids=[0], output_device=0, find_unused_parameters=True, gradient_as_bucket_view=True)
    assert (wrapped.device, wrapped.device_ids, wrapped.output_device) == (CUDA, [0], 0)
    compiled = torch.compile(wrapped, mode="max-autotune", fullgraph=True)
    with wrapped.no_sync(), wrapped.join():
        assert torch.equal(wrapped(x), model(x))
        assert torch.equal(compiled(x), model(x))
    assert wrapped.module is model
    assert wrapped.train().training
    assert list(wrapped.state_dict()) == [
        "module.weight",
        "module.bias",
    ]
    assert torch.compile(dynamic=True)(len)([1]) == 1
    assert torch.equal(nn.DataParallel(model).cuda()(x), model(x))
    model.compile()
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))


@job_file
def hooks_in_a_backward_pass_see_the_device() -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    seen: list[torch.device] = []
    x.register_hook(lambda gradient: seen.append(torch.zeros(2, device=gradient.device).device))
    (x * 2).sum().backward()
    assert seen == [CUDA]


# In the loss


class Doubled(torch.autograd.Function):
    """Makes a tensor on the device in its backward pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.device == CUDA
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert gradients[0].is_cuda
        assert torch.cuda.is_available()
        return gradients[0] * torch.full((), 2.0, device=gradients[0].device)


def job_of(place: str, loss: Callable[..., Any], **options: Any) -> fxcomp.Job:
    """Make a job of a small model on a place."""
    with torch.device(place):
        model, batch = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)), torch.ones(4, 9)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return fxcomp.Job(model, loss, optimizer, (batch, torch.ones(4, 9, dtype=torch.long)))


def seen_in(place: str) -> None:
    """Predict and dump a job whose loss looks at devices in all ways; the scope is what_if's own, then a job file's."""
    outside = torch.ones(8, device="cpu" if place == "cuda" else place)
    calls: list[str] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch[0][:, :-1].to("cuda", non_blocking=True), batch[1][:, 1:].cuda()
        first = next(model.parameters())
        assert isinstance(x, FakeTensor)
        assert x.device == first.device == CUDA
        assert x.is_cuda
        assert first.device.type == "cuda"
        assert x.get_device() == 0
        assert y.view(-1).shape == (32,), "a copy from the host has no gaps"
        mask = torch.ones(x.shape, device=x.device) + torch.zeros(8, device="cuda") + x.new_zeros(8, device=CUDA)
        mask = mask + torch.arange(8, device=torch.device("cuda", torch.cuda.current_device())) * 0 + outside
        assert mask.device == CUDA
        assert torch.tensor([1.0], device=0).is_cuda
        assert outside.is_cuda
        hidden = torch.utils.checkpoint.checkpoint(model, x * mask, use_reentrant=False)
        assert hidden.device == CUDA
        assert hidden.requires_grad
        assert hidden.detach().is_cuda
        hidden.register_hook(lambda gradient: gradient * torch.ones(8, device=gradient.device))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("loss"), torch.device("cuda"):
            scale = torch.ones(8)
        assert torch.cuda.get_device_capability() == (9, 0)
        assert not torch.are_deterministic_algorithms_enabled()
        calls.append(place)
        return Doubled.apply(hidden * scale).square().mean()

    for each in (what_if, rewritten):
        where: Any = (WhatIf(device="h100"),) if each is what_if else (None, "h100")
        each(job_of("cpu" if place == "cuda" else place, loss), WHERE, *where)
        with imagining("h100"):
            each(job_of(place, loss, fused=True), WHERE, *where)
    assert len(calls) == 4


@check
def a_loss_sees_the_device_of_plain_tensors() -> None:
    seen_in("cuda")


@check
def a_loss_sees_the_device_of_tensors_without_memory() -> None:
    seen_in("meta")


@job_file
def adapters_on_the_gpu_train_beside_a_model_without_memory() -> None:
    with torch.device("meta"):
        base = nn.Linear(8, 8).requires_grad_(False)
    adapter = nn.Linear(8, 8, device="cuda")
    model = nn.ModuleList([base, adapter])
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return (model[0](batch) + model[1](batch)).square().mean()

    assert what_if(fxcomp.Job(model, loss, optimizer, torch.ones(2, 8)), WHERE, WhatIf(device="h100")).plan


def refused_in_loss(compute: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Return the error of a job whose loss computes something of the model's result."""
    with pytest.raises(FxcompError) as caught:
        what_if(job_of("cuda", lambda model, batch: compute(model(batch[0][:, 1:]))), WHERE, WhatIf(device="h100"))
    return str(caught.value)


@job_file
def a_loss_that_cuda_refuses_is_told_what_to_do() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, 4, 8)
        return flex_attention(q, q, q).sum()

    def compare(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            return nn.functional.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))

    assert "flex_attention is called at imagined.py" in refused_in_loss(attend)
    assert "Use binary_cross_entropy_with_logits" in refused_in_loss(compare)


@job_file
def a_loss_may_use_what_only_cuda_computes_and_write_before_it_reads_a_constant() -> None:
    weight = torch.ones(8).cuda()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0][:, 1:].clone()
        x[:, :4] = 0
        counts = torch.histc(batch[1].int(), bins=4, min=0, max=3)  # of whole numbers on CUDA alone
        return model(x.mul_(weight)).square().mean() + counts.float().sum()

    assert what_if(job_of("cuda", loss), WHERE, WhatIf(device="h100")).plan


class _Counting(TorchFunctionMode):
    """Counts the calls that it sees."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@check
def passes_run_past_the_function_modes_around_them() -> None:
    job = job_of("cpu", lambda model, batch: model(batch[0][:, 1:]).square().mean())
    _, captured = capture_job(job, "h100")
    counting, compiler, costs = _Counting(), Compiler(WHERE), preset_named("h100").costs(())
    with counting:
        plan = uniform("dense", compiler.analyze(captured.graph, costs), costs, WHERE)
        device_use(compiler, captured, {"dense": plan}, costs, preset_named("h100"), is_fused=False)
    assert counting.seen == 0


@job_file
def a_loss_may_use_the_wrapper_the_group_and_the_default_device() -> None:
    torch.set_default_device("cuda")
    dist.init_process_group("nccl")
    model = nn.Linear(8, 8)
    wrapped = torch.compile(DDP(torch.compile(model), device_ids=[0]))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    calls: list[int] = []

    def loss(given: Any, batch: torch.Tensor) -> torch.Tensor:
        assert torch.get_default_device() == CUDA
        assert torch.zeros(2).is_cuda
        assert given.module.weight.is_cuda
        assert dist.get_rank() == 0
        calls.append(1)
        return (wrapped(batch) + given(batch)).square().mean() / dist.get_world_size()

    job = fxcomp.Job(wrapped, loss, optimizer, torch.ones(2, 8))
    assert what_if(job, WHERE, WhatIf(device="h100")).workload.sizes.keys() == {"weight", "bias"}
    assert rewritten(job, WHERE, None, "h100").source
    assert len(calls) == 2


@job_file
def optimizers_of_every_kind_are_captured() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0][:, :-1]).square().mean()

    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"capturable": True}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}), (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.RMSprop, {"capturable": True, "foreach": True}),
    )  # fmt: skip
    for kind, options in kinds:
        for place in ("cuda", "meta"):
            job = job_of(place, loss)
            optimizer = kind(job.model.parameters(), lr=0.1, **options)
            program = rewritten(fxcomp.Job(job.model, loss, optimizer, job.batch), WHERE, None, "h100")
            reads = [node for node in program.graph.graph.nodes if "_local_scalar_dense" in str(node.target)]
            # Adagrad has no capturable variant: its counter is read.
            assert not reads or kind is torch.optim.Adagrad, f"{kind.__name__} of {place}, {options}: {reads}"


@job_file
def a_job_with_a_scaler_is_predicted_with_the_step_that_checks_gradients() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0][:, :-1]).square().mean()

    for place in ("cuda", "meta"):
        plain = job_of(place, loss)
        scaler = torch.amp.GradScaler("cuda")
        job = fxcomp.Job(plain.model, loss, plain.optimizer, plain.batch, scaler=scaler)
        assert "all_finite" in rewritten(job, WHERE, None, "h100").source
        assert "all_finite" not in rewritten(plain, WHERE, None, "h100").source
        assert what_if(job, WHERE, WhatIf(device="h100")).workload.commits


@check
def a_job_with_a_scaler_is_measured_where_it_is() -> None:
    model, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    job = fxcomp.Job(model, lambda m, b: m(b).square().mean(), optimizer, torch.ones(4, 8), scaler=scaler)
    assert what_if(job, WHERE).workload.commits
    assert "all_finite" in rewritten(job, WHERE).source


# Afterwards


def settings() -> dict[str, Any]:
    """Read everything that the scope replaces."""
    adam: Any = sys.modules["torch.optim.adam"]
    modules: tuple[Any, ...] = (
        *(torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.cuda.amp.common),
        *(torch.accelerator, torch.distributed, adam, torch.Tensor, FakeTensor, MetaTensorDescriber, DDP),
        *(torch.nn.Module, torch.UntypedStorage, torch._C._nn, torch.backends.cudnn, torch.backends.cuda),
    )
    read = {f"{each.__name__}.{name}": value for each in modules for name, value in vars(each).items()}
    read = {name: value for name, value in read.items() if "__slotnames__" not in name}
    state = (torch.get_default_device(), dist.is_initialized(), torch._C._len_torch_function_stack())
    return {
        **read,
        "state": (*state, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "environment": dict(os.environ),
        "devices": (adam._get_capturable_supported_devices(), torch.zeros(2).device.type),
        "backward": torch.autograd._engine_run_backward,
    }


@check
def everything_is_as_before_afterwards() -> None:
    torch.set_default_device("cpu")
    before = settings()
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else nullcontext(), imagining("h100"):
            dist.init_process_group("nccl")
            torch.set_default_device("cuda")
            torch.compile(nn.Linear(2, 2))
            with imagining("a100"):
                assert torch.cuda.get_device_name() == FACTS.name, "an inner scope changes nothing"
            if fails:
                {}["the script's own mistake"]
        after = settings()
        assert before.keys() == after.keys()
        changed = [name for name, value in before.items() if after[name] is not value and after[name] != value]
        assert not changed, changed
    assert compat.imagined_device() is None


@check
def a_job_that_raises_in_its_loss_leaves_torch_as_it_was() -> None:
    before = settings()

    def loss(*_: Any) -> torch.Tensor:
        raise KeyError("in the loss")

    with pytest.raises(KeyError):
        what_if(job_of("cpu", loss), WHERE, WhatIf(device="h100"))
    after = settings()
    assert [name for name, value in before.items() if after[name] is not value and after[name] != value] == []


def main() -> None:
    """Run all checks."""
    results: dict[str, str] = {}
    for name, run in CHECKS.items():
        try:
            run()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
