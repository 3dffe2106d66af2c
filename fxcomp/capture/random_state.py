"""Capture reads and writes of a random generator's state, so that activation checkpointing repeats dropout masks.

    torch.get_rng_state()       before a checkpointed block, and before its recomputation
    torch.set_rng_state(state)  to recompute the block, and to continue afterwards
 -->
    %state  compute  u8[5056]  rng_state(cpu)
    %mask   compute  f32[4,8]  aten.bernoulli_.float(%empty, 0.9)
    %now    compute  u8[5056]  rng_state(cpu)
            compute            set_rng_state(%state, cpu)
    %again  compute  f32[4,8]  aten.bernoulli_.float(%empty_1, 0.9)
            compute            set_rng_state(%now, cpu)

The graph has eager's draws and states in eager's order, so nested checkpoints and the final state match. Seeds become
nodes too:

    torch.manual_seed(7)  -->  seed_rng(7, cpu)

`untouched.py` raises for other changes of a generator's state.
"""

# untyped functions of torch
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat, errors
from fxcomp.graph.ops import RNG_STATE, SEED_RNG, SET_RNG_STATE


@contextmanager
def keeping_random_states() -> Generator[None]:
    """Turn reads, writes and seeds of a default generator into nodes of the trace."""
    seeds: dict[torch.device, int] = {}

    def call(device: torch.device, method: str, args: Sequence[Any]) -> Any:
        if method == "get_state":
            return RNG_STATE(device)
        if method == "set_state":
            seeds.pop(device, None)
            return SET_RNG_STATE(args[0], device)
        if method == "manual_seed":
            seed = seeds[device] = int(args[0]) % 2**64
            return SEED_RNG(seed if seed < 2**63 else seed - 2**64, device)
        if method == "initial_seed" and device in seeds:
            return seeds[device]
        return _refuse(f"calls .{method}() of the default generator of {device}", compat.users_line())

    # torch.cuda's own functions would copy states and initialise CUDA.
    of_cuda = {"get_rng_state": _read_cuda, "set_rng_state": _set_cuda}
    with _default_generators(call), compat.attributes_instead({torch.cuda: of_cuda, torch.cuda.random: of_cuda}):
        yield


def refusing_generators() -> AbstractContextManager[None]:
    """Raise for every method call of default generators; draws are traced."""
    return _default_generators(
        lambda _, method, __: _refuse(f"calls .{method}() of a torch.Generator in the optimizer's step")
    )


_METHODS = (
    *("manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state"),
    *("graphsafe_get_state", "graphsafe_set_state", "__reduce__"),
)

Call = Callable[[torch.device, str, Sequence[Any]], Any]
"""Handler of a default generator's method call: device, method name, arguments."""


def _default_generators(call: Call) -> AbstractContextManager[None]:
    cpu = {"default_generator": _stand_in(torch.default_generator, call)}
    cuda = {"default_generators": tuple(_stand_in(each, call) for each in torch.cuda.default_generators)}
    return compat.attributes_instead({torch: cpu, torch.random: cpu, torch.cuda: cuda})


def _stand_in(real: torch.Generator, call: Call) -> torch.Generator:
    def passing_on(method: str) -> Callable[..., Any]:
        def called(stand_in: torch.Generator, *args: Any) -> Any:
            if not compat.is_traced_here():  # another thread, or values computed outside the trace
                return getattr(real, method)(*args)
            answer = call(real.device, method, args)
            return stand_in if answer is None else answer

        return called

    methods = {name: passing_on(name) for name in _METHODS}
    return type("DefaultGenerator", (type(real),), methods)(real.device)


def _refuse(what: str, at: str | None = None) -> NoReturn:
    raise errors.CaptureFailed(
        f"the step {what}{f', at {at}' if at else ''}: a compiled step does not run that Python again.\n"
        "  Seed the default generator by torch.manual_seed(...), between torch.random.fork_rng() if others draw from"
        " it: a compiled step does that each time. Or draw outside, and pass the numbers in the batch or keep them in"
        " a buffer. A generator that is made and seeded outside may be drawn from with generator=; the"
        " default one is drawn from without it."
    )


