"""The options of the `torch.compile` backend, checked; `torch_compile.py` says what each of them is for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxcomp.capture.found_parameters import FoundParameters
from fxcomp.errors import BadOption
from fxcomp.options import RaceOption, StepOptions
from fxcomp.plan.check_feedback import check_needs_no_optimizer


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one call of torch.compile."""

    step: StepOptions
    model: nn.Module | None = None
    ignore: tuple[str, ...] = ()


KNOWN = (
    "mode",
    "error_budget",
    "plan",
    "per_parameter",
    "cluster",
    "costs",
    "model",
    "ignore",
    "error_feedback",
    "race",
    "process_group",
)
OF_WHOLE_STEPS = (
    "max_grad_norm",
    "max_grad_value",
    "skip_nonfinite",
    "find_unused_parameters",
    "verify_every",
    "replan",
    "accumulate",
    "scaler",
)
"""Options that compile_step has beyond these."""


def read_options(mode: str | None, options: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> Options:
    given: dict[str, Any] = {**(options or {}), **({"mode": mode} if mode is not None else {}), **unknown}
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
    model, ignore = given.pop("model", None), given.pop("ignore", ())
    if model is not None and not isinstance(model, nn.Module):
        raise BadOption(f"options['model'] must be the module that is compiled; it is a {type(model).__name__}")
    if isinstance(ignore, str) or (ignore and model is None):
        raise BadOption("options['ignore'] is a list of parameter names, and needs options['model'] to find them in")
    if model is not None:
        _check_ignored(model, ignore)
    if "error_feedback" in given:
        check_needs_no_optimizer(given["error_feedback"], "which torch.compile leaves yours")
    if given.setdefault("race", RaceOption.OFF.value) != RaceOption.OFF.value:
        raise BadOption(
            f"options['race'] can only be 'off' here; it is {given['race']!r}. The backend sees backward passes and"
            " times no steps.\n  It follows the plan that is predicted to be fastest. For plans to race, use"
            " fxcomp.compile_step, which compiles the whole step."
        )
    return Options(StepOptions.checked(**given), model, tuple(ignore))


def _check_ignored(model: nn.Module, ignore: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for name in ignore:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise BadOption(
                f"options['ignore'] names {name!r}, which is no parameter of the model; did you mean {close[0]!r}?"
            )


def check_pins(chosen: Options, found: FoundParameters) -> None:
    """Raise BadOption for patterns that decide nothing in the model, or in the graph where the model is not known."""
    if chosen.model is not None:
        chosen.step.pins.check_model(chosen.model)
    else:
        chosen.step.pins.check_names(dict.fromkeys(found.parameters, True))
