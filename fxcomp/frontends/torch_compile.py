"""Backend "fxcomp" of `torch.compile`: average gradients inside the compiled backward pass.

    forward graph   ─────────────────────────────────────────────────────────► eager or Inductor
    backward graph  ─► label_backward ─► plan ─► the pipeline's passes ─► emit ─► backward with averaged gradients

Collectives overlap only with the backward pass. Compute is priced by the machine's roofline, because a backward graph
cannot be timed before activations exist.

- All gradients are made in one graph. A trainable parameter that the loss does not reach is skipped with a warning. The
  gradient of a parameter that is used outside the graph raises when it arrives.
- `compile_model` watches every parameter, so eager code that averages nothing raises (`gradient_watch.py`). With the
  backend alone, the watch starts at the first graph.
- Each set of trained parameters has its own plan. All ranks must freeze or unfreeze parameters at the same call.
  Residuals move to the next plan.
- Each backward pass averages its gradients, unless its forward pass ran under `fxcomp.no_sync(model)`.
- A gradient that one of the model's own collectives reduces is not reduced again.
- Buffers are broadcast at the start only, unlike in DDP.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.backward_graph import FoundParameters, label_backward
from fxcomp.capture.step_capture import warn_unreached
from fxcomp.errors import BadOption, CaptureFailed, FxcompError, ReplicasDiffer, Unsupported
from fxcomp.frontends.backend_options import Options, check_pins, read_options
from fxcomp.frontends.compiled_model import CompiledModel, GivenOptions, without_model
from fxcomp.frontends.gradient_watch import GradientWatch, has_others
from fxcomp.frontends.no_sync import Averaging
from fxcomp.frontends.start import ModelHere, Start
from fxcomp.graph.edit import gradients
from fxcomp.graph.uncertain_views import reshape_uncertain_views
from fxcomp.plan.compress import GivenCompress
from fxcomp.ranks import Ranks
from fxcomp.runtime.arrivals import digest_of
from fxcomp.runtime.members import Members
from fxcomp.step.follower import Follower

log = logging.getLogger(__name__)

WHAT = "torch_compile"


# The entries


def compile_model(
    model: nn.Module,
    compress: GivenCompress = "balanced",
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Compile a model with torch.compile for data-parallel training, and check that every gradient is averaged.

    Call the returned module in place of `model`. All ranks start from rank 0's parameters and buffers. `compress` is as
    in compile_step, without optimizer settings. `options` of the backend are `cluster`, `costs`, `process_group`,
    `ignore` and `inductor`. `fullgraph` and `dynamic` are passed to torch.compile.

    If torch runs the model eagerly, a gradient raises CaptureFailed (or the backend's error that torch suppressed)
    before it is added to `.grad`, and PeerFailed on the waiting ranks. Deep copies of the model are not watched, nor
    are parameters that are replaced later: compile again. Raises BadOption and Unsupported.
    """
    module: Any = getattr(model, "_orig_mod", model)
    if not isinstance(module, nn.Module):
        raise BadOption(f"compile_model takes a torch.nn.Module; it is a {type(module).__name__}")
    given: dict[str, Any] = {**options, "compress": compress, "model": module}
    chosen = read_options(given, {})
    _refuse_ddp(module)
    _refuse_scripts(module)
    _refuse_suppressed_errors()
    watch = _watches.get(module)
    if watch is None or watch.process_group is not chosen.step.process_group:
        if watch is not None:
            watch.lift()
        watch = _watches[module] = _new_watch(module, given)
    watch.lay(dict(module.named_parameters()), chosen.ignore)
    ours = fxcomp_backend
    return cast("Any", torch).compile(module, backend=ours, fullgraph=fullgraph, dynamic=dynamic, options=given)


def fxcomp_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """Compile the graph `gm` for `example_inputs`; torch.compile calls this function.

    `options` may contain `compress`, `cluster`, `costs` and `process_group` as in compile_step; `model`, to start all
    ranks from rank 0's parameters and buffers and to warn about trainable parameters outside the graph; `ignore`, names
    of parameters that need no reduction; and `inductor`, True to compile both passes with Inductor (the default on
    CUDA). Without `model`, parameters must start equal. Other arguments of torch.compile, `unknown`, raise BadOption.
    """
    watch = _watch_on(gm, example_inputs, options)
    watch.forget()
    met = Ranks.meetings()
    try:
        return _compile_graph(gm, example_inputs, read_options(options, unknown), options, watch)
    except Exception as error:
        if compat.is_restart(error):
            raise
        kept = error if isinstance(error, FxcompError) else _not_compiled(error)
        watch.keep(kept)
        if watch.is_of_graph and not compat.suppresses_errors():
            watch.lift()
        if Ranks.meetings() == met:  # in a meeting, the other ranks already have the error
            watch.tell(kept)
        if kept is error:
            raise
        raise kept from error


