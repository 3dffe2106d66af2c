"""Run emitted steps, at the same step on all ranks: an error inside a step on one rank ends that step on all of them.

    enter           the ranks are at the same step
    run             the whole step in one go; or, where a backward pass of autograd makes the gradients,
    begin, arrive   line by line, as gradients come; the last ones bring the results
    end             all that was launched is over; what compressors left out counts, unless the step was left out
    leave           an error ends the step

Nothing else calls an emitted function.

Ranks never say which step they are at; each collective pairs with the others' next one, whatever it is for. A rank that
raised and went on with its next batch would have its gradient of step 8 averaged with the others' of step 7. So a rank
that raises stops: it says why in the store and closes its connections. The others, which wait for it in a collective,
get an error at once, read why, and stop too. Before any of them runs another step all compare where they have stopped:

    every rank raised in the same step before anything of it ran     they meet again, and the step runs
    anything else                                                    RanksApart, until a state is loaded on all ranks

A step in which nothing is raised pays one look at an attribute.
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
"""A step that gradients are sent into, bucket by bucket; it returns what the emitted function does."""


class Executor:
    """Runs the emitted steps of one step function.

    `closed` says what has been closed, and what to do then.
    """

    def __init__(self, ranks: Ranks, closed: str = CLOSED_STEP):
        self._ranks, self._closed = ranks, closed
        self._step, self._goes_on = 0, False
        self._is_closed = False
        world = compat.world() if ranks.world_size > 1 else None
        self._world = None if world is None else weakref.ref(world)
        self.has_begun = False
        """True if emitted code has run in the step under way, so that something may have changed."""
        self._arriving: Arriving | None = None

    # Running

    def run(self, module: ModuleType, graph: GraphModule, runtime: Runtime, arguments: Sequence[Any]) -> Any:
        """Run the step that was emitted from a graph in one go. Returns its results: the loss, and others."""
        self.has_begun = True
        if compat.is_profiling():
            return run_named(module, graph, runtime, arguments)
        return module.step(runtime, *arguments)

    def begin(self, module: ModuleType, runtime: Runtime, arguments: Sequence[Any]) -> None:
        """Begin a step that gradients arrive in. Nothing of it runs before the first ones."""
        self.has_begun = True
        arriving: Arriving = module.step(runtime, *arguments)
        next(arriving)
        self._arriving = arriving

    @property
    def is_under_way(self) -> bool:
        """A step has begun, and not all of its gradients have arrived."""
        return self._arriving is not None

    def arrive(self, gradients: Sequence[Tensor]) -> Any:
        """Go on with the step as far as these gradients let it. Returns its results after the last ones, else None."""
        assert self._arriving is not None, "a step is under way"
        try:
            self._arriving.send(gradients)
        except StopIteration as end:
            self._arriving = None
            return end.value
        return None

    def end(self, state: GradientState | None, runtime: Runtime) -> bool:
        """Wait until all that the step has launched is over. Returns whether the step counts.

        If it does, what compressors have left out is kept in `state`.
        """
        assert self._arriving is None, "a step ends with its last bucket"
        runtime.finish()
        counts = not runtime.counters.skipped
        if counts and state is not None:
            state.settle()
        return counts

    # At the same step

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Begin a step, or go on with it. Raises RanksApart if ranks stopped at different places, and BadCall."""
        self.check_open()
        if self._ranks.stopped is not None:
            self._meet_again(self._ranks.stopped, step)
        self._step, self._goes_on, self.has_begun = step, goes_on, False
        self._ranks.at_step(step)

    def leave(self, error: BaseException, runtime: Runtime) -> None:
        """End a step in which something was raised. Raises PeerFailed if it was another rank that began it."""
        self._arriving = None
        self._ranks.at_step(None)
        is_told = isinstance(error, ReplicasDiffer) and error.is_everywhere
        if is_told or isinstance(error, VerificationFailed) or self._ranks.knows(error):
            runtime.settle()  # all ranks raise it, so what they have launched comes to its end
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
        """Stop before a step, and give the other ranks the error. Where all of them do they may go on with it."""
        self._ranks.at_step(None)
        self._ranks.stop(f"step {step}", error, step=step, has_begun=False)
        runtime.drop()

    def check_open(self) -> None:
        """Raise BadCall after `close` and after `destroy_process_group`."""
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
        """Raise RanksApart if ranks have stopped, and BadCall."""
        self.check_open()
        if self._ranks.stopped is not None:
            raise _apart(self._ranks.stopped, "")

    def close(self, runtime: Runtime) -> None:
        """End the pool's thread and give back the process groups; no other rank is asked."""
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
    return f"{'inside' if stop.has_begun else 'before anything had run of'} step {stop.step}"
