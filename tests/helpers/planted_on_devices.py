"""Bugs that only an accelerator, or several of them over NCCL, would have shown: faults that the package once had."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.capture import optimizer
from fxcomp.compat import groups, operators
from fxcomp.compressors.triton import dispatch
from fxcomp.cost.timeline import Task
from fxcomp.frontends.backend_options import Options
from fxcomp.passes.clip_in_lists import clip_in_lists
from fxcomp.passes.fuse_updates import fuse_updates
from fxcomp.plan.kinds import Stream
from fxcomp.planning.timed_steps import HeldCollectives
from fxcomp.runtime import transport
from fxcomp.runtime.aside import Aside, Coming
from fxcomp.runtime.host_pool import HostCopies
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.search import plan_tasks
from fxcomp.step.unused import ZeroGradients
from helpers.planting import caught_by, exchange, unchanged, wrap

TRAINING = "tests/runtime/test_late_training.py::test_steps_and_passes_train_as_on_the_cpu_and_the_host_does_not_wait"
BACK = (
    "tests/runtime/test_late_device.py"
    "::test_what_comes_back_from_the_host_waits_neither_for_compute_nor_for_what_goes_there"
)

# Groups


@caught_by("tests/runtime/test_groups.py::test_hosts_of_several_ranks_make_groups_of_a_bound_job")
def a_new_group_splits_the_communicator_of_a_bound_job() -> None:
    groups._unbound = lambda _: contextlib.nullcontext()


@caught_by(
    "tests/runtime/test_groups.py"
    "::test_what_is_under_way_over_nccl_is_aborted_whatever_the_backend_is_called[by device]"
)
def a_group_is_aborted_where_its_one_name_is_nccl() -> None:
    abort = groups._abort
    groups._abort = lambda group: abort(group) if dist.get_backend(group) == "nccl" else None


@caught_by("tests/runtime/test_transport.py::test_a_root_sends_and_gets_once_over_nccl")
def a_root_sends_to_each_rank() -> None:
    transport._root = lambda *_: None


# Streams, and waits of the host


@caught_by("tests/runtime/test_late_device.py::test_a_device_is_timed_by_its_own_events_whichever_is_current")
def events_are_recorded_on_the_current_device() -> None:
    def recorded(device: torch.device, *, timed: bool = False) -> Any:
        event = compat.streams_of(device).Event(enable_timing=timed)
        event.record()
        return event

    exchange(compat.recorded, recorded)


@caught_by(BACK)
def a_copy_back_waits_for_compute() -> None:
    def to_device(self: HostCopies, original: Any, value: Tensor, buffer: Any) -> Tensor:
        self._coming.wait_stream(compat.stream_of(self._device))
        return original(self, value, buffer)

    wrap(HostCopies, "to_device", to_device)


@caught_by(BACK)
def a_copy_back_waits_for_copies_to_the_host() -> None:
    def to_device(self: HostCopies, original: Any, value: Tensor, buffer: Any) -> Tensor:
        self._coming = self._going
        return original(self, value, buffer)

    wrap(HostCopies, "to_device", to_device)


@caught_by(BACK)
def memory_of_the_host_is_not_pinned() -> None:
    HostCopies.pins = property(lambda _: False)


@caught_by("tests/planning/test_timed_steps.py::test_a_step_is_hidden_by_the_device_until_handing_it_out_takes_longest")
def the_hosts_time_counts_as_the_devices() -> None:
    exchange(
        plan_tasks.handing_out,
        lambda host_us: [Task("hand out", Stream.COMPUTE, host_us)] if host_us else [],
    )


@caught_by(TRAINING)
def small_numbers_are_made_and_read_on_the_steps_own_stream() -> None:
    def gather(self: Aside, number: float) -> Coming:
        mine = torch.tensor([number], dtype=torch.float64, device=self._device)
        everyone = mine.new_zeros(self._ranks)
        work = self._transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, self._ranks, "world"))
        return Coming(everyone, work, None)

    Aside.gather = gather


@caught_by(TRAINING)
def a_flag_is_read_for_each_gradient_of_a_hook() -> None:
    def look_at(self: ZeroGradients, original: Any, gradients: Any) -> None:
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        original(self, gradients)

    wrap(ZeroGradients, "look_at", look_at)


@caught_by(TRAINING)
def rates_are_read_one_by_one() -> None:
    exchange(optimizer.read_together, lambda _: optimizer._read)


# Memory, and launches


@caught_by("tests/planning/test_timed_steps.py::test_held_collectives_start_in_their_order_where_one_is_waited_for")
def a_held_collective_starts_at_once() -> None:
    def launch(self: HeldCollectives, original: Any, *given: Any, **options: Any) -> int:
        number = original(self, *given, **options)
        self.wait(number)
        return number

    wrap(HeldCollectives, "launch", launch)


@caught_by(
    "tests/frontends/test_torch_compile_options.py::test_inductor_compiles_what_lies_on_a_gpu_unless_told_otherwise"
)
def inductor_compiles_only_where_it_is_told_to() -> None:
    Options.uses_inductor = lambda self, _: bool(self.inductor)


@caught_by("tests/planning/test_launches.py::test_bucket_by_bucket_an_update_takes_two_launches")
def updates_stay_as_they_were_traced() -> None:
    exchange(fuse_updates, unchanged)


@caught_by("tests/planning/test_launches.py::test_50_parameters_in_6_buckets_take_few_launches[fused]")
def each_gradient_is_clipped_by_itself() -> None:
    exchange(clip_in_lists, unchanged)


@caught_by("tests/codegen/test_inductor.py::test_a_fill_beside_attention_leaves_its_region_to_inductor_with_its_passes")
def attention_without_dropout_counts_as_a_draw() -> None:
    exchange(operators.draws, lambda node: operators.is_random(node.target))


@caught_by("tests/compressors/test_triton_pieces.py::test_launches_do_not_grow_with_ranks[int8]")
def pieces_are_encoded_one_by_one() -> None:
    exchange(dispatch.encode_pieces, lambda *_: False)