def _compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], chosen: Options, given: GivenOptions, watch: GradientWatch
) -> Callable[..., Any]:
    _refuse_ddp(chosen.model)
    _refuse_suppressed_errors()
    inductor = chosen.uses_inductor(example_inputs)
    if not has_others(chosen.step.process_group):
        Ranks.join(chosen.step.cluster, WHAT, chosen.step.process_group)
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
            compiled, everywhere = _compile_backward(graph, found, chosen, given, inductor, watch)
            models.append(compiled)

        def run(values: list[Any]) -> Sequence[Any]:
            if not compiled.averaging.is_due():
                return compiled.keeping(own)(values)
            _take_turn(compiled)
            return everywhere(values)

        return run

    run = _compile(gm, example_inputs, inductor, compile_backward)
    return _for_one_model(run, found, averaged, models[0]) if averaged else run


def _not_compiled(error: Exception) -> CaptureFailed:
    return CaptureFailed(
        f"torch could not compile the model for training: {type(error).__name__}: {error}\n"
        '  See whether torch.compile(model, backend="aot_eager", fullgraph=True) can; if so, please report this.'
        " fxcomp.ddp_hook compresses under eager DistributedDataParallel."
    )


def _refuse_scripts(model: nn.Module) -> None:
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(cast("object", module), torch.jit.ScriptModule) and any(
            p.requires_grad for p in module.parameters()
        ):
            raise Unsupported(
                f"{f'the module {name!r}' if name else 'the model'} is a {type(module).__name__} of torch.jit, which"
                " torch.compile runs eagerly: each rank would train it alone.\n"
                "  Compile the model without torch.jit.script and torch.jit.trace, and script it after training. To"
                " train it as it is, wrap it in DistributedDataParallel and use fxcomp.ddp_hook."
            )


def _refuse_suppressed_errors() -> None:
    if compat.suppresses_errors():
        raise Unsupported(
            "torch._dynamo.config.suppress_errors is on: where a graph is refused torch would run eager code, and each"
            " rank train alone.\n  Set it to False (and unset TORCHDYNAMO_SUPPRESS_ERRORS)."
        )


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    inductor: bool,
    backward: Callable[[GraphModule, compat.Backward], compat.Backward],
) -> Callable[..., Any]:
    """Compile both passes. `backward(graph, own)` returns the function to run; `own` is the pass without averaging."""
    if inductor:
        return compat.compile_training_with_inductor(gm, inputs, backward)

    def compile_backward(graph: GraphModule) -> compat.Backward:
        return backward(graph, compat.run_eagerly(reshape_uncertain_views(graph, inputs_are_certain=False)))

    return compat.compile_training(gm, inputs, reshape_uncertain_views, compile_backward)


def _for_one_model(
    run: Callable[..., Any], found: FoundParameters, places: Sequence[int], compiled: CompiledModel
) -> Callable[..., Any]:
    """Raise if a call passes parameters other than at compilation, because torch shares graphs between equal models."""
    expected = [(place, found.names[place], weakref.ref(found.parameters[found.names[place]])) for place in places]

    def checked(*inputs: Any) -> Any:
        for place, name, parameter in expected:
            if inputs[place] is not parameter():
                error = CaptureFailed(
                    f"the parameter {name!r} is another object than when the graph was compiled.\n"
                    '  Give every model its own options={"model": model}, as fxcomp.compile_model does; after replacing'
                    " parameters, call torch._dynamo.reset() on all ranks."
                )
                compiled.fail(error)
                raise error
        results = run(*inputs)
        compiled.averaging.forward_has_run(inputs[expected[0][0]], results)
        return results

    return checked


def _compile_backward(
    graph: GraphModule,
    found: FoundParameters,
    chosen: Options,
    given: GivenOptions,
    inductor: bool,
    watch: GradientWatch,
) -> tuple[CompiledModel, compat.Backward]:
    """Plan with all ranks at the first graph of a model. Recompilations reuse the plan without communication."""
    names = {place: name for place, name in found.names.items() if name not in chosen.ignore}
    known = _known(chosen.model, given)
    what = WHAT
    if known:
        _check_same_options(known[0], given)
        what = known[0].next_meeting
        labelled = label_backward(graph, names, known[0].members)
        mine = {id(found.parameters[name]) for name in gradients(labelled)}
        for compiled in known:
            trained = {id(each) for known in compiled.parameters.values() if (each := known()) is not None}
            if trained == mine:
                _check_same_elements(compiled, found)
                return compiled, compiled.emit(labelled, inductor)
        _check_thawed(known[-1], found, gradients(labelled))
    with Ranks.meeting(chosen.step.cluster, what, chosen.step.process_group) as ranks:
        ranks.attempt("checking options", lambda: check_pins(chosen, found))
        labelled = ranks.attempt("reading the backward graph", lambda: _first_graph(graph, names, found, chosen))
        compiled = _start(labelled, found, chosen, given, ranks, watch, known)
        emitted = compiled.emit(labelled, inductor)
    _models.insert(0, compiled)  # first, because it has not run yet
    return compiled, emitted


