"""A communication hook for DistributedDataParallel: fxcomp's plans under eager PyTorch, for models that do not trace.

    model = DistributedDataParallel(net)
    hook = fxcomp.ddp_hook(compress="balanced")
    model.register_comm_hook(None, hook)

The loop stays as it is: loss scaling, clipping, accumulation with `no_sync`, the optimizer and the scheduler are the
user's own. The first backward passes send dense and tell when each bucket is ready. Then all ranks agree on a plan; the
compiled step's passes write its program, and the same runtime runs it (`hook_program.py`). With a plan of your
own there is nothing to wait for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import UnsupportedFeature
from fxcomp.frontends.hook_job import Future, HookJob, delivered
from fxcomp.frontends.hook_program import Wrapped
from fxcomp.frontends.planned_average import PlannedAverage
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.kinds import check_is_trainable
from fxcomp.ranks import Ranks


def ddp_hook(
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> DdpHook:
    """Make a hook for `model.register_comm_hook(None, hook)`; every rank makes one with the same arguments.

    `compress`, `cluster` and `costs` are those of `compile_step`, as far as they are about gradients: in `compress`,
    errors are those of Gaussian values, and error feedback takes what needs no optimizer. `scaler` is the one that
    scales the loss: what is left out follows its scale. Raises BadOption and BadPlan.
    """
    options = StepOptions.of_gradients(
        compress, "which DistributedDataParallel leaves yours", cluster=cluster, costs=costs, scaler=scaler
    )
    return DdpHook(options)


class DdpHook(PlannedAverage):
    """The hook of one DistributedDataParallel model: it averages each bucket that a backward pass hands over."""

    # torch refuses annotations that are not types.
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("state", "bucket")]
    )

    def __init__(self, options: StepOptions):
        super().__init__(None)
        self.__name__ = self.__qualname__ = "fxcomp.ddp_hook"  # torch logs them
        self._options = options
        self._take: Callable[[compat.GradBucket], Future] | None = None

    def __call__(self, state: object, bucket: compat.GradBucket) -> Future:
        """Take a bucket; torch calls this, in the same order on all ranks."""
        if self._take is None:
            if dist.get_world_size() == 1:
                return _as_it_is(bucket)
            self._take = self._started(bucket.parameters()[0], state)
            self._given = None
        return self._take(bucket)

    def _started(self, parameter: Tensor, state: object) -> Callable[[compat.GradBucket], Future]:
        """Meet the ranks that a wrapper averages over, in the first bucket of the first pass; each calls it there.

        `state` is what the hook was registered with.
        """
        wrapper, options = compat.wrapper_of(parameter, state), self._options
        with Ranks.meeting(options.cluster, "ddp_hook", None if wrapper is None else wrapper.process_group) as ranks:
            wrapped = ranks.attempt("looking at the model", lambda: _wrapped(wrapper, options))
            facts = {f"the shape of {name!r}": list(shape) for name, shape in wrapped.shapes.items()}
            start = Start.of(
                "ddp_hook", ranks, options, ModelHere(wrapped.shapes, parameter.device, facts), self._given
            )
        if ranks.world_size == 1:  # the wrapper averages over this rank alone
            return _as_it_is
        self._job = job = HookJob(start, wrapped, self._given)

        def take(bucket: compat.GradBucket) -> Future:
            return job.take(bucket.index(), bucket.buffer(), bucket.parameters(), is_last=bucket.is_last())

        return take


def _as_it_is(bucket: compat.GradBucket) -> Future:
    return delivered(bucket.buffer())


def _wrapped(wrapper: Any, options: StepOptions) -> Wrapped:
    """Look at the model in a wrapper.

    Raises UnsupportedFeature, UnsupportedParameter, and BadOption for pins that decide nothing in it.
    """
    if wrapper is None:
        raise UnsupportedFeature(
            "the hook cannot find the model that it was registered with.\n"
            "  Hand it over: model.register_comm_hook(model, hook)."
        )
    model: nn.Module = wrapper.module
    options.compress.pinned.check_model(model)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    for name, each in named:
        check_is_trainable(name, each.dtype)
    shapes: dict[str, tuple[int, ...]] = {name: tuple(each.shape) for name, each in named}
    return Wrapped({id(each): name for name, each in named}, shapes, compat.finds_unused(wrapper))
