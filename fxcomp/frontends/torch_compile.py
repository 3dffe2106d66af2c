"""The backend of `torch.compile(model, backend="fxcomp")`: a backward pass that ends with averaged gradients.

    forward graph   ─────────────────────────────────────────────────────────► runs as it is
    backward graph  ─► label_backward ─► plan ─► the pipeline's passes ─► emit ─► backward, gradients averaged

The model is not wrapped; the optimizer, the loop and `.grad` stay the user's. What compile_step does with a whole step
happens here with the backward pass alone: waits end with it, and the plan shortens it. Its compute is priced by the
machine's roofline, because a backward graph cannot be timed before there are activations.

Options, all in `options={...}`: `mode`, `plan`, `cluster` and `costs` as in compile_step; `error_feedback`, of which
only what needs no optimizer; `model`, to start all ranks from rank 0's parameters and buffers and to be told of
trainable parameters that the graph does not reach; `ignore`, names of those that need no reduction. Without `model`,
parameters must start equal, and the first backward passes are compared between ranks.

- Gradients are made in one graph. A trainable parameter that the loss does not reach is skipped with a warning, as in
  compile_step; one that is reached outside the graph is refused when its gradient arrives. Compile with
  `fullgraph=True`: a graph break, or more recompilations than torch allows, is an error then, and not eager code that
  reduces nothing.
- Gradients of a micro-batch are averaged when its backward pass runs. Accumulated in `.grad`, the sum of means is the
  mean of sums; error feedback carries over from one micro-batch to the next.
- Collectives of the model's own stay where they are. One that ends at a parameter's gradient is its reduction, and is
  never done twice.
- Buffers are not shared after the start: batch norm's running statistics stay each rank's own, unlike DDP's.
- What compression left out, and what else compressors remember, is saved with `compiled_model(model).state_dict()` on
  every rank, and taken back with `.load_state_dict(state)`, as of a compiled step.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.hooks import RemovableHandle

from fxcomp import compat
from fxcomp.capture.unreached import refuse_gradients, warn_unreached
from fxcomp.cluster.cluster import Cluster
from fxcomp.codegen.emit import emit
from fxcomp.codegen.load import load
from fxcomp.cost.table import CostTable
from fxcomp.errors import (
    BadOption,
    CaptureFailed,
    FxcompError,
    MixedDevices,
    ModelsDiffer,
    UnsupportedFeature,
    UnsupportedParameter,
    UnsynchronizedGradient,
)
from fxcomp.graph.edit import call, clone, gradients, is_collective
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, has_info, info, set_info
from fxcomp.graph.ops import ALL_REDUCE, WAIT
from fxcomp.graph.uncertain_views import reshape_uncertain_views
from fxcomp.pipeline import (
    Decided,
    PassRunner,
    analyze,
    decide_as_told,
    decide_best,
    follow,
    residual_layout,
    state_layout,
)
from fxcomp.plan.error_budget import POLLUTING_SHARE
from fxcomp.plan.error_feedback import CLASSIC, ErrorFeedback, check_experiment, check_plan
from fxcomp.plan.modes import Mode
from fxcomp.plan.plan import Plan
from fxcomp.planning.gather_costs import gathered_costs
from fxcomp.ranks import Ranks
from fxcomp.runtime.runtime import Runtime
from fxcomp.runtime.state import CompressorStates, Residuals
from fxcomp.runtime.transport import Transport
from fxcomp.state.handover import Exchange
from fxcomp.state.saved_state import Carried, Given, Here, read_together, restore
from fxcomp.step.lockstep import Lockstep

log = logging.getLogger(__name__)

aten = torch.ops.aten

COMPARED_PASSES = 3
"""So many backward passes are compared between ranks where the model is not known."""


# The entry


def fxcomp_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compile what Dynamo found. torch.compile calls this; see the top of this file for its options."""
    chosen = _read_options(mode, options, unknown)
    _refuse_ddp(chosen.model)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        Ranks.join(chosen.cluster, "torch_compile")
        return compat.compile_training(gm, example_inputs, reshape_uncertain_views, _run_eagerly)
    found = _Found.of(gm, example_inputs, chosen.model)
    averaged: list[int] = []

    def compile_backward(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
        with compat.real_tensors(), torch.no_grad():
            averaged.extend(found.averaged(graph, chosen.ignore))
            return _compile_backward(graph, found, chosen, options) if averaged else _run_eagerly(graph)

    run = compat.compile_training(gm, example_inputs, reshape_uncertain_views, compile_backward)
    return _for_one_model(run, found, averaged) if averaged else run


def _run_eagerly(backward: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    return compat.run_eagerly(reshape_uncertain_views(backward, inputs_are_certain=False))


def _for_one_model(run: Callable[..., Any], found: _Found, places: Sequence[int]) -> Callable[..., Any]:
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
        return run(*inputs)

    return checked


def _compile_backward(
    graph: GraphModule, found: _Found, chosen: Options, given: Mapping[str, Any] | None
) -> Callable[[list[Any]], Sequence[Any]]:
    """The first graph of a model decides on a plan with all ranks; its recompilations follow it, here alone."""
    names = {place: name for place, name in found.names.items() if name not in chosen.ignore}
    compiled = _known(chosen.model, given)
    if compiled is not None:
        labelled = label_backward(graph, names)
        _check_same_parameters(compiled, found, gradients(labelled))
        return _emitted(labelled, compiled)
    with Ranks.meeting(chosen.cluster, "torch_compile") as ranks:
        labelled = ranks.attempt("reading the backward graph", lambda: _first_graph(graph, names, found, chosen))
        compiled = _start(labelled, found, chosen, given, ranks)
        emitted = _emitted(labelled, compiled)
    reduced = {id(found.parameters[name]) for name in gradients(labelled)}
    compiled.watch(_uncovered(chosen.model, chosen.ignore, reduced) if chosen.model is not None else {})
    _models.append(compiled)
    return emitted


# Options


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    mode: Mode = Mode.BALANCED
    plan: Plan | str | Path | None = None
    cluster: Cluster | None = None
    costs: CostTable | None = None
    model: nn.Module | None = None
    ignore: tuple[str, ...] = ()
    error_feedback: ErrorFeedback = CLASSIC


def _read_options(mode: str | None, options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> Options:
    given: dict[str, Any] = {**(options or {}), **({"mode": mode} if mode is not None else {}), **unknown}
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise BadOption(
                f"there is no option {name!r}; did you mean {close[0]!r}? The options are {', '.join(known)}."
            )
    model, ignore = given.get("model"), given.get("ignore", ())
    if model is not None and not isinstance(model, nn.Module):
        raise BadOption(f"options['model'] must be the module that is compiled; it is a {type(model).__name__}")
    if isinstance(ignore, str) or (ignore and model is None):
        raise BadOption("options['ignore'] is a list of parameter names, and needs options['model'] to find them in")
    if model is not None:
        _check_ignored(model, ignore)
    if "mode" in given:
        given["mode"] = Mode.parse(given["mode"])
    given["ignore"] = tuple(ignore)
    if "error_feedback" in given:
        _check_feedback(given["error_feedback"], planned=given.get("plan") is not None)
    return Options(**given)


def _check_feedback(feedback: object, *, planned: bool) -> None:
    """Only what needs neither the optimizer nor a count of its steps."""
    if not isinstance(feedback, ErrorFeedback):
        raise BadOption(f"options['error_feedback'] must be an ErrorFeedback; it is a {type(feedback).__name__}")
    for name in ("scale_with_lr", "dense_steps", "density_steps", "momentum"):
        if getattr(feedback, name):
            raise BadOption(
                f"ErrorFeedback.{name} needs the optimizer, which torch.compile leaves yours.\n"
                "  Use fxcomp.compile_step, which compiles the whole step."
            )
    check_experiment(feedback, planned=planned)


def _check_ignored(model: nn.Module, ignore: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for name in ignore:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise BadOption(
                f"options['ignore'] names {name!r}, which is no parameter of the model; did you mean {close[0]!r}?"
            )


def _refuse_ddp(model: nn.Module | None) -> None:
    if compat.inside_ddp() or isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedFeature(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself.\n"
            "  Compile the module itself, unwrapped: fxcomp does what the wrapper did."
        )


# The parameters of a graph


@dataclass(frozen=True, slots=True)
class _Found:
    """The trainable parameters among a graph's inputs, and where Dynamo broke off."""

    parameters: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    """By the input's place."""
    break_: str | None

    @classmethod
    def of(cls, gm: GraphModule, inputs: Sequence[Any], model: nn.Module | None) -> _Found:
        owned = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        parameters: dict[str, nn.Parameter] = {}
        names: dict[int, str] = {}
        for place, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            if not isinstance(value, nn.Parameter) or not value.requires_grad:
                continue
            name = owned.get(id(value)) or _name(compat.source_name(node))
            name = node.name if name in parameters else name
            _check_parameter(name, value)
            parameters[name], names[place] = value, name
        return cls(parameters, names, compat.graph_break(gm))

    def averaged(self, graph: GraphModule, ignore: Sequence[str]) -> list[int]:
        """The places of the parameters whose gradients a backward graph makes."""
        made = set(compat.gradient_places(graph).values())
        return [place for place, name in self.names.items() if place in made and name not in ignore]


def _name(source: str) -> str:
    """A parameter's name by its way through modules: `fc.weight` of `L['x']._modules['fc']._parameters['weight']`."""
    steps = [part.partition("'")[0] for part in source.split("['")[1:]]
    return ".".join(steps[1:]) or source


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if compat.is_subclass(parameter):
        raise UnsupportedParameter(
            f"the parameter {name!r} is a {type(parameter).__name__}; only plain tensors can be trained.\n"
            "  Compile the model before it is sharded: fxcomp keeps whole replicas."
        )
    if parameter.dtype is not torch.float32:
        raise UnsupportedParameter(
            f"the parameter {name!r} is {parameter.dtype}; only float32 parameters can be trained.\n"
            "  Keep the parameters in float32 and use torch.autocast around the forward pass."
        )


# The backward graph


def label_backward(graph: GraphModule, names: Mapping[int, str]) -> GraphModule:
    """Say which nodes make the gradients, and hand each out as a copy, because the buffers of a bucket are used again.

        %mm  f32[4,2]  aten.mm(%a, %x)
        output(%mm, None)
     -->
        %mm     gradient  f32[4,2]  aten.mm(%a, %x)      fc.weight
        %clone  update    f32[4,2]  aten.clone(%mm)      fc.weight
        output(None, (%clone, None))

    `names` are the trainable parameters by the place of their input. The copy has the optimizer's role: it follows the
    wait.
    """
    gm = reshape_uncertain_views(clone(graph), inputs_are_certain=False)
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        set_info(node, NodeInfo(Role.INPUT, source=Source(InputKind.BATCH, index=index)))
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    values: list[Any] = list(returned)
    for place, source in compat.gradient_places(graph).items():
        if values[place] is None:
            continue
        if source is None:
            raise UnsupportedFeature(
                "two inputs of the graph share memory and one is written to, so gradients cannot be told apart.\n"
                "  Do not pass a view of a parameter to the compiled function."
            )
        if source in names:
            values[place] = _handed_out(gm, values[place], names[source])
    output.args = ((None, tuple(values)),)
    _keep_exchanges(gm)
    _check_operators(gm)
    return gm


def _handed_out(gm: GraphModule, value: Node, name: str) -> Node:
    """Label the gradient behind an output; returns the copy that takes the output's place."""
    output, reduction = gm.graph.output_node(), _reduction_behind(value)
    local = value if reduction is None else reduction.all_input_nodes[0]
    others = [user for user in local.users if user not in (output, reduction)]
    returned: Any = output.args[0]
    shared = list(returned).count(local) > 1 or bool(others)
    label = NodeInfo(Role.GRADIENT, name)
    if local.op == "call_function" and not shared and not has_info(local):
        set_info(local, label)
    else:
        with gm.graph.inserting_after(local if local.op != "placeholder" else _last_input(gm)):
            alias = call(gm.graph, aten.alias.default, (local,), label)
        if reduction is not None:
            reduction.replace_input_with(local, alias)
        value, local = alias if value is local else value, alias
    local.meta["val"] = _fixed(local.meta["val"])
    with gm.graph.inserting_before(output):
        return call(gm.graph, aten.clone.default, (value,), NodeInfo(Role.UPDATE, name))


def _fixed(gradient: Tensor) -> Tensor:
    """The same fake value with numbers for sizes: a gradient has its parameter's, though tracing may write symbols."""
    return gradient.new_empty([compat.size_hint(size) for size in gradient.shape])


def _reduction_behind(value: Node) -> Node | None:
    """The reduction that the user wrote, whose result an output is; None where there is none."""
    wait = value
    if value.target in (aten.div.Tensor, aten.mul.Tensor) and isinstance(value.args[1], int | float):
        wait = value.args[0]
    reduction = wait.args[0] if isinstance(wait, Node) and wait.target is WAIT else None
    if not isinstance(reduction, Node) or not is_collective(reduction):
        return None
    scaled = wait is not value
    if scaled and not (reduction.target is ALL_REDUCE and reduction.args[1] == "sum"):
        return None
    return reduction


def _last_input(gm: GraphModule) -> Node:
    return list(gm.graph.find_nodes(op="placeholder"))[-1]


def _keep_exchanges(gm: GraphModule) -> None:
    """A collective that reduces a gradient must reach all ranks; any other is the backward pass of the user's own."""
    ours: set[Node] = set()
    for node in gm.graph.nodes:
        if not compat.communicates(node.target):
            continue
        carried = node.all_input_nodes[0]
        if is_collective(node) and has_info(carried) and info(carried).role is Role.GRADIENT:
            ours.add(node)
            if compat.process_group(str(node.args[-1])).size() != dist.get_world_size():
                raise UnsupportedFeature(
                    f"the gradient of {info(carried).parameter!r} is reduced over a part of the ranks.\n"
                    "  Leave the reduction out: fxcomp averages over all ranks."
                )
        elif carried not in ours:  # which it waits for
            set_info(node, NodeInfo(Role.EXCHANGE))


def _check_operators(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", "")
        plain = compat.is_operator(node.target) or module in ("_operator", "math", "torch")
        if node.op == "call_function" and not plain:
            raise UnsupportedFeature(
                f"the backward pass uses {node.target}, which is not a plain operator.\n"
                "  Activation checkpointing around random operators, and operators that take functions, are not"
                " supported."
            )


# One model


@dataclass(slots=True)
class CompiledModel:
    """What all graphs of one model share: the plan, the buffers, and what compression left out."""

    decided: Decided
    cluster: Cluster
    ranks: Ranks
    transport: Transport
    runtime: Runtime
    residuals: Residuals
    compressor_states: CompressorStates
    parameters: Mapping[str, weakref.ref[nn.Parameter]]
    break_: str | None
    model: weakref.ref[nn.Module] | None
    given: Mapping[str, Any] | None
    """The options as they were given: without a model, they tell one call of torch.compile from another."""
    feedback: ErrorFeedback = CLASSIC
    source: str = ""
    """The backward pass that was emitted last."""
    passes: int = 0
    seen: int = 0
    hooks: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    lockstep: Lockstep = field(init=False)

    def __post_init__(self) -> None:
        self.lockstep = Lockstep(self.ranks)

    @property
    def plan(self) -> Plan:
        return self.decided.plan

    @property
    def is_alive(self) -> bool:
        return any(parameter() is not None for parameter in self.parameters.values())

    def watch(self, uncovered: Mapping[str, nn.Parameter]) -> None:
        """Notice gradients that no compiled backward pass averaged: torch falls back to eager code without an error."""
        parameter = next(found for ref in self.parameters.values() if (found := ref()) is not None)
        register = cast("Callable[..., RemovableHandle]", parameter.register_hook)  # pyright: ignore[reportUnknownMemberType]
        self.hooks = [register(self._on_gradient), *refuse_gradients(uncovered)]

    def state_dict(self) -> dict[str, Any]:
        """What error feedback and compressors carry on this rank."""
        return self._carried.state_dict(self.ranks.rank, self.cluster.world_size)

    def load_state_dict(self, state: Given) -> None:
        """Take back what `state_dict` returned, as CompiledStep.load_state_dict does; every rank calls it."""
        self.lockstep.check_open()
        with self.ranks.together("load_state_dict", after_a_stop=True):
            self._load_together(state)

    def _load_together(self, state: Given) -> None:
        def sum_over_ranks(value: Tensor) -> None:
            self.transport.all_reduce(value, "world", "main").wait()

        exchange = Exchange(self.ranks, sum_over_ranks, "load_state_dict", self.residuals.device)
        pairs = [zip(bucket.names, bucket.sizes, strict=True) for bucket in self.plan.buckets]
        trained = dict(itertools.chain(*pairs))
        here = Here(trained, sorted(trained), {self.plan.digest}, self.residuals.slices)
        agreed = read_together(state, here, exchange)
        if agreed is not None:
            self.runtime.undelivered = restore(agreed, self._carried, here, exchange)

    @property
    def _carried(self) -> Carried:
        return Carried(
            self.plan.digest, self.passes, {}, self.residuals, self.compressor_states, None, self.runtime.undelivered
        )

    def close(self) -> None:
        self.lockstep.close(self.runtime)
        for hook in self.hooks:
            hook.remove()

    def _on_gradient(self, _: Tensor) -> None:
        if self.passes == self.seen:
            warnings.warn(
                "fxcomp: a backward pass gave gradients without the compiled graph: they are this rank's own, not"
                " averaged. If torch gave up recompiling, compile with fullgraph=True to see why.",
                stacklevel=2,
            )
        self.seen = self.passes


_models: list[CompiledModel] = []


def compiled_model(model: nn.Module) -> CompiledModel:
    """What was decided for a model, and the state of its error feedback. Raises FxcompError before the first call."""
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


def _first_graph(graph: GraphModule, names: Mapping[int, str], found: _Found, chosen: Options) -> GraphModule:
    """Label the first graph, and check what can be checked of the model."""
    labelled = label_backward(graph, names)
    reduced = {id(found.parameters[name]) for name in gradients(labelled)}
    devices = {str(found.parameters[name].device): name for name in gradients(labelled)}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise MixedDevices(
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


def _check_same_parameters(compiled: CompiledModel, found: _Found, reduced: Mapping[str, Node]) -> None:
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
    labelled: GraphModule, found: _Found, chosen: Options, given: Mapping[str, Any] | None, ranks: Ranks
) -> CompiledModel:
    """Meet the other ranks, start from the same values, and decide on a plan."""
    covered = {name: found.parameters[name] for name in gradients(labelled)}
    shared = _shared(chosen.model, chosen.ignore) if chosen.model is not None else {}
    facts = {f"the shape of {name!r}": list(tensor.shape) for name, tensor in {**shared, **covered}.items()}
    ranks.check_same("comparing models", facts | {f"a gradient of {name!r}": True for name in covered})
    cluster = ranks.cluster_of(chosen.cluster)
    transport = ranks.transport(cluster)
    if chosen.model is not None:
        ranks.share(shared.values())
    else:
        _check_same_start(covered, ranks)
    device = next(iter(covered.values())).device
    decided = _decide(labelled, chosen, cluster, ranks, transport, device)
    shapes = {name: tuple(parameter.shape) for name, parameter in covered.items()}
    check_plan(chosen.error_feedback, decided.plan, shapes, cluster, None)
    log.info("%s\n%s", cluster, decided.plan)
    transport = ranks.extend(transport, decided.plan)
    seed = ranks.from_rank_0("the seed of random compressors", torch.initial_seed)
    return CompiledModel(
        decided,
        cluster,
        ranks,
        transport,
        Runtime(transport, device),
        Residuals(residual_layout(decided.plan, cluster, ranks.rank, chosen.error_feedback), device),
        CompressorStates(state_layout(decided.plan, shapes, cluster, ranks.rank), device, seed),
        {name: weakref.ref(parameter) for name, parameter in covered.items()},
        found.break_,
        weakref.ref(chosen.model) if chosen.model is not None else None,
        given,
        chosen.error_feedback,
    )


def _shared(model: nn.Module, ignore: Sequence[str]) -> dict[str, Tensor]:
    """What all ranks take from rank 0."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in ignore}
    return {**parameters, **dict(model.named_buffers())}


def _check_same_start(parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    digests: Any = _digests(list(parameters.values()))
    mine: list[int] = digests.tolist()
    everyone = ranks.gather("comparing parameters", mine)
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(parameters, everyone[0], theirs, strict=True):
            if first != other:
                raise ModelsDiffer(
                    f"the parameter {name!r} starts with other values on rank {rank} than on rank 0.\n"
                    '  Seed all ranks alike, or pass options={"model": model}: all then start from rank 0\'s.'
                )


def _decide(
    labelled: GraphModule, chosen: Options, cluster: Cluster, ranks: Ranks, transport: Transport, device: torch.device
) -> Decided:
    if chosen.plan is not None:
        costs = chosen.costs or CostTable()
        return decide_as_told(chosen.plan, analyze(labelled, costs, cluster), costs, cluster, ranks)
    costs = chosen.costs
    if costs is None:
        costs = gathered_costs(ranks, cluster, transport, device)
    # The optimizer is not known and may be Adam, which a plan of the user's own choice must fit too.
    return decide_best(chosen.mode, analyze(labelled, costs, cluster), costs, cluster, ranks, POLLUTING_SHARE)


# Running


def _emitted(labelled: GraphModule, compiled: CompiledModel) -> Callable[[list[Any]], Sequence[Any]]:
    """Rewrite a graph for the model's plan and make it a function. Local: no communication."""
    costs, feedback = compiled.decided.costs, compiled.feedback
    run = PassRunner(remembers=False)
    final = follow(run, compiled.plan, labelled, costs, compiled.cluster, compiled.ranks.rank, feedback)
    compiled.source = emit(final, title="One backward pass, gradients averaged")
    log.debug("%s", compiled.source)
    module = load(compiled.source, final, compat.cache_directory() / "steps")
    sources = [info(node).source for node in final.graph.find_nodes(op="placeholder")]
    residuals, states = (
        [kept.of_bucket(source.index) for source in sources if source is not None and source.kind is kind]
        for kind, kept in (
            (InputKind.RESIDUAL, compiled.residuals),
            (InputKind.COMPRESSOR_STATE, compiled.compressor_states),
        )
    )
    returned: Any = final.graph.output_node().args[0]
    outputs: list[Any] = list(returned[1])
    copies = [node for node in final.graph.nodes if info(node).role is Role.UPDATE]
    places = {str(info(node).parameter): outputs.index(node) for node in copies}

    def backward(values: list[Any]) -> Sequence[Any]:
        given = tuple(values)
        values.clear()
        with torch.no_grad():
            _, results = module.step(compiled.runtime, (), (), (), (), (), residuals, states, given)
            compiled.runtime.finish()
            compiled.runtime.undelivered.clear()
            compiled.passes += 1
            if compiled.model is None and compiled.passes <= COMPARED_PASSES:
                _compare(compiled, {name: results[place] for name, place in places.items()})
        return results

    def together(values: list[Any]) -> Sequence[Any]:
        compiled.lockstep.enter(compiled.passes)
        compiled.lockstep.has_begun = True
        try:
            return backward(values)
        except BaseException as error:
            compiled.lockstep.leave(error, compiled.runtime)
            raise

    return together


def _compare(compiled: CompiledModel, averaged: Mapping[str, Tensor]) -> None:
    """Raise on every rank if averaged gradients, or the parameters that they are for, differ between ranks."""
    parameters = [parameter for name in averaged if (parameter := compiled.parameters[name]()) is not None]
    mine = _digests([*averaged.values(), *parameters])
    everyone = mine.new_empty(compiled.cluster.world_size * mine.numel())
    compiled.transport.all_gather(mine, everyone, "world", "main").wait()
    rows = everyone.view(-1, mine.numel())
    unequal: Any = (rows != rows[0]).any(0)
    differs: list[bool] = unequal.tolist()
    whats = [f"{what} {name!r}" for what in ("averaged gradient of", "parameter") for name in averaged]
    for what, bad in zip(whats, differs, strict=True):
        if bad:
            raise UnsynchronizedGradient(
                f"the {what} differs between ranks, so replicas drift apart.\n"
                "  Something outside the compiled call changes it or adds to its gradient: use the parameter inside,"
                " and step equal optimizers on all ranks."
            )


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each fp32 tensor that any changed bit changes, almost surely."""
    return torch.stack([_digest(tensor.detach()) for tensor in tensors])


def _digest(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64)
