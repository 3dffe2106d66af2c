"""Train a model compiled and eagerly, from the same seed, and compare every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import fxcomp
from fxcomp.capture.structures import flatten
from helpers.gathered import gathered


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trains_as_eager(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    optimizer: Callable[[Any], Any] = adamw,
    *,
    reference: nn.Module | None = None,
    eager_loss: Callable[[Any, Any], Any] | None = None,
    change: Callable[[Any, Any, int], Any] = lambda *_: None,
    before: int = 0,
    tolerance: float = 0.0,
    **options: Any,
) -> fxcomp.CompiledStep:
    """Assert that results, parameters, buffers and the generator's state are eager's after each step.

    So is the optimizers' state in the end. `change` is called on each side before each step; `before` is the number of
    eager steps before the model is compiled.
    """
    reference = copy.deepcopy(model) if reference is None else reference
    ours, theirs = _several(optimizer(model)), _several(optimizer(reference))
    loss_of = eager_loss or loss_fn
    for batch in batches[:before]:
        _eager_step(model, ours, loss_fn, batch, None)
        _eager_step(reference, theirs, loss_of, batch, None)
    step = fxcomp.compile_step(model, loss_fn, ours, batches[0], **gathered(**{"compress": "dense", **options}))
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        change(model, ours[0], number)
        result = step(batch)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        change(reference, theirs[0], number)
        expected = _eager_step(reference, theirs, loss_of, batch, options.get("max_grad_norm"))
        assert type(result) is type(expected), f"the result of step {number}"
        for one, other in zip(flatten(result)[0], flatten(expected)[0], strict=True):
            _assert_same(one, other, tolerance, f"the result of step {number}")
        assert torch.equal(drawn, torch.get_rng_state()), f"what step {number} drew"
        values = reference.state_dict()
        for name, value in model.state_dict().items():
            _assert_same(value, values[name], tolerance, f"{name} after step {number}")
    for one, other in zip(ours, theirs, strict=True):
        assert_same_state(one, other, tolerance)
    return step


def beside_ddp(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batches: Sequence[Any], momentum: float = 0.9, **options: Any
) -> tuple[dict[str, float], fxcomp.CompiledStep]:
    """Train each step compiled and under DDP; return the largest distances of results, parameters and buffers."""
    reference = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (model, reference))
    options = {"compress": "dense", "verify": 1, **options}
    step = fxcomp.compile_step(model, loss_fn, ours, batches[0], **gathered(**options))
    ddp = DistributedDataParallel(reference)
    found: dict[str, float] = {}
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        result = step(batch)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        expected = _eager_step(ddp, [theirs], loss_fn, batch, None)
        for buffer in reference.buffers():  # DDP does so before the next forward pass
            whole = buffer.contiguous()
            dist.broadcast(whole, 0)
            buffer.copy_(whole)
        pairs = [("what is drawn", drawn, torch.get_rng_state())]
        pairs += [("results", *pair) for pair in zip(tree_leaves(result), tree_leaves(expected), strict=True)]
        values = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
        pairs += [(name, value, values[name]) for name, value in (*model.named_parameters(), *model.named_buffers())]
        for name, one, other in pairs:
            found[name] = max(found.get(name, 0.0), (one.double() - other.double()).abs().max().item())
    return found, step


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float = 0.0) -> None:
    """Compare the state of two optimizers; the second one can go on with the first one's."""
    mine, expected = ours.state_dict(), theirs.state_dict()
    for place in {**mine["state"], **expected["state"]}:
        one, other = (each["state"].get(place, {}) for each in (mine, expected))
        assert one.keys() == other.keys() or not other, "eager keeps nothing of a parameter without a gradient"
        for key, value in other.items():
            assert type(one[key]) is type(value), key
            _assert_same(one[key], value, tolerance, key)
    theirs.load_state_dict(mine)
    theirs.step()


def _several(optimizers: Any) -> list[torch.optim.Optimizer]:
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


def _eager_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss_fn: Any, batch: Any, max_grad_norm: float | None
) -> Any:
    for optimizer in optimizers:
        optimizer.zero_grad()
    result = loss_fn(model, batch)
    (result[0] if isinstance(result, tuple) else result).backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    return result


def _assert_same(one: Any, other: Any, tolerance: float, name: str) -> None:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        pair = [torch.as_tensor(each).detach().to_dense() for each in (one, other)]
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance / 10, equal_nan=True, msg=name)
    else:
        assert one == other, name
