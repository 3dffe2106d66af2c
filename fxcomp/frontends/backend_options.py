"""Options of the `torch.compile` backend."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxcomp.capture.backward_graph import FoundParameters
from fxcomp.codegen import program
from fxcomp.errors import BadOption
from fxcomp.options import StepOptions


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one call of torch.compile, documented at `torch_compile.fxcomp_backend`."""

    step: StepOptions
    model: nn.Module | None = None
    ignore: tuple[str, ...] = ()
    inductor: bool | None = None
    """True to use Inductor; None to use Inductor if an input is on one of INDUCTOR_DEVICES."""

    def uses_inductor(self, inputs: Sequence[Any]) -> bool:
        if self.inductor is not None:
            return self.inductor
        return any(isinstance(value, Tensor) and value.device.type in program.INDUCTOR_DEVICES for value in inputs)


KNOWN = ("compress", "cluster", "costs", "process_group", "model", "ignore", "inductor")
OF_WHOLE_STEPS = (
    "max_grad_norm",
    "max_grad_value",
    "accumulate",
    "scaler",
    "skip_nonfinite",
    "find_unused_parameters",
    "checks",
)
"""Options that only compile_step has."""


def read_options(options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> Options:
    """Check `options={...}` and other arguments of torch.compile, such as `mode=`. Raises BadOption."""
    if "mode" in unknown:
        raise BadOption(
            f"mode={unknown['mode']!r} is torch.compile's own, for other backends.\n"
            '  Write fxcomp.compile_model(model, compress="balanced").'
        )
    given: dict[str, Any] = {**(options or {}), **unknown}
    for name in given:
        if name in OF_WHOLE_STEPS:
            raise BadOption(
                f"there is no option {name!r} here: it is about whole steps, and the backend sees backward passes.\n"
                "  Use fxcomp.compile_step, which compiles the whole step, or leave it out."
            )
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.0)
            raise BadOption(
                f"there is no option {name!r}; did you mean {close[0]!r}? The options are {', '.join(KNOWN)}."
            )
    model, ignore = given.get("model"), given.get("ignore", ())
    if model is not None and not isinstance(model, nn.Module):
        raise BadOption(f"options['model'] must be the module that is compiled; it is a {type(model).__name__}")
    if isinstance(ignore, str):
        raise BadOption(f"options['ignore'] is a list of parameter names; write [{ignore!r}]")
    if ignore and model is None:
        raise BadOption("options['ignore'] is a list of parameter names, and needs options['model'] to find them in")
    if model is not None:
        _check_ignored(model, ignore)
    inductor = given.get("inductor")
    if inductor not in (None, True, False):
        raise BadOption(
            f"options['inductor'] is {inductor!r}.\n"
            "  True lets Inductor compile, False lets torch's operators run one by one; leave it out for the default"
            " of the device."
        )
    step = StepOptions.of_gradients(
        given.get("compress", "balanced"),
        "which torch.compile leaves yours",
        cluster=given.get("cluster"),
        costs=given.get("costs"),
        process_group=given.get("process_group"),
    )
    return Options(step, model, tuple(ignore), inductor)


def _check_ignored(model: nn.Module, ignore: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for name in ignore:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise BadOption(
                f"options['ignore'] names {name!r}, which is no parameter of the model; did you mean {close[0]!r}?"
            )


def check_pins(chosen: Options, found: FoundParameters) -> None:
    """Raise BadOption if a pin matches no parameter of the model, or of the graph if no model was given."""
    if chosen.model is not None:
        chosen.step.compress.pinned.check_model(chosen.model)
    else:
        chosen.step.compress.pinned.check_names(dict.fromkeys(found.parameters, True))