def _check_same_options(compiled: CompiledModel, given: GivenOptions) -> None:
    if compiled.model is not None and compiled.given != without_model(given):
        raise BadOption(
            "the model has been compiled with other options before, and has a plan by those.\n"
            "  Call torch._dynamo.reset() on all ranks, and compile_model after it."
        )


def _refuse_ddp(model: nn.Module | None) -> None:
    if compat.inside_ddp() or isinstance(model, nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself.\n"
            "  Compile the module itself, unwrapped: fxcomp replaces the wrapper."
        )


# One model


_models: list[CompiledModel] = []
"""Compiled models, the most recently run last."""

_watches = weakref.WeakKeyDictionary[nn.Module, GradientWatch]()


def compiled_model(model: nn.Module) -> CompiledModel:
    """Return a model's plan and error-feedback state. Raises FxcompError before the first call.

    If several sets of parameters were trained, return the state of the set that ran last.
    """
    mine = {id(parameter) for parameter in model.parameters()}
    for compiled in reversed(_models):
        if all(id(parameter()) in mine for parameter in compiled.parameters.values()):
            return compiled
    raise FxcompError(
        "this model has no compiled backward pass yet: it is made by the first call on more than one rank.\n"
        "  First call the model that fxcomp.compile_model(model) returns with a batch, with gradients enabled."
    )


def reset() -> None:
    """Forget all plans and residuals, as part of torch._dynamo.reset. Must run on every rank."""
    for compiled in _models:
        compiled.close()
    _models.clear()


fxcomp_backend.reset = reset  # pyright: ignore[reportFunctionMemberAccess]


def _known(model: nn.Module | None, given: Mapping[str, Any] | None) -> list[CompiledModel]:
    """Return a model's CompiledModels, one per set of trained parameters, the most recently run last."""
    for compiled in _models:
        if not compiled.is_alive:
            compiled.close()
    _models[:] = [compiled for compiled in _models if compiled.is_alive]
    if model is not None:
        return [compiled for compiled in _models if compiled.model is not None and compiled.model() is model]
    return [compiled for compiled in _models if compiled.model is None and compiled.given is given]


def _take_turn(compiled: CompiledModel) -> None:
    """Make a plan current, and move residuals to this plan from the model's more recently run plans."""
    if compiled not in _models or _models[-1] is compiled:  # not in _models: closed, so running it raises
        return
    place = _models.index(compiled)
    for later in _models[place + 1 :]:
        if later.averaging is compiled.averaging:
            compiled.take_over(later)
    _models.append(_models.pop(place))


def _watch_on(gm: GraphModule, inputs: Sequence[Any], given: GivenOptions) -> GradientWatch:
    """Return the watch of the parameters of a graph; start one if torch.compile was called directly."""
    model = (given or {}).get("model")
    if known := _known(model, given):
        return known[-1].watch
    if isinstance(model, nn.Module) and (found := _watches.get(model)) is not None:
        return found
    watch = _new_watch(model, given, is_of_graph=True)
    named = model.named_parameters() if isinstance(model, nn.Module) else _graph_parameters(gm, inputs)
    watch.lay(dict(named), (given or {}).get("ignore", ()))
    if has_others((given or {}).get("process_group")):
        warnings.warn(
            'fxcomp: torch.compile(model, backend="fxcomp") cannot see parameters that never reach it: where torch'
            " makes no graph each rank trains alone, without an error.\n"
            "  Use fxcomp.compile_model(model), which watches every parameter.",
            stacklevel=2,
        )
    return watch


def _new_watch(model: object, given: GivenOptions, *, is_of_graph: bool = False) -> GradientWatch:
    of_model = weakref.ref(model) if isinstance(model, nn.Module) else None
    group, given = (given or {}).get("process_group"), None if of_model else given

    def tell(error: FxcompError) -> None:
        """Pass an error to the ranks that wait in a backward pass or a meeting."""
        known = _known(of_model() if of_model else None, given)
        for compiled in known:
            compiled.fail(error)
        Ranks.stay_away(known[0].next_meeting if known else WHAT, group, error)

    return GradientWatch(group, tell, is_of_graph)


def _graph_parameters(gm: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, nn.Parameter):
            yield node.name, value


