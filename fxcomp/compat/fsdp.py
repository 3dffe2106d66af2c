"""DistributedDataParallel wrappers and modules of fully_shard.

A module of fully_shard reduces its gradients together; each rank holds a shard of each parameter.
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
"""Argument of a communication hook."""


def wrapper_of(parameter: Tensor, given: object) -> Any:
    """Return the DistributedDataParallel that reduces a parameter's gradient, or None.

    If `given` is a wrapper, return `given`. Else search all Python objects, because torch's hooks get no wrapper.
    """
    if isinstance(given, DistributedDataParallel):
        return given
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and any(p is parameter for p in each.parameters()):
            return each
    return None


def finds_unused(wrapper: Any) -> bool:
    """Return whether a backward pass may leave parameters without a gradient."""
    return bool(wrapper.find_unused_parameters) and not wrapper.static_graph


_dist = cast("Any", dist)


class Scatter(Protocol):
    """torch's interface for functions that reduce a module's gradients."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the flat gradients (first call, on the compute stream) or this rank's shard (second call)."""
        ...

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Fill `output_tensor` with this rank's shard of the reduced `input_tensor`, which has one part per rank."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """Module of fully_shard. Backward reduces its gradients in one flat tensor."""

    name: str
    """Name in the model; empty for the root module."""
    names: tuple[str, ...]
    """Names of trainable parameters, in the order of the flat tensor."""
    shapes: tuple[tuple[int, ...], ...]
    """Padded shapes of this rank's shards, equal on all ranks."""
    _module: Any
    _group: Any
    _trained: tuple[Any, ...]

    @property
    def parameters(self) -> list[Tensor]:
        """This rank's shards of trainable parameters. Loading a state dict may replace the tensors."""
        return [each.sharded_param for each in self._trained]

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def shard_group(self) -> Any:
        """Process group of the ranks that hold the shards of one replica."""
        return self._group.mesh_info.shard_process_group

    @property
    def is_replicated(self) -> bool:
        """True for a mesh of two dimensions, where fully_shard also averages over replicas."""
        return getattr(self._group.mesh_info, "replicate_mesh_dim", None) is not None

    @property
    def divides_afterwards(self) -> bool:
        """True if gradients are divided after the all-reduce hook, or by set_gradient_divide_factor."""
        return self._group.gradient_divide_factor is not None or self._group.force_sum_reduction_for_comms

    @property
    def offloads(self) -> bool:
        return any(each.offload_to_cpu for each in self._group.fsdp_params)

    def on_reduced(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with this rank's flat shard after reduce_scatter, before `.grad` is set."""
        self._module.set_all_reduce_hook(hook)

    @property
    def whole_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(each._orig_size) for each in self._trained)

    @property
    def device(self) -> torch.device:
        """Device of the gradients; parameters may be offloaded."""
        return self._group.device

    @property
    def cut_dimensions(self) -> tuple[int, ...]:
        """Dimension along which each parameter is sharded."""
        return tuple(each.fsdp_placement.dim for each in self._trained)

    @property
    def reduced_as(self) -> torch.dtype:
        """Dtype of the scattered gradients."""
        policy = self._group.mp_policy
        return policy.reduce_dtype or policy.param_dtype or self._trained[0].sharded_param.dtype

    @property
    def own_scatter(self) -> Scatter:
        return self._group._reduce_scatter_comm

    @property
    def scatters_by_default(self) -> bool:
        """True if torch's own collective scatters the gradients."""
        return type(self._group._reduce_scatter_comm).__name__ == "DefaultReduceScatter"

    def scatter_by(self, scatter: Scatter) -> None:
        """Replace the scatter function from the next backward pass on."""
        self._group._reduce_scatter_comm = scatter

    def becomes_gradients(self, reduced: Tensor) -> bool:
        """Return whether gradients will be views of `reduced`, so that writes to `reduced` change the gradients."""
        return all(each.grad is None and each.dtype == reduced.dtype for each in self.parameters)

    @property
    def has_gradient_hooks(self) -> bool:
        return any(getattr(each, "_post_accumulate_grad_hooks", None) for each in self.parameters)

    def gradients(self) -> list[Tensor | None]:
        """List this rank's shards of the gradients, without padding."""
        return [None if each.grad is None else local_part(each.grad) for each in self.parameters]


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
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
    """List a module's parameter groups; torch 2.11 has one per module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing memory."""
    local: Tensor = cast("Any", tensor).to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def group_ranks(group: Any) -> list[int]:
    return _dist.get_process_group_ranks(group)


def largest(value: Tensor, group: Any) -> None:
    """Reduce a tensor in place to its maximum over a group; every rank of the group calls it."""
    _dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)


def at_end_of_backward(work: Callable[[], None]) -> None:
    """Call `work` after the running backward pass. An exception of `work` propagates from `backward()`."""
    cast("Any", Variable)._execution_engine.queue_callback(work)
