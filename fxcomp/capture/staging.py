"""Put questions into stages: what cannot fail is computed together, and read at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxcomp import compat
from fxcomp.graph.prelude import BatchQuestion, Feed, Prelude, QuestionStage


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the nodes whose numbers answer it."""

    where: str
    text: str
    answer_of: Callable[[Mapping[str, Any]], Any]
    numbers: Mapping[str, Node]
    answer: Any
    nodes: Sequence[Node]
    """Nodes that make the numbers, in order: keep all of them, because some write."""


def staged(root: nn.Module, fed: Mapping[Node, Feed], asked: Sequence[Asked]) -> Prelude:
    """Make the prelude of questions that were asked one after the other."""
    computed: set[Node] = set(fed)
    parts: list[tuple[list[Node], list[Asked]]] = []
    for question in asked:
        new = [node for node in question.nodes if node not in computed]
        computed.update(new)
        if not parts or any(map(compat.can_fail, new)):
            parts.append(([], []))
        nodes, questions = parts[-1]
        nodes += new
        questions.append(question)
    places = {node: place for place, node in enumerate(fed)}
    stages: list[QuestionStage] = []
    for number, (nodes, questions) in enumerate(parts):
        later = {node for part, others in parts[number + 1 :] for node in _used(part, others)}
        stages.append(_stage(root, nodes, questions, [node for node in nodes if node in later], places))
    return Prelude(list(fed.values()), stages)


def _used(nodes: Sequence[Node], questions: Sequence[Asked]) -> list[Node]:
    """List what the nodes of a stage are made of, and what is read of it."""
    used = [made_of for node in nodes for made_of in node.all_input_nodes]
    return used + [node for question in questions for node in question.numbers.values()]


def _stage(
    root: nn.Module, nodes: Sequence[Node], questions: Sequence[Asked], kept: Sequence[Node], places: dict[Node, int]
) -> QuestionStage:
    graph = Graph()
    copies: dict[Node, Node] = {}
    taken = [node for node in dict.fromkeys(_used(nodes, questions)) if node in places]
    for node in taken:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    read = list(dict.fromkeys(node for question in questions for node in question.numbers.values()))
    graph.output(tuple(copies[node] for node in (*read, *kept)))
    takes = tuple(places[node] for node in taken)
    for node in kept:
        places[node] = len(places)
    made = tuple(
        BatchQuestion(q.where, q.text, q.answer_of, {name: read.index(n) for name, n in q.numbers.items()}, q.answer)
        for q in questions
    )
    return QuestionStage(GraphModule(root, graph).forward, takes, made, len(read))
