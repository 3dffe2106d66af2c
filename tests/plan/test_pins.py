"""Patterns of names with strategies: which one decides, and what is wrong with one that decides nothing."""

import re
from typing import Any

import pytest
import torch
from helpers.jobs import Transformer
from torch import nn

from fxcomp.cluster.cluster import Cluster
from fxcomp.cluster.link import Link
from fxcomp.errors import BadOption
from fxcomp.plan.compress import Compress
from fxcomp.plan.error_feedback import ErrorFeedback
from fxcomp.plan.pins import MOST_STRATEGIES, NO_PINS, Pins, parse_pins
from fxcomp.plan.strategy import Strategy

ONE_SHOT = "compress(int8)@gpu > all_gather@world > decompress@gpu"


def model() -> nn.Module:
    made = Transformer()
    made.norm.requires_grad_(False)
    return made


def cluster(hosts: int, ranks_per_host: int) -> Cluster:
    return Cluster(hosts, ranks_per_host, intra=Link(5.0, 12.0), inter=Link.parse("1gbit"))


def test_the_last_pattern_that_matches_decides():
    pins = Pins.read({"*": "int8", "*.embedding.weight": "dense", "lm_head.*": "bf16", "*.bias": "dense"})
    names = ("layers.0.weight", "layers.0.bias", "text.embedding.weight", "lm_head.weight", "lm_head.bias")
    decided = [rule.text for name in names if (rule := pins.rule_for(name))]
    assert decided == ["int8", "dense", "dense", "bf16", "dense"]
    assert Pins.read({"lm_head.*": "int8"}).rule_for("layers.0.weight") is None
    assert {rule.pattern: found for rule, found in pins.decided(names).items()} == {
        "*": ["layers.0.weight"],
        "*.embedding.weight": ["text.embedding.weight"],
        "lm_head.*": ["lm_head.weight"],
        "*.bias": ["layers.0.bias", "lm_head.bias"],
    }


def test_a_star_is_any_text_with_dots_and_upper_and_lower_case_differ():
    pins = Pins.read({"layers.*.weight": "dense", "head[12].?": "int8"})
    assert pins.rule_for("layers.0.attention.weight")
    assert pins.rule_for("head2.w")
    assert pins.rule_for("head3.w") is None
    assert pins.rule_for("Layers.0.weight") is None


def test_a_name_matches_itself_whatever_is_in_it():
    pins = Pins.read({"heads.task[0].w*": "int8", "heads.task[0].weight": "dense"})
    assert [rule.pattern for name in ("heads.task[0].weight", "heads.task0.wide") if (rule := pins.rule_for(name))] == [
        "heads.task[0].weight",
        "heads.task[0].w*",
    ]


def test_a_pattern_of_a_tensors_second_name_is_an_error_unless_the_first_has_the_same_strategy():
    tied = Transformer()
    tied.head.bias = nn.Parameter(torch.zeros(tied.head.out_features))
    for given in ({"head.*": "int8"}, {"embed.*": "dense", "head.*": "int8"}):
        with pytest.raises(BadOption, match=r"'head.\*'\] matches 'head.weight', which is the same tensor as 'embed.w"):
            Pins.read(given).check_model(tied)
    for given in ({"embed.*": "int8", "head.*": "int8"}, {"*": "int8"}, {"*.weight": "int8", "head.bias": "dense"}):
        Pins.read(given).check_model(tied)


def test_a_compressor_goes_any_way_in_one_shot_and_a_strategy_as_it_says():
    def ways(text: str, where: Cluster) -> list[str]:
        (rule,) = Pins.read({"*": text}).rules
        return list(map(str, rule.strategies(where, offload=False)))

    flat, by_level = cluster(2, 1), cluster(2, 4)
    assert ways("dense", flat) == ["all_reduce@world"]
    assert ways("dense", by_level)[1:] == ["reduce_scatter@intra > all_reduce@inter > all_gather@intra"]
    assert ways("int8", flat) == [ONE_SHOT]
    assert ways("int8", by_level)[1].startswith("reduce_scatter@intra > compress(int8)@gpu > all_gather@inter")
    assert ways(ONE_SHOT, by_level) == [ONE_SHOT]
    assert len(Pins.read({"*": "int8"}).rules[0].strategies(by_level)) == 4, "on the pool, too"


def test_pins_keep_their_order_in_json_and_texts():
    pins = Pins.read({"b.*": "topk(0.01)", "a.*": ONE_SHOT, "c": Strategy.parse(ONE_SHOT)})
    assert Pins.from_json(pins.to_json()) == pins
    assert pins.facts() == ["b.*=topk(0.01)", f"a.*={ONE_SHOT}", f"c={ONE_SHOT}"]
    assert Pins.read(parse_pins(["b.* = topk(0.01)", f"a.*={ONE_SHOT}", f"c={ONE_SHOT}"])) == pins
    assert Pins.read(parse_pins(["*=int8(block=64)"])).facts() == ["*=int8(block=64)"]
    assert [compressor.name for compressor in pins.compressors] == ["topk", "int8"]
    assert Pins.read(None) == Pins.read({}) == NO_PINS
    assert not NO_PINS


