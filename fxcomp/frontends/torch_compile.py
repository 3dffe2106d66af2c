"""The backend of `torch.compile(model, backend="fxcomp")`: a backward pass that ends with averaged gradients.

    forward graph   ─────────────────────────────────────────────────────────► runs as it is, or Inductor's
    backward graph  ─► label_backward ─► plan ─► the pipeline's passes ─► emit ─► backward, gradients averaged

The model is not wrapped; the optimizer, the loop and `.grad` stay the user's. What compile_step does with a whole step
happens here with the backward pass alone: waits end with it, and the plan shortens it. Its compute is priced by the
machine's roofline, because a backward graph cannot be timed before there are activations.

- Gradients are made in one graph. A trainable parameter that the loss does not reach is skipped with a warning, as in
  compile_step; one that is reached outside the graph is refused when its gradient arrives. Compile with
  `fullgraph=True`: a graph break, or more recompilations than torch allows, is an error then, and not eager code that
  reduces nothing.
- Gradients of a micro-batch are averaged when its backward pass runs, or, under `fxcomp.no_sync(model)`, with those of
  the next one outside of it. Without, the sum of means is the mean of sums, but everything is sent each time.
- Collectives of the model's own stay where they are. One that ends at a parameter's gradient is its reduction, and is
  never done twice.
- Buffers are not shared after the start: batch norm's running statistics stay each rank's own, unlike DDP's.
- What compression left out, and what else compressors remember, is saved with `compiled_model(model).state_dict()` on
  every rank, and taken back with `.load_state_dict(state)`, as of a compiled step.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.backward_graph import FoundParameters, label_backward
from fxcomp.capture.step_capture import warn_unreached
from fxcomp.errors import (
    CaptureFailed,
    FxcompError,
    ModelsDiffer,
    UnsupportedFeature,
    UnsupportedModel,
    UnsynchronizedGradient,
)
from fxcomp.frontends.backend_options import Options, check_pins, read_options
from fxcomp.frontends.compiled_model import CompiledModel, GivenOptions, digests_of
from fxcomp.frontends.no_sync import Averaging
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.graph.edit import gradients
from fxcomp.graph.uncertain_views import reshape_uncertain_views
from fxcomp.ranks import Ranks
from fxcomp.runtime.members import Members
from fxcomp.step.follower import Follower

log = logging.getLogger(__name__)


# The entry


def fxcomp_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compile what Dynamo found, `gm`, for `example_inputs`: torch.compile calls this.

    `options` may have `compress`, as far as it is about gradients, `cluster`, `costs` and `process_group` as in
    compile_step; `model`, to start all ranks from rank 0's parameters and buffers and to be told of trainable
    parameters that the graph does not reach; `ignore`, names of those that need no reduction; `inductor`, True to let
    Inductor compile both passes, which is usual on CUDA. Without `model`, parameters must start equal, and the first
    backward passes are compared between ranks. Whatever else torch.compile hands over, `unknown`, is refused.
    """
    chosen = read_options(options, unknown)
    _refuse_ddp(chosen.model)
    inductor = chosen.uses_inductor(example_inputs)
    if not _has_others(chosen.step.process_group):
        Ranks.join(chosen.step.cluster, "torch_compile", chosen.step.process_group)
        if chosen.step.compress.pinned:
            check_pins(chosen, FoundParameters.of(gm, example_inputs, chosen.model))
        return _compile(gm, example_inputs, inductor, lambda _, own: own)
    found = FoundParameters.of(gm, example_inputs, chosen.model)
    averaged: list[int] = []
    models: list[CompiledModel] = []

    def compile_backward(graph: GraphModule, own: compat.Backward) -> compat.Backward:
        with compat.real_tensors(), torch.no_grad():
            averaged.extend(found.averaged(graph, chosen.ignore))
            if not averaged:
                return own
            compiled, everywhere = _compile_backward(graph, found, chosen, options, inductor)
            models.append(compiled)
            return lambda values: (everywhere if compiled.averaging.is_due() else compiled.keeping(own))(values)

    run = _compile(gm, example_inputs, inductor, compile_backward)
    return _for_one_model(run, found, averaged, models[0].averaging) if averaged else run