def check_generators(body: GraphModule, held: Iterable[Any]) -> None:
    """Raise for draws from a generator made during the trace: eager PyTorch would make a new one in each step."""
    known = [generator for generator in held if isinstance(generator, torch.Generator)]
    for each in compat.generators_in(body):
        if compat.device_of_default(each) is None and not any(compat.is_same_generator(each, one) for one in known):
            _refuse("draws from a torch.Generator that was not there before the step was traced")


def _read_cuda(device: int | str | torch.device = "cuda") -> Tensor:
    return RNG_STATE(_cuda(device))


def _set_cuda(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
    SET_RNG_STATE(new_state, _cuda(device))


def _cuda(device: int | str | torch.device) -> torch.device:
    if compat.imagined_device():
        return torch.device("cpu")
    if device in ("cuda", torch.device("cuda")):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def drop_idle_states(body: GraphModule) -> None:
    """Remove reads and writes of states that no draw needs, as in a checkpointed block without dropout.

    Removed are reads that return the same state as an earlier node, writes of the current state, and writes that
    another write replaces before a draw.
    """
    while _drop_some(body):
        pass
    for node in body.graph.find_nodes(op="call_function", target=RNG_STATE):
        if not node.users:
            body.graph.erase_node(node)


def _drop_some(body: GraphModule) -> bool:
    idle: list[Node] = []
    known: dict[Any, Node] = {}
    """Node of the current state, by device."""
    undrawn: dict[Any, Node] = {}
    """Latest `set_rng_state` or `seed_rng` node of each device, while no draw or read depends on it."""
    for node in body.graph.nodes:
        if node.target is RNG_STATE:
            device = node.args[0]
            if device not in known:
                undrawn.pop(device, None)  # the state that is read depends on the seed
            node.replace_all_uses_with(known.setdefault(device, node))
        elif node.target is SET_RNG_STATE:
            state, device = node.args
            if known.get(device) is state:
                idle.append(node)
                continue
            if device in undrawn:
                idle.append(undrawn[device])
            known[device], undrawn[device] = state, node
        elif node.target is SEED_RNG:
            device = node.args[1]
            if device in undrawn:
                idle.append(undrawn[device])
            known.pop(device, None)
            undrawn[device] = node
        elif compat.draws(node):
            known.clear()
            undrawn.clear()
    for node in idle:
        body.graph.erase_node(node)
    return bool(idle)


def check_draws_again(body: GraphModule, loss: Node) -> None:
    """Raise if the backward pass draws numbers that do not repeat the forward pass's.

    `loss` ends the forward pass. The backward pass may draw after it sets a seed or state of the forward pass, or a
    state that it read while repeating draws (nested checkpoints).
    """
    of_forward: set[Any] = set()
    seen_loss, replays = False, False
    for node in body.graph.nodes:
        if node.target is RNG_STATE and (replays or not seen_loss):
            of_forward.add(node)
        elif node.target is SET_RNG_STATE:
            replays = seen_loss and node.args[0] in of_forward
        elif node.target is SEED_RNG:
            replays = seen_loss and node.args in of_forward
            if not seen_loss:
                of_forward.add(node.args)
        elif seen_loss and not replays and compat.draws(node):
            raise errors.CaptureFailed(
                f"the backward pass draws random numbers ({node.target}) that are not the forward pass's: a"
                " gradient hook that draws, or activation checkpointing around dropout with"
                " preserve_rng_state=False.\n  Under checkpointing, gradients would silently use other masks than"
                " the loss: leave preserve_rng_state at True, and a compiled step draws the same masks again.\n"
                "  For a hook, draw in the forward pass, and let the hook use those numbers."
            )
        seen_loss = seen_loss or node is loss
