"""State of a model under torch.compile: one plan for all its graphs."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.codegen.compiled_regions import CompiledRegions
from fxcomp.codegen.emit import emit
from fxcomp.codegen.load import compile_regions, load
from fxcomp.codegen.traced import trace_program
from fxcomp.errors import ReplicasDiffer
from fxcomp.frontends.gradient_watch import GradientWatch
from fxcomp.frontends.hook_program import slots_of
from fxcomp.frontends.no_sync import Averaging
from fxcomp.graph.info import InputKind, Role, arguments_of, info
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.plan.verified_steps import SAMPLED, VerifiedSteps
from fxcomp.runtime.arrivals import Arrivals, digest_of
from fxcomp.runtime.members import Members
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.site import Site
from fxcomp.state.checkpoint import states_of
from fxcomp.state.checksums import sealed
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.saved_state import Given
from fxcomp.step.executor import Executor
from fxcomp.step.follower import Follower

log = logging.getLogger(__name__)

COMPARED_PASSES = 3
"""Number of first backward passes in which ranks compare gradients; later passes are sampled."""

CLOSED = (
    "this model's compiled backward pass has been closed.\n"
    "  Call torch._dynamo.reset() and torch.compile again, on all ranks."
)

GivenOptions = Mapping[str, Any] | None


def without_model(given: GivenOptions) -> GivenOptions:
    """Return the options without the model, because stored options would keep the model alive."""
    return {name: value for name, value in (given or {}).items() if name != "model"}


@dataclass(slots=True, eq=False)
class CompiledModel:
    """Plan and error-feedback state of one model, shared by all its graphs."""

    follower: Follower
    site: Site
    compiler: Compiler
    parameters: Mapping[str, weakref.ref[nn.Parameter]]
    break_: str | None
    """Location of Dynamo's graph break, if any."""
    model: weakref.ref[nn.Module] | None
    given: GivenOptions
    """Options without the model. If no model was given, the caller's dict, which identifies the torch.compile call."""
    watch: GradientWatch
    frozen: frozenset[str]
    """Parameters that required no gradient at compilation."""
    averaging: Averaging
    """State of `no_sync`, shared by all CompiledModels of one model."""
    runtime: Runtime = field(init=False)
    executor: Executor = field(init=False)
    source: str = ""
    passes: int = 0
    _left_out: frozenset[str] = frozenset()
    """Frozen parameters whose residuals remain in another CompiledModel."""
    _is_owed: bool = False
    """True if `.grad` may hold gradients that have not been averaged."""
    _arrivals: dict[str, Arrivals] = field(init=False)

    @property
    def members(self) -> Members:
        assert self.site.ranks.members is not None, "a rank that is alone has no compiled model"
        return self.site.ranks.members

    def __post_init__(self) -> None:
        self.runtime, self.executor = Runtime(self.site.transport, self.site.device), Executor(self.site.ranks, CLOSED)
        self.runtime.gradients.owed = self.state.owed
        alive = {name: found for name, ref in self.parameters.items() if (found := ref()) is not None}
        self._arrivals = {name: Arrivals.of(parameter) for name, parameter in alive.items()}

    @property
    def state(self) -> GradientState:
        return self.follower.state

    @property
    def plan(self) -> Plan:
        return self.follower.decision.plan

    @property
    def is_alive(self) -> bool:
        return any(parameter() is not None for parameter in self.parameters.values())

    def fail(self, error: BaseException) -> None:
        """Stop after an error outside a backward pass, and report the error to the other ranks."""
        self.executor.fail(self.passes, error, self.runtime)

    @property
    def next_meeting(self) -> str:
        return f"planning for parameters frozen or thawed since {self.site.ranks.name}"

    def take_over(self, other: CompiledModel) -> None:
        """Move residuals of common parameters from another CompiledModel of this model."""
        owed = other.state.owed_here(other.follower.trained.sizes, self.site.ranks.world_size)
        both = {name: value for name, value in owed.items() if name in self.parameters}
        stays = {name for name, value in owed.items() if name not in self.parameters and bool(value.any())}
        self._left_out = (other._left_out | stays) - set(self.parameters)
        self.state.also_owe(both)
        for name in both:
            other.state.owed.pop(name, None)
            for piece in other.state.residuals.slices.get(name, ()):
                piece.values.zero_()
        self._is_owed, other._is_owed = self._is_owed or other._is_owed, False

    def close(self) -> None:
        """Stop the worker thread and release process groups, without communication."""
        self.executor.close(self.runtime)
        if self.watch.is_of_graph:
            self.watch.lift()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and compressor states. Warn about missing residuals of frozen parameters."""
        if self._left_out:
            some = ", ".join(sorted(self._left_out)[:3]) + (", ..." if len(self._left_out) > 3 else "")
            warnings.warn(
                f"fxcomp: this state lacks the residuals of {some}, which were frozen after they trained.\n"
                "  They are lost in a restart. To keep them, save after a backward pass that trains them.",
                stacklevel=2,
            )
        return sealed(self.follower.state_dict(self.follower.now, self.plan, self.passes))

    def load_state_dict(self, state: Given) -> None:
        """Restore a result of `state_dict`, or several. Must run on every rank."""
        self.executor.check_open()
        with self.site.ranks.together("load_state_dict", after_a_stop=True):
            self.follower.load(self.site.ranks.attempt("reading a checkpoint", lambda: states_of(state)))
            self.runtime.gradients.owed = self.state.owed

    # Running

    def emit(self, labelled: GraphModule, inductor: bool) -> compat.Backward:
        """Without communication, rewrite a backward graph to follow the plan, and return it as a function."""
        final = self.compiler.rewrite(labelled, self.plan, self.follower.decision.costs)
        self.source = emit(final, title="One backward pass, gradients averaged")
        log.debug("%s", self.source)
        trace_program(self.plan, self.source, None, lambda: {"final": final})
        module = load(self.source, final, compat.cache_directory() / "steps")
        if inductor:
            compile_regions(module, final, CompiledRegions())
        residuals = [self.state.residuals.of(*key) for key in slots_of(final, InputKind.RESIDUAL)]
        states = [self.state.compressor_states.of(*key) for key in slots_of(final, InputKind.COMPRESSOR_STATE)]
        places = _places_of_gradients(final)
        kept: dict[InputKind, Sequence[Any]] = {InputKind.RESIDUAL: residuals, InputKind.COMPRESSOR_STATE: states}

        def backward(values: list[Any]) -> Sequence[Any]:
            with torch.no_grad():
                arguments = arguments_of({**kept, InputKind.BATCH: values})
                _, results = self.executor.run(module, final, self.runtime, arguments)
                self.executor.end(self.state, self.runtime)
                self.runtime.buffers.give_away([results[place] for place in places.values()])
                self._note_averaged()
                self.passes += 1
            return results

        def together(values: list[Any]) -> Sequence[Any]:
            self.executor.enter(self.passes)
            self.executor.has_begun = True
            try:
                self._take_up_own()
                return backward(values)
            except BaseException as error:
                self.executor.leave(error, self.runtime)
                raise

        return together

    def keeping(self, own: compat.Backward) -> compat.Backward:
        """Return `own`, the backward function without averaging, and mark this pass's gradients as not averaged."""
        for arrivals in self._arrivals.values():
            arrivals.note_local(compat.backward_call())
        self._is_owed = True
        return own

    def _take_up_own(self) -> None:
        """Add local gradients from `.grad` to the values that this pass averages."""
        if not self._is_owed:
            return
        self._is_owed = False
        for name, reference in self.parameters.items():
            parameter = reference()
            if parameter is None or parameter.grad is None:
                continue
            if not compat.will_accumulate(parameter):  # this pass does not write .grad; a later pass averages it
                self._is_owed = True
                continue
            gradient = parameter.grad.detach().reshape(-1)
            self.state.also_owe({name: gradient.to(torch.promote_types(gradient.dtype, torch.float32))})
            parameter.grad = None

    def _note_averaged(self) -> None:
        """Mark the pass's gradients as averaged. In sampled passes, schedule a comparison between ranks."""
        is_sampled = self.passes < COMPARED_PASSES or self.passes in _SAMPLED_PASSES
        call = compat.backward_call()
        for arrivals in self._arrivals.values():
            arrivals.note_averaged(call, is_sampled)
        if is_sampled:
            compat.at_end_of_backward(self._compare)

    def _compare(self) -> None:
        """Raise on every rank if gradients that reached `.grad`, or parameters, differ between ranks.

        A use of a parameter outside the compiled call, like a weight penalty, adds to the averaged gradient. The added
        values must be equal on all ranks.
        """
        try:
            self._check_equal(*self._digests())
        except BaseException as error:
            self.executor.leave(error, self.runtime)
            raise

    def _digests(self) -> tuple[list[str], Tensor]:
        """Return names and int64 digests of gradients and parameters; the digest of a missing gradient is 0."""
        nothing = torch.zeros((), dtype=torch.int64, device=self.site.device)
        arrived = [nothing if each.digest is None else each.digest for each in self._arrivals.values()]
        names = [f"gradient of {name!r}" for name in self._arrivals]
        for name, reference in self.parameters.items():
            if (parameter := reference()) is not None:
                names.append(f"parameter {name!r}")
                arrived.append(digest_of(parameter))
        return names, torch.stack(arrived)

    def _check_equal(self, names: Sequence[str], mine: Tensor) -> None:
        ranks = self.site.ranks.world_size
        everyone = mine.new_empty(ranks * mine.numel())
        self.site.transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, ranks, "world")).wait()
        rows = everyone.view(-1, mine.numel())
        unequal: Any = (rows != rows[0]).any(0)
        differs: list[bool] = unequal.tolist()
        for name, bad in zip(names, differs, strict=True):
            if bad:
                raise ReplicasDiffer(
                    f"the {name} differs between ranks, so replicas drift apart.\n"
                    "  Something outside the compiled call changes it or adds to its gradient: use the parameter"
                    " inside, and step equal optimizers on all ranks. fxcomp.ddp_hook averages these, too."
                )


_SAMPLED_PASSES = VerifiedSteps.parse(SAMPLED)


def _places_of_gradients(final: GraphModule) -> dict[str, int]:
    returned: Any = final.graph.output_node().args[0]
    outputs: list[Any] = list(returned[1])
    given = [node for node in final.graph.nodes if info(node).role is Role.UPDATE]
    return {str(info(node).parameter): outputs.index(node) for node in given}
