"""Find the trainable parameters in torch.compile's backward graph, and label their gradients.

Dynamo passes parameters as inputs. Collectives of the user's code stay in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule, Node

from fxcomp import compat
from fxcomp.capture.random_state import drop_idle_states
from fxcomp.errors import Unsupported
from fxcomp.graph.edit import call, clone, is_collective, refresh_value
from fxcomp.graph.info import InputKind, NodeInfo, Role, Source, has_info, info, set_info
from fxcomp.graph.ops import ALL_REDUCE, RNG_STATE, SET_RNG_STATE, WAIT
from fxcomp.graph.uncertain_views import reshape_uncertain_views
from fxcomp.plan.kinds import check_is_trainable
from fxcomp.runtime.members import Members


@dataclass(frozen=True, slots=True)
class FoundParameters:
    """Trainable parameters among a graph's inputs; `break_` has line and reason of a graph break, if any."""

    parameters: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    """Parameter names by input index."""
    break_: str | None

    @classmethod
    def of(cls, gm: GraphModule, inputs: Sequence[Any], model: nn.Module | None) -> FoundParameters:
        """Find the parameters. Names come from `model`; other parameters are named by Dynamo's source."""
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
        """Return the input indices of parameters that get a gradient in `graph`, except names in `ignore`."""
        made = set(compat.gradient_places(graph).values())
        return [place for place, name in self.names.items() if place in made and name not in ignore]


def _name(source: str) -> str:
    """Return `fc.weight` for `L['x']._modules['fc']._parameters['weight']`."""
    steps = [part.partition("'")[0] for part in source.split("['")[1:]]
    return ".".join(steps[1:]) or source


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if compat.is_subclass(parameter):
        raise Unsupported(
            f"the parameter {name!r} is a {type(parameter).__name__}; only plain tensors can be trained.\n"
            "  Compile the model before it is sharded: fxcomp keeps whole replicas."
        )
    check_is_trainable(name, parameter.dtype)


aten = torch.ops.aten


def label_backward(graph: GraphModule, names: Mapping[int, str], members: Members) -> GraphModule:
    """Label the nodes that compute gradients, and return each gradient as an alias.

        %mm  f32[4,2]  aten.mm(%a, %x)
        output(%mm, None)
     -->
        %mm     gradient  f32[4,2]  aten.mm(%a, %x)      fc.weight
        %alias  update    f32[4,2]  aten.alias(%mm)      fc.weight
        output(None, (%alias, None))

    `names` maps input indices to trainable parameters. The ranks in `members` average the gradients. The alias has the
    role update, so it runs after the collective and views the averaged bucket. The step's caller owns that memory.
    """
    gm = reshape_uncertain_views(clone(graph), inputs_are_certain=False)
    _replay_states(gm)
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        set_info(node, NodeInfo(Role.INPUT, source=Source(InputKind.BATCH, index=index)))
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    values: list[Any] = list(returned)
    for place, source in compat.gradient_places(graph).items():
        if values[place] is None:
            continue
        if source is None:
            raise Unsupported(
                "two inputs of the graph share memory and one is written to, so their gradients cannot be separated.\n"
                "  Do not pass a view of a parameter to the compiled function."
            )
        if source in names:
            values[place] = _handed_out(gm, values[place], names[source])
    output.args = ((None, tuple(values)),)
    _keep_exchanges(gm, members)
    _check_operators(gm)
    return gm


def _handed_out(gm: GraphModule, value: Node, name: str) -> Node:
    """Label the node that computes the output `value`. Return the alias that replaces the output."""
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
    gradient = local.meta["val"]
    local.meta["val"] = gradient.new_empty([compat.size_hint(size) for size in gradient.shape])
    with gm.graph.inserting_before(output):
        return call(gm.graph, aten.alias.default, (value,), NodeInfo(Role.UPDATE, name))


def _reduction_behind(value: Node) -> Node | None:
    """Return the user's collective if `value` is its result, possibly scaled; else None."""
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


def _keep_exchanges(gm: GraphModule, members: Members) -> None:
    """Raise if a gradient's collective is not over exactly `members`; label other collectives as the user's."""
    ours: set[Node] = set()
    for node in gm.graph.nodes:
        if not compat.communicates(node.target):
            continue
        carried = node.all_input_nodes[0]
        if is_collective(node) and has_info(carried) and info(carried).role is Role.GRADIENT:
            ours.add(node)
            reduced = Members.of(compat.process_group(str(node.args[-1])))
            if set(reduced.numbers) != set(members.numbers):
                raise Unsupported(
                    f"the gradient of {info(carried).parameter!r} is reduced over {reduced}; fxcomp averages over"
                    f" {members}.\n  Leave the reduction out, or pass its group as process_group=."
                )
        elif carried not in ours:  # a wait for a gradient's collective gets no label
            set_info(node, NodeInfo(Role.EXCHANGE))


def _replay_states(gm: GraphModule) -> None:
    """Expand `run_with_rng_state`, which activation checkpointing uses to repeat draws.

       %out  run_with_rng_state(%state, aten.bernoulli.p, %x, 0.9)
    -->
       %now  rng_state(cpu)
             set_rng_state(%state, cpu)
       %out  aten.bernoulli.p(%x, 0.9)
             set_rng_state(%now, cpu)
    """
    for node in gm.graph.find_nodes(op="call_function", target=compat.RUN_WITH_RNG_STATE):
        state, node.target, *args = node.args
        node.args = tuple(args)
        device = pytree.tree_leaves(refresh_value(node).meta["val"])[0].device
        with gm.graph.inserting_before(node):
            now = gm.graph.call_function(RNG_STATE, (device,))
            before = gm.graph.call_function(SET_RNG_STATE, (state, device))
        with gm.graph.inserting_after(node):
            after = gm.graph.call_function(SET_RNG_STATE, (now, device))
        for line in (now, before, after):
            line.meta["val"] = None  # not read here
            set_info(line, NodeInfo(Role.RANDOM_STATE))
    drop_idle_states(gm)


def _check_operators(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", "")
        plain = compat.is_operator(node.target) or module in ("_operator", "math", "torch")
        if node.op == "call_function" and not plain:
            raise Unsupported(
                f"the backward pass uses {node.target}, which is not a plain operator.\n"
                "  Operators that take functions (loops, branches, flexible attention) are not supported."
            )
