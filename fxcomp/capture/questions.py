"""Answer Python's questions about values during tracing, from the batch, buffers and frozen parameters.

If Python branches on a data-dependent number, the nodes that compute it are copied, run on the real batch, and kept as
a *prelude* of the step (`fxcomp.graph.prelude`), which repeats the questions before each step. A question is the whole
condition, as `lengths.max().item() <= 16`, not the number in it.

    %sum    = sum(%batch_0)
    add_(%count, 1)               count is a buffer, and differs from its input value from here on
    %view   = view(%count, [1])
    %ge     = ge(%view, 3)        the question; the prelude copies add_, view, ge
"""

# values of any type
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fxcomp import compat
from fxcomp.graph.captured import written_nodes
from fxcomp.graph.prelude import BatchQuestion, Feed, Prelude, QuestionStage


def ancestry(end: Node) -> list[Node]:
    """List the nodes that a node depends on, including itself, in order.

    A node that writes to the storage of a needed value counts as a dependency. Valid during tracing only, while fake
    tensors share storages as the real tensors do.
    """
    needed: set[Node] = {end}
    memory: set[StorageWeakRef] = set()
    found: list[Node] = []
    node = end
    while node.op != "root":
        if node in needed or any(place in memory for place in written(node)):
            found.append(node)
            for made_of in node.all_input_nodes:
                needed.add(made_of)
                memory.update(storages(made_of))
        node = node.prev
    return found[::-1]


def storages(node: Node) -> Iterator[StorageWeakRef]:
    return _storages_of(node.meta.get("val"))


def written(node: Node) -> Iterator[StorageWeakRef]:
    for argument in written_nodes(node):
        yield from storages(argument)