def _has_others(process_group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and len(Members.of(process_group)) > 1


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    inductor: bool,
    backward: Callable[[GraphModule, compat.Backward], compat.Backward],
) -> Callable[..., Any]:
    """Compile both passes. `backward` is given the graph, and the function that it is as long as nothing is sent."""
    if inductor:
        return compat.compile_training_with_inductor(gm, inputs, backward)

    def compile_backward(graph: GraphModule) -> compat.Backward:
        return backward(graph, compat.run_eagerly(reshape_uncertain_views(graph, inputs_are_certain=False)))

    return compat.compile_training(gm, inputs, reshape_uncertain_views, compile_backward)


def _for_one_model(
    run: Callable[..., Any], found: FoundParameters, places: Sequence[int], averaging: Averaging
) -> Callable[..., Any]:
    """Refuse other parameters: torch runs one graph for all models of the same code, shapes and options."""
    expected = [(place, found.names[place], weakref.ref(found.parameters[found.names[place]])) for place in places]

    def checked(*inputs: Any) -> Any:
        for place, name, parameter in expected:
            if inputs[place] is not parameter():
                raise CaptureFailed(
                    f"the parameter {name!r} is another object than when the graph was compiled.\n"
                    '  Give every model its own options={"model": model}; after replacing parameters, call'
                    " torch._dynamo.reset() on all ranks."
                )
        results = run(*inputs)
        averaging.forward_has_run(inputs[expected[0][0]], results)
        return results

    return checked


def _compile_backward(
    graph: GraphModule, found: FoundParameters, chosen: Options, given: GivenOptions, inductor: bool
) -> tuple[CompiledModel, compat.Backward]:
    """The first graph of a model decides on a plan with all ranks; its recompilations follow it, here alone."""
    names = {place: name for place, name in found.names.items() if name not in chosen.ignore}
    compiled = _known(chosen.model, given)
    if compiled is not None:
        labelled = label_backward(graph, names, compiled.members)
        _check_same_parameters(compiled, found, gradients(labelled))
        return compiled, compiled.emit(labelled, inductor)
    with Ranks.meeting(chosen.step.cluster, "torch_compile", chosen.step.process_group) as ranks:
        ranks.attempt("checking options", lambda: check_pins(chosen, found))
        labelled = ranks.attempt("reading the backward graph", lambda: _first_graph(graph, names, found, chosen))
        compiled = _start(labelled, found, chosen, given, ranks)
        emitted = compiled.emit(labelled, inductor)
    reduced = {id(found.parameters[name]) for name in gradients(labelled)}
    compiled.watch(_uncovered(chosen.model, chosen.ignore, reduced) if chosen.model is not None else {})
    _models.append(compiled)
    return compiled, emitted


def _refuse_ddp(model: nn.Module | None) -> None:
    if compat.inside_ddp() or isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedFeature(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself.\n"
            "  Compile the module itself, unwrapped: fxcomp does what the wrapper did."
        )


# One model


_models: list[CompiledModel] = []


def compiled_model(model: nn.Module) -> CompiledModel:
    """Find a model's plan and the state of its error feedback. Raises FxcompError before the first call."""
    mine = {id(parameter) for parameter in model.parameters()}
    for compiled in _models:
        if all(id(parameter()) in mine for parameter in compiled.parameters.values()):
            return compiled
    raise FxcompError(
        "this model has no compiled backward pass yet: it is made by the first call on more than one rank.\n"
        '  Call torch.compile(model, backend="fxcomp") with a batch first, with gradients enabled.'
    )


def reset() -> None:
    """Forget all plans and residuals; torch._dynamo.reset calls it. All ranks must."""
    for compiled in _models:
        compiled.close()
    _models.clear()


fxcomp_backend.reset = reset  # pyright: ignore[reportFunctionMemberAccess]


def _known(model: nn.Module | None, given: Mapping[str, Any] | None) -> CompiledModel | None:
    """The model that a graph belongs to, if it had one before."""
    for compiled in _models:
        if not compiled.is_alive:
            compiled.close()
    _models[:] = [compiled for compiled in _models if compiled.is_alive]
    for compiled in _models:
        if compiled.model is not None and compiled.model() is model:
            return compiled
        if compiled.model is None and model is None and compiled.given is given:
            return compiled
    return None


