"""Change something between two steps, as a user would: in both worlds alike, by equal draws."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuzzing.odd_layers import Applied
from fuzzing.training import change_option

if TYPE_CHECKING:
    from fuzzing.world import World

Change = Callable[["World", random.Random], None]


def _modules(world: World, kind: type[Any] | tuple[type[Any], ...] = nn.Module) -> list[nn.Module]:
    return [module for module in world.model.modules() if isinstance(module, kind)]


def _touch(world: World, r: random.Random) -> None:
    """Let one layer change what it keeps outside of its parameters."""
    touchable: list[Any] = [module for module in _modules(world) if hasattr(module, "touch")]
    if touchable:
        r.choice(touchable).touch(r)


def _eval_part(world: World, r: random.Random) -> None:
    r.choice(_modules(world)).eval()


def _dropout(world: World, r: random.Random) -> None:
    layers: list[Any] = [m for m in _modules(world) if isinstance(getattr(m, "p", None), float)]
    layers += [m for m in _modules(world) if isinstance(getattr(m, "dropout", None), float)]
    for layer in layers:
        setattr(layer, "p" if hasattr(layer, "p") else "dropout", r.choice((0.0, 0.3)))


def _norms(world: World, r: random.Random) -> None:
    """Another ε, momentum or tracking."""
    for layer in _modules(world):
        if isinstance(getattr(layer, "eps", None), float):
            layer.eps = r.choice((1e-3, 1e-2))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = r.choice((0.3, 0.6))


def _freeze(world: World, r: random.Random) -> None:
    r.choice(list(world.model.parameters())).requires_grad_(r.random() < 0.3)


def _write_parameter(world: World, r: random.Random) -> None:
    with torch.no_grad():
        r.choice(list(world.model.parameters())).mul_(0.9)


def _parameter_data(world: World, r: random.Random) -> None:
    """Give a parameter other memory; it stays the same object."""
    parameter = r.choice(list(world.model.parameters()))
    parameter.data = parameter.data * 0.8


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


def _register_buffer(world: World, _: random.Random) -> None:
    world.model.register_buffer("late", torch.ones(2))


def _append(world: World, _: random.Random) -> None:
    world.model.blocks.append(Applied(torch.tanh))


def _replace_child(world: World, r: random.Random) -> None:
    world.model.norm = r.choice((nn.Identity(), nn.Softplus(), nn.ELU()))


def _swap_blocks(world: World, _: random.Random) -> None:
    blocks = world.model.blocks
    if len(blocks) > 1 and all("weight" in dict(b.named_parameters()) for b in blocks[:2]):
        blocks[0], blocks[1] = blocks[1], blocks[0]


def _replace_forward(world: World, r: random.Random) -> None:
    module = r.choice([world.model.norm, world.model.head, *world.model.blocks])
    before = module.forward
    module.forward = lambda *a, **k: before(*a, **k) * 0.5


def _hook(world: World, r: random.Random) -> None:
    module = r.choice([world.model.norm, world.model.head, world.model.stem])
    if r.random() < 0.5:
        module.register_forward_hook(lambda _m, _a, output: output * 1.25)
    else:
        module.register_forward_pre_hook(lambda _m, args: tuple(2 * a if a.is_floating_point() else a for a in args))


def _global_hook(world: World, _: random.Random) -> None:
    if world.step is None:  # the compiled world's hook is the eager one's too
        return
    world.handles.append(nn.modules.module.register_module_forward_hook(_gently))


def _gently(module: nn.Module, _args: Any, output: Any) -> Any:
    return output * 1.01 if isinstance(module, nn.LayerNorm) else None


def _anneal(world: World, r: random.Random) -> None:
    world.set_weight(r.choice((0.25, 0.5, 2.0, 2, True)))


def _option(world: World, r: random.Random) -> None:
    change_option(world.optimizer, r)


def _load_model(world: World, _: random.Random) -> None:
    world.model.load_state_dict(world.saved["model"])


def _assign_model(world: World, _: random.Random) -> None:
    world.model.load_state_dict(copy.deepcopy(world.saved["model"]), assign=True)


def _load_optimizer(world: World, _: random.Random) -> None:
    world.optimizer.load_state_dict(copy.deepcopy(world.saved["optimizer"]))


def _reload_optimizer(world: World, _: random.Random) -> None:
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


def _clear_optimizer(world: World, _: random.Random) -> None:
    world.optimizer.state.clear()


def _drop_one_state(world: World, r: random.Random) -> None:
    if world.optimizer.state:
        held = [p for group in world.optimizer.param_groups for p in group["params"]]
        world.optimizer.state.pop(r.choice(held), None)


def _add_group(world: World, _: random.Random) -> None:
    world.model.late = nn.Parameter(torch.ones(2))
    world.optimizer.add_param_group({"params": [world.model.late]})


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


def _transposed_data(world: World, r: random.Random) -> None:
    """Give a matrix other strides in place."""
    matrices: list[Tensor] = [p for p in world.model.parameters() if p.dim() == 2]
    if matrices:
        chosen = r.choice(matrices)
        chosen.data = chosen.data.t().contiguous().t()


def _there_and_back(world: World, _: random.Random) -> None:
    """To another dtype and back: parameters stay the same objects, with other memory."""
    world.model.double()
    world.model.float()


def _checkpoint(world: World, _: random.Random) -> None:
    """Save the step, model and optimizer, and load all of them again."""
    world.model.load_state_dict(copy.deepcopy(world.model.state_dict()))
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    if world.step is not None:
        world.step.load_state_dict(copy.deepcopy(world.step.state_dict()))


def _copied(world: World, _: random.Random) -> None:
    copy.deepcopy(world.model)


def _seed(world: World, r: random.Random) -> None:
    world.reseed = r.randrange(1000)


def _threads(world: World, r: random.Random) -> None:  # noqa: ARG001
    torch.set_num_threads(2)


def _flush(world: World, _: random.Random) -> None:  # noqa: ARG001
    torch.set_flush_denormal(True)


def _deterministic(world: World, _: random.Random) -> None:  # noqa: ARG001
    torch.use_deterministic_algorithms(True)


def _share_memory(world: World, _: random.Random) -> None:
    world.model.share_memory()


def _tie(world: World, _: random.Random) -> None:
    """Let two layers share a weight from now on."""
    layers: list[Any] = [m for m in _modules(world, nn.Linear) if m.weight.shape == (8, 8)]
    if len(layers) > 1:
        layers[1].weight = layers[0].weight


CHANGES: dict[str, Change] = {
    "touch": _touch,
    "touch_it": _touch,
    "touch_again": _touch,
    "eval": lambda world, _: world.model.eval() and None,
    "train": lambda world, _: world.model.train() and None,
    "eval_part": _eval_part,
    "eval_some": _eval_part,
    "dropout": _dropout,
    "norms": _norms,
    "freeze": _freeze,
    "write_parameter": _write_parameter,
    "parameter_data": _parameter_data,
    "replace_parameter": _replace_parameter,
    "replace_buffer": _replace_buffer,
    "write_buffer": _write_buffer,
    "register_buffer": _register_buffer,
    "append": _append,
    "replace_child": _replace_child,
    "swap_blocks": _swap_blocks,
    "replace_forward": _replace_forward,
    "hook": _hook,
    "global_hook": _global_hook,
    "anneal": _anneal,
    "anneal_more": _anneal,
    "option": _option,
    "another_option": _option,
    "load_model": _load_model,
    "assign_model": _assign_model,
    "load_optimizer": _load_optimizer,
    "reload_optimizer": _reload_optimizer,
    "clear_optimizer": _clear_optimizer,
    "drop_one_state": _drop_one_state,
    "add_group": _add_group,
    "evaluate": _evaluate,
    "train_pass": _train_pass,
    "eager_step": _eager_step,
    "left_gradients": _left_gradients,
    "memory_format": _memory_format,
    "transposed_data": _transposed_data,
    "there_and_back": _there_and_back,
    "checkpoint": _checkpoint,
    "copied": _copied,
    "seed": _seed,
    "threads": _threads,
    "flush": _flush,
    "deterministic": _deterministic,
    "share_memory": _share_memory,
    "tie": _tie,
}

REFUSED = ("freeze", "replace_parameter", "append", "replace_child", "swap_blocks", "assign_model", "add_group", "tie")
"""Changes that need another plan: they are drawn a fifth as often, because a program ends there."""

HOW_OFTEN = {name: 1 if name in REFUSED else 5 for name in CHANGES}