def _storages_of(value: Any) -> Iterator[StorageWeakRef]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield StorageWeakRef(leaf.untyped_storage())


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its answer while tracing, and the nodes that compute its numbers."""

    where: str
    text: str
    answer_of: Callable[[Mapping[str, Any]], Any]
    numbers: Mapping[str, Node]
    answer: Any
    nodes: Sequence[Node]
    """Nodes that compute the numbers, in order; some may write in place."""


def staged(root: nn.Module, fed: Mapping[Node, Feed], asked: Sequence[Asked]) -> Prelude:
    """Build the prelude. Nodes that can fail start a new stage: it runs only if earlier answers are unchanged."""
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


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Given:
    """Value of one argument of the traced function."""

    value: Any
    feed: Feed | None
    """Function from the batch's leaves to the value, called before each step.

    None for trained parameters and the loss scale.
    """


@dataclass(slots=True)
class _Copies:
    """Copies of nodes that do not depend on in-place writes. All questions share the copies."""

    tracer: Any = None
    of: dict[Node, Node] = field(default_factory=dict[Node, Node])
    makers: dict[str, tuple[Node, int | None]] = field(default_factory=dict[str, tuple[Node, int | None]])
    """Node that created each symbol, and the dimension if the symbol is a size, else None."""
    seen: Node | None = None


class Questions:
    """Questions and answers from tracing one step."""

    def __init__(self, givens: Sequence[Given]):
        self._givens = givens
        self._uses_onednn = compat.uses_onednn()
        self._graph, self._root = Graph(), nn.Module()
        self._copies = _Copies()
        self._known: dict[str, Node] = {}
        """Copies that questions share, keyed by a description."""
        self._values: dict[Node, Any] = {}
        self._fed: dict[Node, Feed] = {}
        self._parts: dict[Node, list[Node]] = {}
        """Copies of all dependencies of each copy that is computed with in-place writes."""
        self._asked: dict[str, Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def follow(self, tracer: Any) -> None:
        """Look up the nodes of later questions in the trace of `tracer`."""
        self._copies = _Copies(tracer)

    def answer(self, expression: compat.Expression) -> Any:
        """Evaluate an expression of symbols on the real batch; None if it cannot be computed before the step."""
        evaluator = compat.evaluator(expression)
        made = {name: self._number(name) for name in compat.symbols_of(expression)} if evaluator is not None else {}
        if evaluator is None or None in made.values():
            return None
        numbers = {name: node for name, node in made.items() if node is not None}
        text, answer_of = evaluator
        values = {name: self._values[node] for name, node in numbers.items()}
        answer = answer_of({n: v.item() if isinstance(v, Tensor) else v for n, v in values.items()})
        key = f"{text} {numbers}"
        if key not in self._asked:
            where = compat.users_line() or "the loss function"
            nodes = self._made_by(numbers.values())
            self._asked[key] = Asked(where, text, answer_of, numbers, answer, nodes)
        return answer

    def value_of(self, tensor: Tensor, *, of_batch: bool) -> Tensor | None:
        """Return a tensor's values if the step's inputs and draws do not affect them, else None.

        With `of_batch`, the batch, buffers and frozen parameters may affect them.
        """
        node = compat.node_of(tensor)
        nodes = ancestry(node)
        may_be = of_batch or not any(each.op == "placeholder" for each in nodes)
        copy = self._copy_of(node, nodes) if may_be else None
        return None if copy is None else self._values[copy]

    def prelude(self) -> Prelude | None:
        if not self._asked:
            return None
        return staged(self._root, self._fed, list(self._asked.values()))

    # Numbers

    def _number(self, symbol: str) -> Node | None:
        self._search()
        maker, dim = self._copies.makers.get(symbol, (None, None))
        if maker is None:
            return None
        if dim is None:
            tensor = maker.args[0]
            return self._copy_of(tensor, ancestry(maker)[:-1]) if isinstance(tensor, Node) else None
        made = self._copy_of(maker, ancestry(maker))
        return None if made is None else self._shared(aten.sym_size.int, (made, dim), {})

    def _search(self) -> None:
        copies = self._copies
        if copies.tracer is None:
            return
        nodes = copies.tracer.graph._root
        node = (copies.seen or nodes).next
        while node is not nodes:
            value = node.meta.get("val")
            if node.target is aten._local_scalar_dense.default and (name := compat.as_symbol(value)):
                copies.makers.setdefault(name, (node, None))
            if isinstance(value, Tensor):
                for dim, size in enumerate(value.shape):
                    if name := compat.as_symbol(size):
                        copies.makers.setdefault(name, (node, dim))
            copies.seen, node = node, node.next

    # Copies

    def _copy_of(self, end: Node, nodes: Sequence[Node]) -> Node | None:
        """Copy a node with its dependencies, and compute the copies' values.

        Return None if a dependency cannot run before the step: it draws, communicates, or reads a trained parameter.
        """
        if not all(map(self._may_be_asked, nodes)):
            return None
        changed = {place for node in nodes for place in written(node)}
        entries = [node for node in nodes if node.op in ("placeholder", "get_attr") and changed & set(storages(node))]
        if len({place for node in entries for place in storages(node)}) < len(entries):
            return None  # two entries share memory
        copies = {} if changed else self._copies.of
        for node in nodes:
            if node not in copies:
                copies[node] = self._entry(node) if node.op != "call_function" else self._made(node, copies, changed)
                if node in entries:
                    copies[node] = self._computed(aten.clone.default, (copies[node],), {})
        if changed:
            self._parts[copies[end]] = [copies[node] for node in nodes]
        return copies[end]

    def _made_by(self, ends: Iterable[Node]) -> list[Node]:
        needed = set[Node]()
        left = list(ends)
        while left:
            node = left.pop()
            if node not in needed:
                needed.add(node)
                left += [*node.all_input_nodes, *self._parts.get(node, ())]
        return [node for node in self._graph.nodes if node in needed]

    def _may_be_asked(self, node: Node) -> bool:
        if node.op == "placeholder":
            return self._givens[self._place(node)].feed is not None
        if node.op == "get_attr":
            return not getattr(self._constant(node), "requires_grad", True)
        target: Any = node.target
        if compat.is_higher_order(target) or compat.communicates(target) or compat.draws(node):
            return False
        return not compat.is_operator(target) or target.namespace in ("aten", "prims")

    def _place(self, node: Node) -> int:
        return self._copies.tracer.graph.find_nodes(op="placeholder").index(node)

    def _constant(self, node: Node) -> Any:
        return operator.attrgetter(str(node.target))(self._copies.tracer.root)

    def _entry(self, node: Node) -> Node:
        if node.op == "placeholder":
            place = self._place(node)
            given, key = self._givens[place], f"input {place}"
            if key not in self._known:
                copy = self._known[key] = self._graph.placeholder(f"input_{len(self._fed)}")
                self._values[copy], self._fed[copy] = given.value, given.feed  # pyright: ignore[reportArgumentType]
            return self._known[key]
        constant = self._constant(node)
        key = f"constant {id(constant)}"
        if key not in self._known:
            name = f"constant_{len(self._known)}"
            setattr(self._root, name, constant)
            copy = self._known[key] = self._graph.get_attr(name)
            self._values[copy] = constant
        return self._known[key]

    def _made(self, node: Node, copies: dict[Node, Node], changed: set[Any]) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        return (self._computed if changed else self._shared)(node.target, args, kwargs)

    def _shared(self, target: Any, args: Any, kwargs: Any) -> Node:
        key = f"{target} {args} {kwargs}"
        if key not in self._known:
            self._known[key] = self._computed(target, args, kwargs)
        return self._known[key]

    def _computed(self, target: Any, args: Any, kwargs: Any) -> Node:
        copy = self._graph.call_function(target, args, kwargs)
        real_args, real_kwargs = map_arg((args, kwargs), self._values.__getitem__)
        with (
            compat.plain_values(),
            compat.onednn(self._uses_onednn),
            compat.without_autocast(),
            torch.no_grad(),
        ):
            self._values[copy] = target(*real_args, **real_kwargs)
        return copy
