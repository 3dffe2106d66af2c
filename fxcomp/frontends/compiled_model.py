"""A model under torch.compile: the plan and the state that all its graphs share, and each graph's backward pass."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from fxcomp import compat
from fxcomp.capture.step_capture import refuse_gradients
from fxcomp.codegen.compiled_regions import CompiledRegions
from fxcomp.codegen.emit import emit
from fxcomp.codegen.load import compile_regions, load
from fxcomp.codegen.profiled import run_named
from fxcomp.codegen.traced import trace_program
from fxcomp.errors import UnsynchronizedGradient
from fxcomp.frontends.hook_program import slots_of
from fxcomp.frontends.no_sync import Averaging
from fxcomp.graph.info import InputKind, Role, arguments_of, info
from fxcomp.pipeline import Compiler
from fxcomp.plan.plan import Plan
from fxcomp.runtime.members import Members
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.transfers import Pattern, Transfer
from fxcomp.site import Site
from fxcomp.state.gradient_state import GradientState
from fxcomp.state.saved_state import Given
from fxcomp.step.follower import Follower
from fxcomp.step.lockstep import Lockstep

log = logging.getLogger(__name__)

COMPARED_PASSES = 3
"""So many backward passes are compared between ranks where the model is not known."""

CLOSED = (
    "this model's compiled backward pass has been closed.\n"
    "  Call torch._dynamo.reset() and torch.compile again, on all ranks."
)

GivenOptions = Mapping[str, Any] | None


@dataclass(slots=True)
class CompiledModel:
    """The plan of one model and the state of its error feedback, for all graphs that torch makes of it."""

    follower: Follower
    site: Site
    compiler: Compiler
    parameters: Mapping[str, weakref.ref[nn.Parameter]]
    break_: str | None
    """The line at which Dynamo broke off, if it did."""
    model: weakref.ref[nn.Module] | None
    given: GivenOptions
    """The options as they were given: without a model, they tell one call of torch.compile from another."""
    runtime: Runtime = field(init=False)
    lockstep: Lockstep = field(init=False)
    averaging: Averaging = field(default_factory=Averaging)
    source: str = ""
    """The backward pass that was emitted last."""
    passes: int = 0
    """The number of backward passes so far."""
    _local_passes: int = 0
    """The number of backward passes so far that sent nothing."""
    _is_owed: bool = False
    """Some of their gradients may lie in `.grad`, and have not been sent."""
    _seen: int = 0
    _hooks: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    @property
    def members(self) -> Members:
        """The ranks that average their gradients."""
        assert self.site.ranks.members is not None, "a rank that is alone has no compiled model"
        return self.site.ranks.members

    def __post_init__(self) -> None:
        self.runtime, self.lockstep = Runtime(self.site.transport, self.site.device), Lockstep(self.site.ranks, CLOSED)
        self.runtime.gradients.owed = self.state.owed

    @property
    def state(self) -> GradientState:
        """Return the state of gradients."""
        return self.follower.state

    @property
    def plan(self) -> Plan:
        return self.follower.decision.plan

    @property
    def is_alive(self) -> bool:
        """Some parameter still exists."""
        return any(parameter() is not None for parameter in self.parameters.values())

    def watch(self, uncovered: Mapping[str, nn.Parameter]) -> None:
        """Notice gradients that no compiled backward pass averaged: torch falls back to eager code without an error."""
        parameter = next(found for ref in self.parameters.values() if (found := ref()) is not None)
        register = cast("Callable[..., RemovableHandle]", parameter.register_hook)  # pyright: ignore[reportUnknownMemberType]
        self._hooks = [register(self._on_gradient), *refuse_gradients(uncovered)]

    def _on_gradient(self, _: Tensor) -> None:
        if self.passes + self._local_passes == self._seen:
            warnings.warn(
                "fxcomp: a backward pass gave gradients without the compiled graph: they are this rank's own, not"
                " averaged. If torch gave up recompiling, compile with fullgraph=True to see why.",
                stacklevel=2,
            )
        self._seen = self.passes + self._local_passes

    def close(self) -> None:
        """End the pool's thread and give back the process groups; other ranks need not be there."""
        self.lockstep.close(self.runtime)
        for hook in self._hooks:
            hook.remove()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state of error feedback and compressors."""
        return self.follower.state_dict(self.follower.now, self.plan, self.passes)

    def load_state_dict(self, state: Given) -> None:
        """Take back what `state_dict` returned, as CompiledStep.load_state_dict does; every rank calls it."""
        self.lockstep.check_open()
        with self.site.ranks.together("load_state_dict", after_a_stop=True):
            self.follower.load(state, {self.plan.digest})
            self.runtime.gradients.owed = self.state.owed

    # Running

    def emit(self, labelled: GraphModule, inductor: bool) -> compat.Backward:
        """Rewrite a backward graph for the plan and make it a function. Local: no communication."""
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
                if compat.is_profiling():
                    _, results = run_named(module, final, self.runtime, arguments)
                else:
                    _, results = module.step(self.runtime, *arguments)
                self.runtime.finish()
                self.runtime.buffers.give_away([results[place] for place in places.values()])
                self.state.settle()
                self.passes += 1
                if self.model is None and self.passes <= COMPARED_PASSES:
                    self._compare({name: results[place] for name, place in places.items()})
            return results

        def together(values: list[Any]) -> Sequence[Any]:
            self.lockstep.enter(self.passes)
            self.lockstep.has_begun = True
            try:
                self._take_up_own()
                return backward(values)
            except BaseException as error:
                self.lockstep.leave(error, self.runtime)
                raise

        return together

    def keeping(self, own: compat.Backward) -> compat.Backward:
        """Choose a backward pass whose gradients stay on this rank until one that sends them."""
        self._local_passes += 1
        self._is_owed = True
        return own

    def _take_up_own(self) -> None:
        """Let what has come together in `.grad` on this rank alone go out with this pass's gradients, in its place."""
        if not self._is_owed:
            return
        self._is_owed = False
        for name, reference in self.parameters.items():
            parameter = reference()
            if parameter is None or parameter.grad is None:
                continue
            if not compat.will_accumulate(parameter):  # nothing would bring it back: it goes out with a later pass
                self._is_owed = True
                continue
            gradient = parameter.grad.detach().reshape(-1)
            self.state.also_owe({name: gradient.to(torch.promote_types(gradient.dtype, torch.float32))})
            parameter.grad = None

    def _compare(self, averaged: Mapping[str, Tensor]) -> None:
        """Raise on every rank if averaged gradients, or the parameters that they are for, differ between ranks."""
        parameters = [parameter for name in averaged if (parameter := self.parameters[name]()) is not None]
        mine = digests_of([*averaged.values(), *parameters])
        ranks = self.site.ranks.world_size
        everyone = mine.new_empty(ranks * mine.numel())
        self.site.transport.start(Transfer(Pattern.ALL_GATHER, mine, everyone, ranks, "world")).wait()
        rows = everyone.view(-1, mine.numel())
        unequal: Any = (rows != rows[0]).any(0)
        differs: list[bool] = unequal.tolist()
        whats = [f"{what} {name!r}" for what in ("averaged gradient of", "parameter") for name in averaged]
        for what, bad in zip(whats, differs, strict=True):
            if bad:
                raise UnsynchronizedGradient(
                    f"the {what} differs between ranks, so replicas drift apart.\n"
                    "  Something outside the compiled call changes it or adds to its gradient: use the parameter"
                    " inside, and step equal optimizers on all ranks."
                )


def _places_of_gradients(final: GraphModule) -> dict[str, int]:
    """Find each parameter's averaged gradient among the results."""
    returned: Any = final.graph.output_node().args[0]
    outputs: list[Any] = list(returned[1])
    given = [node for node in final.graph.nodes if info(node).role is Role.UPDATE]
    return {str(info(node).parameter): outputs.index(node) for node in given}


def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor that any changed bit changes, almost surely."""
    return torch.stack([_digest(tensor.detach()) for tensor in tensors])


def _digest(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(_WHOLE[tensor.element_size()]).sum(dtype=torch.int64)


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
