"""Communication hook for DistributedDataParallel: fxcomp's plans under eager PyTorch.

    model = DistributedDataParallel(net)
    hook = fxcomp.ddp_hook(compress="balanced")
    model.register_comm_hook(None, hook)

The first backward passes are dense and measure the ready times of buckets, unless a plan is given. Then all ranks agree
on a plan, which is emitted as in a compiled step (`hook_program.py`).
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.errors import BadOption, BadState, FxcompError, Unsupported
from fxcomp.frontends.hook_job import Future, HookJob, delivered
from fxcomp.frontends.hook_program import Wrapped
from fxcomp.frontends.planned_average import PlannedAverage
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.kinds import check_is_trainable
from fxcomp.ranks import Ranks
from fxcomp.state.checkpoint import states_of
from fxcomp.state.saved_state import Given

log = logging.getLogger(__name__)


def ddp_hook(
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> DdpHook:
    """Make a hook for `model.register_comm_hook(None, hook)`. Every rank makes a hook with the same arguments.

    `compress`, `cluster` and `costs` are as in `compile_step`. Compressor errors are assumed, as for Gaussian values,
    and error feedback is limited to settings that need no optimizer. `scaler` is the GradScaler of the loss; residuals
    follow its scale. Raises BadOption and BadPlan.
    """
    options = StepOptions.of_gradients(
        compress, "which DistributedDataParallel leaves yours", cluster=cluster, costs=costs, scaler=scaler
    )
    return DdpHook(options)


class DdpHook(PlannedAverage):
    """Hook of one DistributedDataParallel model, which averages each bucket of a backward pass."""

    # torch checks annotations, and raises if they are strings
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("state", "bucket")]
    )

    def __init__(self, options: StepOptions):
        super().__init__(None)
        self.__name__ = self.__qualname__ = "fxcomp.ddp_hook"  # for torch's log
        self._options = options
        self._take: Callable[[compat.GradBucket], Future] | None = None
        self._lacks_scaler = False
        """True in a copy of a hook that had a scaler."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the state, without process groups and programs."""
        options, given = self._options, self._given if self._job is None else self.state_dict()
        lacks_scaler = self._lacks_scaler or options.scaler is not None
        return {"options": replace(options, scaler=None), "lacks scaler": lacks_scaler, "given": given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"])
        self._lacks_scaler = state["lacks scaler"]
        self.load_state_dict(state["given"])
        log.warning(
            "a copy of fxcomp.ddp_hook() begins without process groups, and DistributedDataParallel registers no hook"
            " with a copy of its wrapper: it averages dense. To compress there, call register_comm_hook(None, hook)."
        )

    def begin_again(self, state: Given) -> None:
        """Meet the ranks again in the next backward pass and continue from a `state`. Must run on every rank.

        Use this method to train a wrapper again: DistributedDataParallel accepts only one hook. Raises BadState.
        """
        self.close()
        self._job = self._take = None
        self.load_state_dict(state)

    def __call__(self, state: object, bucket: compat.GradBucket) -> Future:
        """Average a bucket; torch calls this."""
        if self._take is None:
            self._take = self._started(bucket, state)
            self._given = None
        return self._take(bucket)

    def _started(
        self, bucket: compat.GradBucket | tuple[Tensor, Tensor], state: object
    ) -> Callable[[compat.GradBucket], Future]:
        """Meet the wrapper's ranks at the first bucket, and return the function that averages buckets."""
        if isinstance(bucket, tuple):
            raise Unsupported(
                'with torch._dynamo.config.optimize_ddp = "python_reducer" torch hands hooks single gradients, and no'
                " buckets.\n  Set it to True, its default, before DistributedDataParallel(...)."
            )
        if dist.get_world_size() == 1:
            return self._alone()
        if self._lacks_scaler:
            raise BadOption(
                "this hook is a copy of a hook with scaler=, and the scaler of the loss here is unknown.\n"
                "  Make a new one, fxcomp.ddp_hook(scaler=scaler), and load the copy's state_dict() into it."
            )
        parameter = bucket.parameters()[0]
        wrapper, options = compat.wrapper_of(parameter, state), self._options
        with Ranks.meeting(options.cluster, "ddp_hook", None if wrapper is None else wrapper.process_group) as ranks:
            wrapped = ranks.attempt("looking at the model", lambda: _wrapped(wrapper, options))
            facts = {f"the shape of {name!r}": list(shape) for name, shape in wrapped.shapes.items()}
            start = Start.of(
                "ddp_hook", ranks, options, ModelHere(wrapped.shapes, parameter.device, facts), self._given
            )
        if ranks.world_size == 1:  # the wrapper averages over this rank alone
            return self._alone()
        self._job = job = HookJob(start, wrapped, self._given)

        def take(bucket: compat.GradBucket) -> Future:
            return job.take(bucket.buffer(), bucket.parameters(), is_last=bucket.is_last())

        return take

    def _alone(self) -> Callable[[compat.GradBucket], Future]:
        """Return a hook for one rank. Drop a loaded state with a warning."""
        if self._given is not None:
            warnings.warn(
                "fxcomp: one rank has nothing to average; earlier residuals are lost, once.",
                stacklevel=2,
            )
        return lambda bucket: delivered(bucket.buffer())


def _wrapped(wrapper: Any, options: StepOptions) -> Wrapped:
    if wrapper is None:
        raise Unsupported(
            "the hook cannot find the model that it was registered with.\n"
            "  Hand it over: model.register_comm_hook(model, hook)."
        )
    model: nn.Module = wrapper.module
    options.compress.pinned.check_model(model)
    averaged = [each for each in model.named_parameters() if each[0] not in wrapper.parameters_to_ignore]
    named = [(name, each) for name, each in averaged if each.requires_grad]
    for name, each in named:
        check_is_trainable(name, each.dtype.to_real())
    holders: dict[int, nn.Module] = {}
    for module in model.modules():
        for each in module.parameters(recurse=False):
            holders.setdefault(id(each), module)  # first module of a shared parameter, as in DistributedDataParallel
    shapes = {name: _shape(each) for name, each in named if not _is_sparse(holders[id(each)])}
    return Wrapped({id(each): name for name, each in named}, shapes, compat.finds_unused(wrapper))


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a gradient in a bucket, where a complex number is a pair of reals."""
    shape = tuple(parameter.shape) or (1,) * parameter.is_complex()
    return (*shape[:-1], 2 * shape[-1]) if parameter.is_complex() else shape


def states_of_files(files: Mapping[int, object], read: Callable[[int], Any]) -> list[Any] | None:
    """Read every `world_size`-th of the ranks' files, starting at this rank's index: any number of ranks can resume.

    `files` has names by saving rank, the argument of `read`. Must run on every rank. If a file cannot be read, raises
    BadState on the rank that reads it, and PeerFailed on the others.
    """

    def states(rank: int) -> list[Any]:
        try:
            return states_of(read(rank))
        except Exception as error:  # only its first sentence: torch goes on to advise weights_only=False
            cause = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0].rstrip(".: ")
            cause = error if isinstance(error, FxcompError) else f"{cause}.\n  Load an earlier one on every rank."
            raise BadState(f"{str(files[rank])!r}, the file of rank {rank}, cannot be used: {cause}") from None

    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    with Ranks.meeting(None, "reading a checkpoint") as ranks:
        return ranks.attempt("reading the ranks' files", lambda: [states(rank) for rank in mine]) or None
