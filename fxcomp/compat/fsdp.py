"""Read the wrappers around a user's model: DistributedDataParallel's, and the modules of fully_shard.

A module of fully_shard reduces its gradients together, and a rank holds a part of it.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
"""The argument of a communication hook."""


def wrapper_of(parameter: Tensor, given: object) -> Any:
    """Find the DistributedDataParallel, which has no types, that reduces a parameter's gradient; None if there is none.

    torch hands its hooks buckets, and not whose they are. `given` is a wrapper that somebody named, or anything else.
    """
    if isinstance(given, DistributedDataParallel):
        return given
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and any(p is parameter for p in each.parameters()):
            return each
    return None


def finds_unused(wrapper: Any) -> bool:
    """Return whether parameters of a wrapper may go without a gradient in some passes."""
    return bool(wrapper.find_unused_parameters) and not wrapper.static_graph


_dist = cast("Any", dist)


class Scatter(Protocol):
    """The function that fully_shard calls with the gradients of a module: torch's own interface for it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make memory: first for the gradients, where compute runs, then for this rank's part."""
        ...

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Fill this rank's part of the reduced gradients; `input_tensor` has a part for each rank, in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module of which each rank holds a shard. A backward pass reduces its gradients in one flat tensor."""

    name: str
    """Empty for the model itself."""
    names: tuple[str, ...]
    """Of its trainable parameters, in the order of the flat tensor."""
    shapes: tuple[tuple[int, ...], ...]
    """Of this rank's parts of them, with the padding: the same on all ranks."""
    _module: Any
    _group: Any
    _trained: tuple[Any, ...]

    @property
    def parameters(self) -> list[Tensor]:
        """This rank's parts of the parameters; loading a state may replace them."""
        return [each.sharded_param for each in self._trained]

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def shard_group(self) -> Any:
        """The ranks that hold the shards of one replica."""
        return self._group.mesh_info.shard_process_group

    @property
    def is_replicated(self) -> bool:
        """Tell a mesh of two dimensions: fully_shard averages over its replicas by itself."""
        return getattr(self._group.mesh_info, "replicate_mesh_dim", None) is not None

    @property
    def divides_afterwards(self) -> bool:
        """Tell gradients that are divided, as set_gradient_divide_factor asks, or after the hook."""
        return self._group.gradient_divide_factor is not None or self._group.force_sum_reduction_for_comms

    @property
    def offloads(self) -> bool:
        return any(each.offload_to_cpu for each in self._group.fsdp_params)

    def on_reduced(self, hook: Callable[[Tensor], None]) -> None:
        """Let `hook` have the flat tensor between its reduce_scatter and `.grad`."""
        self._module.set_all_reduce_hook(hook)

    @property
    def whole_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters, as they were before they were sharded."""
        return tuple(tuple(each._orig_size) for each in self._trained)

    @property
    def device(self) -> torch.device:
        """Where gradients are; parameters may be offloaded."""
        return self._group.device

    @property
    def cut_dimensions(self) -> tuple[int, ...]:
        """The dimension along which each parameter is cut into parts."""
        return tuple(each.fsdp_placement.dim for each in self._trained)

    @property
    def reduced_as(self) -> torch.dtype:
        """The type in which gradients are scattered."""
        policy = self._group.mp_policy
        return policy.reduce_dtype or policy.param_dtype or self._trained[0].sharded_param.dtype

    @property
    def own_scatter(self) -> Scatter:
        """Return the function that scatters its gradients now."""
        return self._group._reduce_scatter_comm

    @property
    def scatters_by_default(self) -> bool:
        """Nobody has put a collective of their own in the place of torch's."""
        return type(self._group._reduce_scatter_comm).__name__ == "DefaultReduceScatter"

    def scatter_by(self, scatter: Scatter) -> None:
        """Let something else scatter its gradients from the next backward pass on."""
        self._group._reduce_scatter_comm = scatter

    def becomes_gradients(self, reduced: Tensor) -> bool:
        """Tell a flat tensor that the gradients will be views of: what is written into it later is in them."""
        return all(each.grad is None and each.dtype == reduced.dtype for each in self.parameters)

    @property
    def has_gradient_hooks(self) -> bool:
        """Something reads gradients as soon as they are there."""
        return any(getattr(each, "_post_accumulate_grad_hooks", None) for each in self.parameters)

    def gradients(self) -> list[Tensor | None]:
        """List this rank's parts of the gradients, without the padding."""
        return [None if each.grad is None else local_part(each.grad) for each in self.parameters]


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """List the modules that fully_shard was called for and that have something to train."""
    names = {id(each): name for name, each in model.named_parameters()}
    found: list[ShardedModule] = []
    modules: Iterator[tuple[str, nn.Module]] = cast("Any", model.named_modules())
    for name, module in modules:
        for group in _groups(module) if isinstance(module, FSDPModule) else ():
            trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
            if trained:
                found.append(
                    ShardedModule(
                        name,
                        tuple(names[id(each.sharded_param)] for each in trained),
                        tuple(tuple(each.padded_sharded_param_size) for each in trained),
                        module,
                        group,
                        tuple(trained),
                    )
                )
    return found


def _groups(module: Any) -> Sequence[Any]:
    """List the groups of parameters that a module reduces; torch 2.11 has one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory."""
    local: Tensor = cast("Any", tensor).to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def group_ranks(group: Any) -> list[int]:
    """List the ranks of a group, by the job's numbers."""
    return _dist.get_process_group_ranks(group)


def largest(value: Tensor, group: Any) -> None:
    """Make a tensor its largest value over the ranks of a group, in place; every one of them calls it."""
    _dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def at_end_of_backward(work: Callable[[], None]) -> None:
    """Do something when the backward pass under way has ended; its error leaves `backward()`."""
    cast("Any", Variable)._execution_engine.queue_callback(work)
