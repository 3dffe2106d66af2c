"""Manual strategies by parameter name; the last matching pattern decides.

    {"*": "int8", "*.embedding.weight": "dense", "lm_head.*": "bf16"}

Patterns match whole names of `model.named_parameters()` like shell patterns: `*` matches any text, also dots. A name
always matches itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.errors import BadOption, BadPlan, BadStrategy, FxcompError
from fxcomp.plan.given import is_path, is_strategy, strategy_named
from fxcomp.plan.modes import one_shot_ways
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy

MOST_STRATEGIES = 14
"""Maximum number of pinned strategies. A search has at most 256 strands (gradients that may share buckets): per element
type one for matrices, one for vectors, and one per pinned strategy.
"""

_SHOWN = 3  # names shown in an error


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    text: str
    """Normalized text: `dense`, a compressor or a strategy."""

    def matches(self, name: str) -> bool:
        return name == self.pattern or fnmatchcase(name, self.pattern)

    def strategies(self, cluster: Cluster, *, offload: bool = True) -> tuple[Strategy, ...]:
        """Return the named strategy, or all one-shot strategies of a compressor."""
        if is_strategy(self.text):
            return (strategy_named(self.text),)
        return one_shot_ways(strategy_named(self.text).compressor, cluster, offload=offload)

    def check_size(self, name: str, elements: int) -> None:
        """Raise BadOption if the compressor cannot select from this many values."""
        compressor = strategy_named(self.text).compressor
        is_cut = is_strategy(self.text) and not self.text.startswith("compress")
        if compressor is None or compressor.facts.needs_whole_parameters or is_cut:
            return
        try:
            compressor.payload_elements((elements,))
        except BadOption as error:
            why = str(error).partition("\n")[0]
            raise BadOption(
                f"pins[{self.pattern!r}]={self.text!r} cannot be for {name!r}: {why}\n"
                "  Pin it to a compressor that sends every value, such as int8, or leave it out of the pattern."
            ) from None

    def __str__(self) -> str:
        return f"{self.pattern}={self.text}"


@dataclass(frozen=True, slots=True)
class Pins:
    rules: tuple[Rule, ...] = ()

    @classmethod
    def read(cls, given: object) -> Pins:
        """Parse `pins=`. Raise BadOption."""
        if given is None:
            return NO_PINS
        if not isinstance(given, Mapping):
            raise BadOption(
                f"pins= maps patterns of parameter names to strategies; it is a {type(given).__name__}.\n"
                '  Write pins={"*.embedding.weight": "dense", "lm_head.*": "int8"}.'
            )
        pins = cls(tuple(_rule(*pair) for pair in cast("Mapping[object, object]", given).items()))
        texts = pins.texts
        if len(texts) > MOST_STRATEGIES:
            raise BadOption(
                f"pins= names {len(texts)} strategies, and at most {MOST_STRATEGIES} different ones can be"
                " pinned.\n  Give several patterns the same strategy, or write a whole plan and name that."
            )
        return pins

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule.text for rule in self.rules))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        found = (compressor for text in self.texts for compressor in strategy_named(text).compressors)
        return tuple(dict.fromkeys(found))

    def rule_for(self, name: str) -> Rule | None:
        return next((rule for rule in reversed(self.rules) if rule.matches(name)), None)

    def decided(self, names: Iterable[str]) -> dict[Rule, list[str]]:
        """Return the parameters that each rule decides; rules without parameters are left out."""
        found: dict[Rule, list[str]] = {}
        for name in names:
            rule = self.rule_for(name)
            if rule is not None:
                found.setdefault(rule, []).append(name)
        return {rule: found[rule] for rule in self.rules if rule in found}

    def is_pinned(self, bucket: Bucket) -> bool:
        """Return whether a bucket is pinned. No bucket mixes pinned gradients with others."""
        return self.rule_for(bucket.names[0]) is not None

    def leaves_dense(self, plan: Plan) -> bool:
        return all(bucket.strategy.is_dense or self.is_pinned(bucket) for bucket in plan.buckets)

    def check_model(self, model: nn.Module) -> None:
        """Raise BadOption for a pattern without effect in a model."""
        everything = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shared = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self.check_names(everything, shared)
        for name, parameter in model.named_parameters():
            rule = self.rule_for(name) if parameter.requires_grad else None
            if rule is not None:
                rule.check_size(name, parameter.numel())

    def check_names(self, trained: Mapping[str, bool], shared: Mapping[str, str] | None = None) -> None:
        """Raise BadOption for a pattern without effect.

        `trained` maps parameters to `requires_grad`, `shared` maps every name of a tensor to the first name.
        """
        for rule in self.rules:
            matched = [name for name in trained if rule.matches(name)]
            for name, first in (shared or {}).items():
                self._check_shared(rule, name, first, is_alone=not matched)
            if not matched:
                raise BadOption(_matches_nothing(rule, tuple(trained)))
            frozen = [name for name in matched if not trained[name]]
            if frozen == matched:
                raise BadOption(
                    f"pins[{rule.pattern!r}] is about {_names(frozen)}, which"
                    f" {'needs' if len(frozen) == 1 else 'need'} no gradient (requires_grad=False): nothing of it"
                    " travels.\n  Leave the pattern out."
                )
            if all(self.rule_for(name) is not rule for name in matched):
                others = dict.fromkeys(repr(other.pattern) for name in matched if (other := self.rule_for(name)))
                raise BadOption(
                    f"pins[{rule.pattern!r}] decides nothing: {' or '.join(others)} matches its names too, and"
                    " the last pattern that matches decides.\n"
                    "  Write general patterns first and special ones after them."
                )

    def _check_shared(self, rule: Rule, name: str, first: str, *, is_alone: bool) -> None:
        """Raise BadOption if a rule matches a tensor's second name but does not decide the tensor's strategy."""
        if not rule.matches(name) or rule.matches(first):
            return
        decides = self.rule_for(first)
        if is_alone or decides is None or decides.text != rule.text:
            raise BadOption(
                f"pins[{rule.pattern!r}] matches {name!r}, which is the same tensor as {first!r}, and not that"
                " name.\n  A tensor is pinned by its first name in model.named_parameters(): write a pattern for that"
                " name, and none that matches the other alone."
            )

    def check_fits(self, cluster: Cluster) -> None:
        """Raise BadOption for a strategy that the cluster does not allow."""
        for rule in self.rules:
            try:
                for strategy in rule.strategies(cluster):
                    if any(compressor.facts.is_exact for compressor in strategy.compressors):
                        raise BadOption(
                            f"pins[{rule.pattern!r}]={rule.text!r} is for gradients that the graph proves to be exact,"
                            " which only the mode 'lossless' finds.\n  Leave the pin out: the mode offers it."
                        )
                    strategy.check_is_whole()
                    Plan((Bucket((rule.pattern,), (1,), strategy),)).check_fits(cluster)
            except (BadPlan, BadStrategy) as error:
                raise BadOption(f"pins[{rule.pattern!r}]={rule.text!r} does not fit the cluster: {error}") from None

    def facts(self) -> list[str]:
        return [str(rule) for rule in self.rules]

    def to_json(self) -> list[list[str]]:
        return [[rule.pattern, rule.text] for rule in self.rules]

    @classmethod
    def from_json(cls, data: Iterable[Sequence[str]]) -> Pins:
        return cls(tuple(Rule(pattern, text) for pattern, text in data))


NO_PINS = Pins()


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """Parse `PATTERN=STRATEGY` texts. Raise BadOption."""
    given: dict[str, str] = {}
    for text in texts:
        pattern, equals, strategy = text.partition("=")
        if not equals:
            raise BadOption(f"--pin {text!r} has no '='; write 'PATTERN=STRATEGY', like 'lm_head.*=int8'")
        pattern = pattern.strip()
        if pattern in given:
            raise BadOption(f"--pin names the pattern {pattern!r} twice: keep one")
        given[pattern] = strategy.strip()
    return given


def _rule(pattern: object, value: object) -> Rule:
    if not isinstance(pattern, str) or not pattern:
        raise BadOption(f"keys of pins= are patterns of parameter names; {pattern!r} is none")
    what = f"pins[{pattern!r}]"
    value = str(value) if isinstance(value, Strategy) else value
    if not isinstance(value, str):
        raise BadOption(f"{what} is the text of a compressor or strategy, like 'int8'; it is a {type(value).__name__}")
    if is_path(value):
        raise BadOption(f"{what}={value!r} is the path of a plan; a pattern takes one compressor or strategy.")
    try:
        strategy = strategy_named(value)
    except (ValueError, FxcompError) as error:
        raise BadOption(
            f"{what}={value!r} names no strategy: {error}\n"
            "  Use 'dense', 'bf16', 'int8', 'sign', 'topk(0.01)', or a strategy's text such as"
            " 'compress(int4)@gpu > all_gather@world > decompress@gpu'."
        ) from None
    if is_strategy(value):
        return Rule(pattern, str(strategy))
    return Rule(pattern, "dense" if strategy.compressor is None else str(strategy.compressor))


def _matches_nothing(rule: Rule, names: Sequence[str]) -> str:
    text = f"pins[{rule.pattern!r}] matches no parameter"
    asked = rule.pattern.replace("*", "").replace("?", "")
    near = difflib.get_close_matches(asked, names, n=_SHOWN, cutoff=0.5) or _sharing(asked, names)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f": they are named like {_names(names)}."
    return (
        f"{text}{hint}\n"
        "  Patterns are matched with the whole names of model.named_parameters(), in which '*' is any text, dots too."
    )


def _sharing(asked: str, names: Sequence[str]) -> list[str]:
    words = [word for word in asked.split(".") if len(word) > 2]
    return [name for name in names if any(difflib.get_close_matches(word, name.split("."), n=1) for word in words)][
        :_SHOWN
    ]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(repr, names[:_SHOWN]))}{more}"
