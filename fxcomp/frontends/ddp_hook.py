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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxcomp import compat
from fxcomp.cluster.cluster import Cluster
from fxcomp.cost.timeline import Timeline
from fxcomp.errors import FxcompError
from fxcomp.frontends.hook_job import Future, HookJob, delivered
from fxcomp.frontends.hook_start import meet
from fxcomp.options import GivenCosts, StepOptions
from fxcomp.plan.compress import GivenCompress
from fxcomp.plan.plan import Plan
from fxcomp.report.terminal import to_text
from fxcomp.state.checkpoint import states_of, to_tensors
from fxcomp.state.saved_state import Given, check_are_states


def ddp_hook(
    *,
    compress: GivenCompress = "balanced",
    cluster: Cluster | None = None,
    costs: GivenCosts | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> DdpHook:
    """Make a hook for `model.register_comm_hook(None, hook)`; every rank makes one with the same arguments.

    The options are those of `compile_step`, as far as they are about gradients: in `compress`, errors are those of
    Gaussian values, and error feedback takes what needs no optimizer. `scaler` is the one that scales the loss:
    what is left out follows its scale. Raises BadOption and BadPlan.
    """
    options = StepOptions.of_gradients(
        compress, "which DistributedDataParallel leaves yours", cluster=cluster, costs=costs, scaler=scaler
    )
    return DdpHook(options)


class DdpHook:
    """The hook of one DistributedDataParallel model: it averages each bucket that a backward pass hands over."""

    # torch refuses annotations that are not types.
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("state", "bucket")]
    )

    def __init__(self, options: StepOptions):
        self.__name__ = self.__qualname__ = "fxcomp.ddp_hook"  # torch logs them
        self._options = options
        self._job: HookJob | None = None
        self._is_alone = False
        """The wrapper averages over this rank alone."""
        self._given: Given = None
        """A state that was loaded before the first backward pass."""

    def __call__(self, state: object, bucket: compat.GradBucket) -> Future:
        """Take a bucket; torch calls this, in the same order on all ranks."""
        if self._job is None:
            if self._is_alone or dist.get_world_size() == 1:
                return delivered(bucket.buffer())
            start = meet(self._options, bucket.parameters()[0], state, self._given)
            if start.site.ranks.world_size == 1:
                self._is_alone = True
                return delivered(bucket.buffer())
            self._job = HookJob(start, self._given)
            self._given = None
        return self._job.take(bucket)

    # Looking

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while the first backward passes send dense."""
        return None if self._job is None or self._job.decision is None else self._job.decision.plan

    @property
    def source(self) -> str:
        """The emitted step as Python source; empty before there is a plan."""
        return "" if self._job is None or self._job.program is None else self._job.program.source

    @property
    def timeline(self) -> Timeline | None:
        """The predicted step; None before there is a plan."""
        return None if self._job is None or self._job.program is None else self._job.program.timeline

    @property
    def is_racing(self) -> bool:
        """Plans take turns, or will soon; False before there is a plan, too."""
        return self._job is not None and self._job.is_racing

    def report(self) -> str:
        """Explain the plan and the predicted step as text. Raises FxcompError before there is a plan."""
        if self._job is None or self._job.decision is None:
            raise FxcompError(
                "this hook has no plan yet: the first backward passes on more than one rank send dense, and tell when"
                " buckets are ready.\n  Ask again after some steps, or name a plan."
            )
        return to_text(self._job.explanation())

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state of error feedback and compressors, with the plan; empty before there is one."""
        return {} if self._job is None else self._job.state_dict()

    def checkpoint(self) -> dict[str, Tensor]:
        """This rank's state as plain tensors, as CompiledStep.checkpoint makes them; empty before there is a plan.

        Random generators are left to the loop, whose draws they are.
        """
        saved = self.state_dict()
        return to_tensors(saved) if saved else {}

    def load_state_dict(self, state: Given) -> None:
        """Take back what `state_dict` or `checkpoint` returned; every rank calls it, as CompiledStep.load_state_dict.

        Before the first backward pass the state waits for it, and its plan is followed from there on. Raises BadState.
        """
        given: Given = states_of(state) or None
        if self._job is None:
            check_are_states(given or ())
            self._given = given
        else:
            self._job.load_state_dict(given)

    def close(self) -> None:
        """Give back the process groups; other ranks need not be there. The model's next backward pass raises."""
        if self._job is not None:
            self._job.close()