def _first_graph(graph: GraphModule, names: Mapping[int, str], found: FoundParameters, chosen: Options) -> GraphModule:
    """Label the first graph, and check what can be checked of the model."""
    labelled = label_backward(graph, names, Members.of(chosen.step.process_group))
    reduced = {id(found.parameters[name]) for name in gradients(labelled)}
    devices = {str(found.parameters[name].device): name for name in gradients(labelled)}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise UnsupportedModel(
            f"the model lies on {len(devices)} devices: {where}.\n  Move it to one with model.to(device)."
        )
    if chosen.model is not None:
        uncovered = _uncovered(chosen.model, chosen.ignore, reduced)
        if uncovered and found.break_ is not None:
            _refuse_behind_break(next(iter(uncovered)), found.break_)
        warn_unreached(uncovered)
    elif found.break_ is not None:
        warnings.warn(
            f"fxcomp: the compiled graph ends early, at {found.break_}. Parameters that are used after it get no"
            ' reduction: pass options={"model": model} to be told of them.',
            stacklevel=2,
        )
    return labelled


def _uncovered(model: nn.Module, ignore: Sequence[str], reduced: set[int]) -> dict[str, nn.Parameter]:
    """The trainable parameters that a compiled graph makes no gradient of."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) not in reduced and name not in ignore}


def _refuse_behind_break(name: str, break_: str) -> None:
    raise UnsynchronizedGradient(
        f"the gradient of {name!r} never reaches a collective: the compiled graph does not make it.\n"
        f"  The graph broke at {break_}\n"
        f'  Use it inside the compiled call, set requires_grad=False, or pass "ignore": [{name!r}].'
    )


def _check_same_parameters(compiled: CompiledModel, found: FoundParameters, reduced: Mapping[str, Node]) -> None:
    """A model has one training graph; another shape or mode recompiles it, but does not change its parameters."""
    before = {id(parameter): name for name, ref in compiled.parameters.items() if (parameter := ref()) is not None}
    now = {id(found.parameters[name]): name for name in reduced}
    if before == now:
        return
    changed = next(name for key, name in {**before, **now}.items() if before.get(key) != now.get(key))
    where = f"  The graph broke at {compiled.break_}\n" if compiled.break_ else ""
    advice = "" if compiled.model else '\n  Of two models, each needs its own options={"model": model}.'
    raise CaptureFailed(
        f"a second graph has other trainable parameters than the first: {changed!r} is in one of them only.\n{where}"
        "  Gradients are reduced in one graph: compile with fullgraph=True to find what breaks it. After freezing or"
        f" replacing parameters, call torch._dynamo.reset() on all ranks.{advice}"
    )


def _start(
    labelled: GraphModule, found: FoundParameters, chosen: Options, given: GivenOptions, ranks: Ranks
) -> CompiledModel:
    """Meet the other ranks, start from the same values, and decide on a plan."""
    covered = {name: found.parameters[name] for name in gradients(labelled)}
    shared = _shared(chosen.model, chosen.ignore) if chosen.model is not None else {}
    facts: dict[str, Any] = {f"the shape of {name!r}": list(each.shape) for name, each in {**shared, **covered}.items()}
    facts |= {f"the type of {name!r}": str(each.dtype) for name, each in {**shared, **covered}.items()}
    facts |= {f"a gradient of {name!r}": True for name in covered}
    facts |= {"the option 'inductor'": chosen.inductor}
    shapes = {name: tuple(parameter.shape) for name, parameter in covered.items()}
    here = ModelHere(shapes, next(iter(covered.values())).device, facts, shared.values())
    start = Start.of("torch_compile", ranks, chosen.step, here)
    if chosen.model is None:
        _check_same_start(covered, ranks)
    compiler = start.compiler()
    decision = start.decide(start.planner(compiler, labelled))
    log.info("%s\n%s", start.site.cluster, decision.plan)
    for note in decision.notes:
        log.info("%s", note)
    return CompiledModel(
        Follower(start.trained, decision),
        start.site,
        compiler,
        {name: weakref.ref(parameter) for name, parameter in covered.items()},
        found.break_,
        weakref.ref(chosen.model) if chosen.model is not None else None,
        given,
    )


def _shared(model: nn.Module, ignore: Sequence[str]) -> dict[str, Tensor]:
    """List what all ranks take from rank 0."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in ignore}
    return {**parameters, **dict(model.named_buffers())}


def _check_same_start(parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    digests: Any = digests_of(list(parameters.values()))
    mine: list[int] = digests.tolist()
    everyone = ranks.gather("comparing parameters", mine)
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(parameters, everyone[0], theirs, strict=True):
            if first != other:
                raise ModelsDiffer(
                    f"the parameter {name!r} starts with other values on rank {rank} than on rank 0.\n"
                    '  Seed all ranks alike, or pass options={"model": model}: all then start from rank 0\'s.'
                )