def test_patterns_of_a_model_are_accepted():
    Pins.read({"*": "int8", "embed.weight": "dense", "layer.*.bias": "bf16"}).check_model(model())
    NO_PINS.check_model(model())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"embd.weight": "dense"}, r"\['embd.weight'\] matches no parameter; did you mean 'embed.weight'"),
        ({"*.embed.weight": "dense"}, r"did you mean 'embed.weight'.*with the whole names of model.named_parameters"),
        ({"layer.linar1.*": "dense"}, r"did you mean 'layer.linear1.(bias|weight)' or 'layer.linear"),
        ({"xyz": "dense"}, r"matches no parameter: they are named like 'embed.weight', .* and \d+ more\."),
        ({"head.*": "dense"}, r"matches 'head.weight', which is the same tensor as 'embed.weight', and not that name"),
        ({"*": "bf16", "head.weight": "dense"}, r"matches 'head.weight', which is the same tensor as 'embed.weight'"),
        ({"norm.*": "dense"}, r"is about 'norm.weight', 'norm.bias', which need no gradient \(requires_grad=False\)"),
        ({"norm.bias": "dense"}, r"is about 'norm.bias', which needs no gradient.*Leave the pattern out"),
        (
            {"embed.*": "dense", "*": "int8"},
            r"\['embed.\*'\] decides nothing: '\*' matches its names too.*general patterns first",
        ),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error(given: dict[str, str], text: str):
    with pytest.raises(BadOption, match=f"(?s)pins.*{text}"):
        Pins.read(given).check_model(model())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"a.*": "int9"}, r"\['a.\*'\]='int9' names no strategy: .*int8.*Use 'dense', 'bf16'"),
        ({"a.*": "topk(2)"}, r"\['a.\*'\]='topk\(2\)' names no strategy: .*ratio"),
        ({"a.*": "compress(int8)@gpu > all_gather@world"}, r"\['a.\*'\]='compress.*' names no strategy: "),
        ({"a.*": "plans/mine.json"}, "is the path of a plan; a pattern takes one compressor or strategy"),
        ({"a.*": 8}, r"\['a.\*'\] is the text of a compressor or strategy, like 'int8'; it is a int"),
        ({"a.*": None}, "it is a NoneType"),
        ({3: "int8"}, "keys of pins= are patterns of parameter names; 3 is none"),
        ({"": "int8"}, "keys of pins= are patterns of parameter names; '' is none"),
        ([("a", "int8")], "pins= maps patterns of parameter names to strategies; it is a list"),
        ("*=int8", r"it is a str.*Write pins=\{"),
    ],
)
def test_a_bad_value_is_an_error_that_names_pattern_and_value(given: Any, text: str):
    with pytest.raises(BadOption, match=f"(?s){text}"):
        Pins.read(given)


def test_strategies_that_are_too_many_are_an_error_and_patterns_are_not():
    many = {f"w{k}": f"topk({k + 1}e-4)" for k in range(MOST_STRATEGIES)}
    assert len(Pins.read(many | {f"v{k}": "topk(1e-4)" for k in range(100)}).texts) == MOST_STRATEGIES
    with pytest.raises(BadOption, match="names 15 strategies, and at most 14 different ones"):
        Pins.read(many | {"last": "int8"})


def test_a_strategy_that_the_cluster_has_no_levels_for_is_an_error():
    by_level = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"
    Pins.read({"*": by_level}).check_fits(cluster(2, 2))
    uneven = Cluster.parse("2+1", intra=Link(5.0, 12.0), inter=Link.parse("1gbit"))
    Pins.read({"*": "int8"}).check_fits(uneven)
    with pytest.raises(BadOption, match=re.escape(f"pins['w.*']='{by_level}' does not fit the cluster: ")):
        Pins.read({"w.*": by_level}).check_fits(uneven)


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (["lm_head.*"], "--pin 'lm_head.*' has no '='; write 'PATTERN=STRATEGY'"),
        (["a=int8", "a=dense"], "--pin names the pattern 'a' twice: keep one"),
    ],
)
def test_an_option_that_is_no_pin_is_an_error(texts: list[str], text: str):
    with pytest.raises(BadOption, match=re.escape(text)):
        parse_pins(texts)


def test_pins_are_compared_between_ranks_and_may_be_experiments():
    feedback = ErrorFeedback(allow_diverging=True)
    compress = Compress(pins={"*": "topk(0.01)"}, feedback=feedback)
    assert compress.facts()["pins"] == ["*=topk(0.01)"]
    with pytest.raises(BadOption, match="for experiments with a given plan"):
        Compress(feedback=feedback)


def test_what_selects_from_more_values_than_it_can_number_is_refused_where_it_is_pinned():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(2**15, 2**16, device="meta"))

    for text in ("topk(0.01)", "compress(topk(0.01))@gpu > all_gather@world > decompress@gpu"):
        with pytest.raises(BadOption, match=r"pins\['\*'\]=.*cannot be for 'table': nothing can be selected"):
            Pins.read({"*": text}).check_model(Large())
    Pins.read({"*": "int8"}).check_model(Large())
    Pins.read({"*": "powersgd(4)"}).check_model(Large())
