"""Compare what two worlds hold after a step: to the bit, or to a tolerance on three ranks."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuzzing.program import Program
from fuzzing.world import World

OF_MORE_RANKS = 2e-4
"""Of the largest element, where sums over ranks have several orders: Adam and normalisation make that larger."""

NOISE = 0.25
"""Of the tolerance, is added to that: a value that is zero but for rounding."""


def tolerance_of(program: Program) -> float:
    """Zero where bits must agree."""
    return OF_MORE_RANKS if program.ranks > 2 else 0.0


def first_difference(ours: World, theirs: World, results: tuple[Any, Any], batches: tuple[Any, Any]) -> str:
    """The first thing in which the worlds differ, in words; empty where they are the same."""
    tolerance = tolerance_of(ours.program)
    if leaked := next(_fakes(ours.model), ""):
        return f"a fake tensor stays in {leaked}"
    return (
        _differ("the result", *results, tolerance)
        or _differ("the batch", *batches, 0.0)
        or _models(ours.model, theirs.model, tolerance)
        or _states(ours, theirs, tolerance)
        or _options(ours, theirs)
        or _differ("the program's own tensors", ours.more(), theirs.more(), 0.0)
        or ("" if torch.equal(ours.generator_state, theirs.generator_state) else "the generator's state differs")
    )


def take_rounding_over(ours: World, theirs: World) -> None:
    """Let eager go on from our numbers where ours may round otherwise: training makes rounding larger at each step."""
    if not tolerance_of(ours.program):
        return
    with torch.no_grad():
        for a, b in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
            if isinstance(a, Tensor):
                b.copy_(a)
        pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
        states = [(ours.optimizer.state.get(a, {}), theirs.optimizer.state.get(b, {})) for a, b in pairs]
        for mine, expected in states:
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    value.copy_(mine[key])


def _models(ours: nn.Module, theirs: nn.Module, tolerance: float) -> str:
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(ours, kind)(), getattr(theirs, kind)(), strict=True)
        for (name, a), (_, b) in pairs:
            if wrong := _differ(f"{kind[6:-1]} {name}", a, b, tolerance):
                return wrong
    return ""


def _states(ours: World, theirs: World, tolerance: float) -> str:
    """Optimizer states; a compiled step may hold zeros where eager holds nothing yet."""
    for number, (group, other) in enumerate(
        zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True)
    ):
        for place, (a, b) in enumerate(zip(group["params"], other["params"], strict=True)):
            mine, expected = dict(ours.optimizer.state.get(a, {})), dict(theirs.optimizer.state.get(b, {}))
            where = f"state of parameter {place} of group {number}"
            for key in mine.keys() - {k for k, v in expected.items() if v is not None}:
                value = mine.pop(key)
                if isinstance(value, Tensor) and bool(value.any()):
                    return f"{where}: {key} is more than eager has"
            expected = {key: value for key, value in expected.items() if value is not None}
            if wrong := _differ(where, mine, expected, tolerance):
                return wrong
    return ""


def _options(ours: World, theirs: World) -> str:
    for mine, expected in zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True):
        for key, value in expected.items():
            if key != "params" and (wrong := _differ(f"option {key}", mine[key], value, 0.0)):
                return wrong
    return ""


def _differ(what: str, mine: Any, expected: Any, tolerance: float) -> str:
    a, form = pytree.tree_flatten(mine)
    b, other = pytree.tree_flatten(pytree.tree_map(lambda leaf: leaf, expected))  # which makes torch.Size a tuple
    if form != other:
        return f"{what}: another structure, {form} and {other}"
    for place, (x, y) in enumerate(zip(a, b, strict=True)):
        if wrong := _leaves_differ(x, y, tolerance):
            return f"{what}{f', leaf {place}' if len(a) > 1 else ''}: {wrong}"
    return ""


def _leaves_differ(x: Any, y: Any, tolerance: float) -> str:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        same = type(x) is type(y) and (x == y or (isinstance(x, float) and math.isnan(x) and math.isnan(y)))
        return "" if same else f"{x!r} ({type(x).__name__}), eager has {y!r} ({type(y).__name__})"
    if x.dtype != y.dtype or (not x.is_nested and x.shape != y.shape):
        return f"{x.dtype}{tuple(x.shape)}, eager has {y.dtype}{tuple(y.shape)}"
    if type(x) is not type(y) or x.layout != y.layout:
        return f"a {type(x).__name__} of {x.layout}, eager has a {type(y).__name__} of {y.layout}"
    if _is_odd(x):
        return ""
    x, y = x.detach(), y.detach()
    if torch.equal(x, y):
        return ""
    x, y = x.double(), y.double()
    if not torch.equal(x.isnan(), y.isnan()):
        return "NaN where eager has none, or none where it has"
    x, y = x.nan_to_num(0.0, 1e300, -1e300), y.nan_to_num(0.0, 1e300, -1e300)
    difference, largest = float((x - y).abs().max()), float(y.abs().max())
    # Gradients that ought to be zero, as of what a norm takes out again, are noise, and Adam makes steps of them.
    if difference <= tolerance * (largest + NOISE):
        return ""
    return f"differs by {difference:.3g} where eager reaches {largest:.3g}"


def _is_odd(x: Tensor) -> bool:
    """Return whether a tensor of a batch is of a kind that has no comparison."""
    is_plain = type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.layout == torch.strided
    return not is_plain or x.is_meta or x.is_quantized or x.is_nested


def _fakes(model: nn.Module) -> Generator[str]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if any(isinstance(item, FakeTensor) for item in held):
                yield f"{name}.{key}"
