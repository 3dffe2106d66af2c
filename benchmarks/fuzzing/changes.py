"""Change something between two steps, as a user would: in both worlds alike, by equal draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuzzing.training import change_option

if TYPE_CHECKING:
    from fuzzing.world import World

Change = Callable[["World", random.Random], None]


def _modules(world: World) -> list[nn.Module]:
    return list(world.model.modules())


def _touch(world: World, r: random.Random) -> None:
    """Let one layer change what it keeps outside of its parameters."""
    touchable: list[Any] = [module for module in _modules(world) if hasattr(module, "touch")]
    if touchable:
        r.choice(touchable).touch(r)


def _eval_part(world: World, r: random.Random) -> None:
    r.choice(_modules(world)).eval()


def _freeze(world: World, r: random.Random) -> None:
    r.choice(list(world.model.parameters())).requires_grad_(r.random() < 0.3)


def _write_parameter(world: World, r: random.Random) -> None:
    with torch.no_grad():
        r.choice(list(world.model.parameters())).mul_(0.9)


def _replace_parameter(world: World, r: random.Random) -> None:
    name, parameter = r.choice(list(world.model.named_parameters()))
    place, _, key = name.rpartition(".")
    setattr(world.model.get_submodule(place), key, nn.Parameter(parameter.detach().clone()))


def _replace_buffer(world: World, r: random.Random) -> None:
    buffers = list(world.model.named_buffers())
    if buffers:
        name, buffer = r.choice(buffers)
        place, _, key = name.rpartition(".")
        setattr(world.model.get_submodule(place), key, buffer.detach().clone() + 1)


def _write_buffer(world: World, r: random.Random) -> None:
    buffers = [b for b in world.model.buffers() if b.is_floating_point()]
    if buffers:
        r.choice(buffers).add_(0.5)


def _hook(world: World, r: random.Random) -> None:
    module = r.choice([world.model.norm, world.model.head, world.model.stem])
    if r.random() < 0.5:
        module.register_forward_hook(lambda _m, _a, output: output * 1.25)
    else:
        module.register_forward_pre_hook(lambda _m, args: tuple(2 * a if a.is_floating_point() else a for a in args))


def _anneal(world: World, r: random.Random) -> None:
    world.set_weight(r.choice((0.25, 0.5, 2.0, 2, True)))


def _option(world: World, r: random.Random) -> None:
    change_option(world.optimizer, r)


def _load_model(world: World, _: random.Random) -> None:
    world.model.load_state_dict(world.saved["model"])


def _load_optimizer(world: World, _: random.Random) -> None:
    world.optimizer.load_state_dict(copy.deepcopy(world.saved["optimizer"]))


def _evaluate(world: World, _: random.Random) -> None:
    """Score a batch in between, as every training loop does."""
    modes = [module.training for module in world.model.modules()]
    world.model.eval()
    with torch.no_grad():
        world.loss_fn(world.model, world.example)
    for module, mode in zip(world.model.modules(), modes, strict=True):
        module.training = mode


def _train_pass(world: World, _: random.Random) -> None:
    """A forward pass in between, in training mode."""
    world.loss_fn(world.model, world.example)


def _eager_step(world: World, _: random.Random) -> None:
    """A step by hand in between, on this rank's example; with several ranks they would part."""
    if world.ranks > 1:
        return
    result = world.loss_fn(world.model, world.example)
    world.optimizer.zero_grad()
    (result[0] if isinstance(result, tuple) else result).backward()
    world.optimizer.step()
    world.optimizer.zero_grad()


def _left_gradients(world: World, _: random.Random) -> None:
    for parameter in world.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _memory_format(world: World, _: random.Random) -> None:
    world.model.to(memory_format=torch.channels_last)


def _checkpoint(world: World, _: random.Random) -> None:
    """Save the step, model and optimizer, and load all of them again."""
    world.model.load_state_dict(copy.deepcopy(world.model.state_dict()))
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    if world.step is not None:
        world.step.load_state_dict(copy.deepcopy(world.step.state_dict()))


def _seed(world: World, r: random.Random) -> None:
    world.reseed = r.randrange(1000)


CHANGES: dict[str, Change] = {
    "touch": _touch,
    "touch_it": _touch,
    "eval": lambda world, _: world.model.eval() and None,
    "train": lambda world, _: world.model.train() and None,
    "eval_part": _eval_part,
    "freeze": _freeze,
    "write_parameter": _write_parameter,
    "replace_parameter": _replace_parameter,
    "replace_buffer": _replace_buffer,
    "write_buffer": _write_buffer,
    "hook": _hook,
    "anneal": _anneal,
    "option": _option,
    "load_model": _load_model,
    "load_optimizer": _load_optimizer,
    "evaluate": _evaluate,
    "train_pass": _train_pass,
    "eager_step": _eager_step,
    "left_gradients": _left_gradients,
    "memory_format": _memory_format,
    "checkpoint": _checkpoint,
    "seed": _seed,
}

REFUSED = ("freeze", "replace_parameter")
"""Changes that need another plan: they are drawn a fifth as often, because a program ends there."""

HOW_OFTEN = {name: 1 if name in REFUSED else 5 for name in CHANGES}
