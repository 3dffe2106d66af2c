"""Keep what Python does with a random generator's state: activation checkpointing draws the forward pass's masks again.

    torch.get_rng_state()       before a checkpointed block, and before it is computed again
    torch.set_rng_state(state)  to compute the block again, and to go on afterwards
 -->
    %state  compute  u8[5056]  rng_state(cpu)
    %mask   compute  f32[4,8]  aten.bernoulli_.float(%empty, 0.9)
    %now    compute  u8[5056]  rng_state(cpu)
            compute            set_rng_state(%state, cpu)
    %again  compute  f32[4,8]  aten.bernoulli_.float(%empty_1, 0.9)
            compute            set_rng_state(%now, cpu)

No draw is paired with another: the graph has eager's draws and eager's states in eager's order. So several draws in a
block, several blocks, blocks in blocks, and a recomputation that stops early come out as in eager PyTorch, and so does
the generator's state after the step.
"""

# What is exchanged has half its types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxcomp import compat, errors
from fxcomp.graph.ops import RNG_STATE, SET_RNG_STATE

CPU = torch.device("cpu")


@contextmanager
def keeping_random_states() -> Generator[None]:
    """While open, reading and setting a generator's state become nodes of the trace."""
    stand_ins: dict[Any, dict[str, Any]] = {
        torch: {"get_rng_state": _read_cpu, "set_rng_state": _set_cpu},
        torch.random: {"get_rng_state": _read_cpu, "set_rng_state": _set_cpu},
        torch.cuda: {"get_rng_state": _read_cuda, "set_rng_state": _set_cuda},
        torch.cuda.random: {"get_rng_state": _read_cuda, "set_rng_state": _set_cuda},
    }
    before = {module: {name: getattr(module, name) for name in names} for module, names in stand_ins.items()}
    try:
        for module, functions in stand_ins.items():
            vars(module).update(functions)
        yield
    finally:
        for module, functions in before.items():
            vars(module).update(functions)


def _read_cpu() -> Tensor:
    return RNG_STATE(CPU)


def _set_cpu(new_state: Tensor) -> None:
    SET_RNG_STATE(new_state, CPU)


def _read_cuda(device: int | str | torch.device = "cuda") -> Tensor:
    return RNG_STATE(_cuda(device))


def _set_cuda(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
    SET_RNG_STATE(new_state, _cuda(device))


def _cuda(device: int | str | torch.device) -> torch.device:
    if device in ("cuda", torch.device("cuda")):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def drop_idle_states(body: GraphModule) -> None:
    """Remove states that no draw needs: a checkpointed block without dropout leaves nothing behind.

    A state is not read where it is known, nor set where the generator has it already, or where another one is set
    before anything is drawn.
    """
    while _drop_some(body):
        pass
    for node in body.graph.find_nodes(op="call_function", target=RNG_STATE):
        if not node.users:
            body.graph.erase_node(node)


def _drop_some(body: GraphModule) -> bool:
    """Go once through the graph; returns whether a line that sets a state was removed."""
    idle: list[Node] = []
    known: dict[Any, Node] = {}
    """The state that a device's generator has."""
    undrawn: dict[Any, Node] = {}
    """The line that set it, as long as nothing was drawn since."""
    for node in body.graph.nodes:
        if node.target is RNG_STATE:
            device = node.args[0]
            node.replace_all_uses_with(known.setdefault(device, node))
        elif node.target is SET_RNG_STATE:
            state, device = node.args
            if known.get(device) is state:
                idle.append(node)
                continue
            if device in undrawn:
                idle.append(undrawn[device])
            known[device], undrawn[device] = state, node
        elif compat.draws(node):
            known.clear()
            undrawn.clear()
    for node in idle:
        body.graph.erase_node(node)
    return bool(idle)


def check_draws_again(body: GraphModule, loss: Node) -> None:
    """Refuse a backward pass that draws other numbers than the forward pass did.

    `loss` ends the forward pass. A state belongs to the forward pass if it was read there, or while one that does was
    replayed: a block inside a block.
    """
    of_forward: set[Node] = set()
    seen_loss, replays = False, False
    for node in body.graph.nodes:
        if node.target is RNG_STATE and (replays or not seen_loss):
            of_forward.add(node)
        elif node.target is SET_RNG_STATE:
            replays = seen_loss and node.args[0] in of_forward
        elif seen_loss and not replays and compat.draws(node):
            raise errors.RandomRecomputation(
                f"the backward pass draws random numbers ({node.target}) that are not the forward pass's: activation"
                " checkpointing around dropout, with preserve_rng_state=False.\n  Gradients would be of other masks"
                " than the loss, without a sign.\n  Leave preserve_rng_state at True: a compiled step then draws the"
                " same masks again."
            )
        seen_loss = seen_loss or node is loss
