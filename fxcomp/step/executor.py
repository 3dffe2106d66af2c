"""Run emitted steps in lockstep. An error inside a step on one rank ends that step on all ranks.

    enter           check that the ranks are at the same step
    run             run the whole step at once
    begin, arrive   run the step in parts as DDP's gradients arrive; the last call returns the results
    end             wait for the pool; clear the residuals of a dropped plan, unless the step was skipped
    leave           end the step after an error

Each collective pairs with the next one of the other ranks, without a step number. If a rank continued after an
exception, gradients of different steps would be averaged. Therefore a rank that raises writes the reason to the
store and closes its connections. The other ranks get an error in their collective, read the reason, and stop too.
Before the next step, ranks compare where they stopped:

    every rank raised in the same step, before any emitted code ran     the step runs again
    otherwise                                                           RanksApart, until all ranks load a state
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.codegen.profiled import run_named
from fxcomp.errors import BadCall, PeerFailed, RanksApart, ReplicasDiffer, VerificationFailed
from fxcomp.ranks import WHAT_TO_DO, Ranks, Stop
from fxcomp.runtime.runtime import Runtime
from fxcomp.state.gradient_state import GradientState

CLOSED_STEP = "this compiled step has been closed.\n  Call compile_step again, on all ranks."


Arriving = Generator[None, Sequence[Tensor], Any]
"""Running step: a generator that receives gradients by bucket and returns the results."""


class Executor:
    """Runs the emitted steps of one step function. `closed` is the error message for calls after `close`."""

    def __init__(self, ranks: Ranks, closed: str = CLOSED_STEP):
        self._ranks, self._closed = ranks, closed
        self._step, self._goes_on = 0, False
        self._is_closed = False
        world = compat.world() if ranks.world_size > 1 else None
        self._world = None if world is None else weakref.ref(world)
        self.has_begun = False
        """True once emitted code of the current step runs, because it may change values."""
        self._arriving: Arriving | None = None

    # Running

    def run(self, module: ModuleType, graph: GraphModule, runtime: Runtime, arguments: Sequence[Any]) -> Any:
        self.has_begun = True
        if compat.is_profiling():
            return run_named(module, graph, runtime, arguments)
        return module.step(runtime, *arguments)

    def begin(self, module: ModuleType, runtime: Runtime, arguments: Sequence[Any]) -> None:
        """Begin a step that runs as its gradients arrive."""
        self.has_begun = True
        arriving: Arriving = module.step(runtime, *arguments)
        next(arriving)
        self._arriving = arriving

    @property
    def is_under_way(self) -> bool:
        return self._arriving is not None

    def arrive(self, gradients: Sequence[Tensor]) -> Any:
        """Continue the step with a bucket's gradients. Return its results after the last bucket."""
        assert self._arriving is not None, "a step is under way"
        try:
            self._arriving.send(gradients)
        except StopIteration as end:
            self._arriving = None
            return end.value
        return None

    def end(self, state: GradientState | None, runtime: Runtime) -> bool:
        """Wait for the pool. Return False if the step was skipped, else clear the sent residuals of a dropped plan."""
        assert self._arriving is None, "a step ends with its last bucket"
        runtime.finish()
        counts = not runtime.counters.skipped
        if counts and state is not None:
            state.settle()
        return counts

    # At the same step

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Enter a step or its next micro-batch. Raises BadCall, or RanksApart if ranks stopped at different steps."""
        self.check_open()
        if self._ranks.stopped is not None:
            self._meet_again(self._ranks.stopped, step)
        self._step, self._goes_on, self.has_begun = step, goes_on, False
        self._ranks.at_step(step)

    def leave(self, error: BaseException, runtime: Runtime) -> None:
        """End a step after an exception. Raises PeerFailed if another rank raised first."""
        self._arriving = None
        self._ranks.at_step(None)
        is_told = isinstance(error, ReplicasDiffer) and error.is_everywhere
        if is_told or isinstance(error, VerificationFailed) or self._ranks.knows(error):
            runtime.settle()  # all ranks raise it, so everything launched completes
            return
        had_stopped = self._ranks.stopped is not None
        has_begun = self._goes_on or self.has_begun
        self._ranks.stop(f"step {self._step}", error, step=self._step, has_begun=has_begun)
        runtime.drop()
        stop = self._ranks.stopped
        was_left = isinstance(error, PeerFailed) or (
            isinstance(error, RuntimeError) and compat.is_lost_connection(error)
        )
        if was_left and stop is not None and not had_stopped:
            if differs := stop.cause.partition(f"{ReplicasDiffer.__name__}: ")[2]:
                raise ReplicasDiffer(differs) from None
            raise PeerFailed(f"step {self._step} did not end: {stop.cause}\n{WHAT_TO_DO}") from None

    def fail(self, step: int, error: BaseException, runtime: Runtime) -> None:
        """Stop before a step and pass the error to the other ranks."""
        self._ranks.at_step(None)
        self._ranks.stop(f"step {step}", error, step=step, has_begun=False)
        runtime.drop()

    def check_open(self) -> None:
        """Raise BadCall after `close` or `destroy_process_group`."""
        if self._is_closed:
            raise BadCall(self._closed)
        if self._world is not None and (compat.world() is None or compat.world() is not self._world()):
            raise BadCall(
                "the process group that ranks were compiled in has been destroyed (torch.distributed"
                ".destroy_process_group), and its connections with it.\n"
                "  Train before that; or after init_process_group call compile_step again on all ranks, and give the"
                " new step the old one's state_dict()."
            )

    def check(self) -> None:
        """Raise RanksApart if ranks have stopped, and BadCall after `close`."""
        self.check_open()
        if self._ranks.stopped is not None:
            raise _apart(self._ranks.stopped, "")

    def close(self, runtime: Runtime) -> None:
        """End the pool's threads and release the process groups."""
        if not self._is_closed:
            self._is_closed = True
            runtime.close()
            self._ranks.release()

    def _meet_again(self, mine: Stop, step: int) -> None:
        try:
            stops = self._ranks.all_stops()
        except PeerFailed as error:
            raise _apart(mine, str(error)) from None
        if any(stop.step != step or stop.has_begun for stop in stops):
            raise _apart(mine, "; ".join(f"rank {rank} stopped {_place(stop)}" for rank, stop in enumerate(stops)))
        with self._ranks.together(f"going on with step {step}", after_a_stop=True):
            pass


def _apart(stop: Stop, details: str) -> RanksApart:
    lines = [f"the ranks are no longer at the same step: {stop.cause}"]
    lines += [f"  {details}: gradients of different steps would be averaged."] if details else []
    return RanksApart("\n".join([*lines, WHAT_TO_DO]))


def _place(stop: Stop) -> str:
    if stop.step is None:
        return f"in {stop.what}"
    return f"{'inside' if stop.has_begun else 'before any work of'} step {stop.step}"