def _first_graph(graph: GraphModule, names: Mapping[int, str], found: FoundParameters, chosen: Options) -> GraphModule:
    labelled = label_backward(graph, names, Members.of(chosen.step.process_group))
    reduced = {id(found.parameters[name]) for name in gradients(labelled)}
    devices = {str(found.parameters[name].device): name for name in gradients(labelled)}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise Unsupported(
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
            ' reduction: pass options={"model": model} to have them checked.',
            stacklevel=2,
        )
    return labelled


def _uncovered(model: nn.Module, ignore: Sequence[str], reduced: set[int]) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) not in reduced and name not in ignore}


def _refuse_behind_break(name: str, break_: str) -> None:
    raise CaptureFailed(
        f"the gradient of {name!r} never reaches a collective: the compiled graph does not make it.\n"
        f"  The graph broke at {break_}\n"
        f'  Use it inside the compiled call, set requires_grad=False, or pass "ignore": [{name!r}].'
    )


def _check_same_elements(compiled: CompiledModel, found: FoundParameters) -> None:
    shapes, types = compiled.follower.trained.shapes, compiled.follower.decision.workload.types
    for name in compiled.parameters:
        now = found.parameters[name]
        if tuple(now.shape) != tuple(shapes[name]) or now.dtype is not types[name].dtype:
            raise CaptureFailed(
                f"the parameter {name!r} was resized or cast after the model was compiled: it is {now.dtype} of"
                f" {list(now.shape)} now, and was {types[name].dtype} of {list(shapes[name])}.\n"
                "  Call torch._dynamo.reset() and compile_model again, on all ranks."
            )


def _check_thawed(compiled: CompiledModel, found: FoundParameters, reduced: Mapping[str, Node]) -> None:
    """Raise CaptureFailed unless trained parameters differ from `compiled` only by freezing or unfreezing."""
    before = {id(parameter): name for name, ref in compiled.parameters.items() if (parameter := ref()) is not None}
    now = {id(found.parameters[name]): name for name in reduced}
    if compiled.model is not None:
        frozen = {name for name, ref in compiled.parameters.items() if (p := ref()) is None or not p.requires_grad}
        thawed = {name for key, name in now.items() if key not in before}
        if {name for key, name in before.items() if key not in now} <= frozen and thawed <= compiled.frozen:
            return
    changed = next(name for key, name in {**before, **now}.items() if before.get(key) != now.get(key))
    where = f"  The graph broke at {compiled.break_}\n" if compiled.break_ else ""
    advice = "" if compiled.model else "\n  Of two models, each needs fxcomp.compile_model."
    raise CaptureFailed(
        f"a second graph has other trainable parameters than the first: {changed!r} is in one of them only.\n{where}"
        "  Gradients are reduced in one graph: compile with fullgraph=True to find the graph break. After adding or"
        f" replacing parameters, call torch._dynamo.reset() and compile again, on all ranks.{advice}"
    )


def _start(
    labelled: GraphModule,
    found: FoundParameters,
    chosen: Options,
    given: GivenOptions,
    ranks: Ranks,
    watch: GradientWatch,
    known: Sequence[CompiledModel],
) -> CompiledModel:
    """Compare the model between ranks, share rank 0's values, and choose a plan."""
    covered = {name: found.parameters[name] for name in gradients(labelled)}
    watch.lay(covered)
    shared = _shared(chosen.model, chosen.ignore) if chosen.model is not None and not known else {}
    facts: dict[str, Any] = {f"the shape of {name!r}": list(each.shape) for name, each in {**shared, **covered}.items()}
    facts |= {f"the type of {name!r}": str(each.dtype) for name, each in {**shared, **covered}.items()}
    facts |= {f"a gradient of {name!r}": True for name in covered}
    facts |= {"the option 'inductor'": chosen.inductor}
    shapes = {name: tuple(parameter.shape) for name, parameter in covered.items()}
    here = ModelHere(shapes, next(iter(covered.values())).device, facts, shared.values())
    start = Start.of(WHAT, ranks, chosen.step, here)
    if chosen.model is None:
        _check_same_start(covered, ranks)
    named = chosen.model.named_parameters() if chosen.model is not None else ()
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
        given if chosen.model is None else without_model(given),
        watch,
        frozenset(name for name, parameter in named if not parameter.requires_grad),
        known[-1].averaging if known else Averaging(),
    )


def _shared(model: nn.Module, ignore: Sequence[str]) -> dict[str, Tensor]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in ignore}
    return {**parameters, **dict(model.named_buffers())}


def _check_same_start(parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    mine = [int(digest_of(parameter)) for parameter in parameters.values()]
    everyone = ranks.gather("comparing parameters", mine)
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(parameters, everyone[0], theirs, strict=True):
            if first != other:
                raise ReplicasDiffer(
                    f"the parameter {name!r} starts with other values on rank {rank} than on rank 0.\n"
                    '  Seed all ranks alike, or pass options={"model": model}: all then start from rank 0\'s.'
                )
