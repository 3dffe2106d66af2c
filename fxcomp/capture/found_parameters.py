"""Find the trainable parameters among the inputs of a graph that Dynamo hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxcomp import compat
from fxcomp.errors import UnsupportedParameter
from fxcomp.plan.element_type import check_is_trainable


@dataclass(frozen=True, slots=True)
class FoundParameters:
    """The trainable parameters among a graph's inputs, and where Dynamo broke off."""

    parameters: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    """By the input's place."""
    break_: str | None

    @classmethod
    def of(cls, gm: GraphModule, inputs: Sequence[Any], model: nn.Module | None) -> FoundParameters:
        """Find them; those of a known model keep its names."""
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
        """Find the places of the parameters whose gradients a backward graph makes."""
        made = set(compat.gradient_places(graph).values())
        return [place for place, name in self.names.items() if place in made and name not in ignore]


def _name(source: str) -> str:
    """Name a parameter by its way through modules: `fc.weight` of `L['x']._modules['fc']._parameters['weight']`."""
    steps = [part.partition("'")[0] for part in source.split("['")[1:]]
    return ".".join(steps[1:]) or source


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if compat.is_subclass(parameter):
        raise UnsupportedParameter(
            f"the parameter {name!r} is a {type(parameter).__name__}; only plain tensors can be trained.\n"
            "  Compile the model before it is sharded: fxcomp keeps whole replicas."
        )
    check_is_trainable(name, parameter.dtype)
