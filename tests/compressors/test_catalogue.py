"""The text form of compressors, and what is said about a wrong one."""

import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fxcomp.compressors import (
    BF16,
    CATALOGUE,
    Compressor,
    Int4,
    Int8,
    PowerSGD,
    Sign,
    TopK,
    catalogue,
    compressor_of,
    parse_compressor,
)
from fxcomp.compressors.catalogue import ENTRY_POINTS, IN_EXAMPLES
from fxcomp.compressors.facts import fields_of, read, text_of
from fxcomp.errors import BadOption, BadStrategy
from fxcomp.plan.strategy import Strategy


def known() -> str:
    """List all names: those of fxcomp and of packages that a test has imported or that are installed."""
    return ", ".join(sorted({*CATALOGUE, *entry_points(group=ENTRY_POINTS).names}))


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("bf16", BF16()),
        ("bf16()", BF16()),
        ("int8", Int8(block=512)),
        ("int8(block=128)", Int8(block=128)),
        ("int8(128)", Int8(block=128)),
        ("int4", Int4(block=128)),
        ("int4(block=64)", Int4(block=64)),
        ("int4(64)", Int4(block=64)),
        ("sign", Sign(block=512)),
        ("topk(0.01)", TopK(0.01)),
        (" topk( ratio = 1e-3 ) ", TopK(0.001)),
        ("topk(1)", TopK(1.0)),
        ("topk(.5)", TopK(0.5)),
        ("int8(stochastic=True)", Int8(stochastic=True)),
        ("int8(8, false)", Int8(8)),
    ],
)
def test_a_text_gives_the_compressor(text: str, compressor: Compressor) -> None:
    assert parse_compressor(text) == compressor


@pytest.mark.parametrize("compressor", [BF16(), Int8(128), Int4(64), Sign(), TopK(0.01)], ids=str)
def test_an_op_and_its_parameters_give_the_compressor(compressor: Compressor) -> None:
    for op in (compressor.compress_op, compressor.decompress_op):
        assert compressor_of(op, compressor.parameters) == compressor


def test_a_default_is_not_written() -> None:
    assert [str(c) for c in (Int8(), Int8(64), Int4(), Int4(64), Sign(), Sign(64), TopK(1e-5))] == [
        "int8",
        "int8(block=64)",
        "int4",
        "int4(block=64)",
        "sign",
        "sign(block=64)",
        "topk(1e-05)",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("itn8", "there is no compressor 'itn8'; did you mean 'int8'? There are @KNOWN"),
        ("TopK(0.1)", "there is no compressor 'TopK'; did you mean 'topk'? There are @KNOWN"),
        ("zstd", "there is no compressor 'zstd'; there are @KNOWN"),
        *((gone, f"there is no compressor '{gone}'; there are @KNOWN") for gone in ("qsgd", "natural", "terngrad")),
        ("topk(", "cannot read the compressor 'topk('; write for example int8(block=128) or topk(0.01)"),
        (
            "topk",
            "cannot read the compressor 'topk': ratio is missing; it is topk(ratio: float)",
        ),
        *(
            (
                text,
                f"cannot read the compressor {text!r}: {why}; it is int8(block: int = 512, stochastic: bool = false)",
            )
            for text, why in [
                ("int8(bloc=3)", "there is no 'bloc'"),
                ("int8(1.5)", "block must be a whole number, not '1.5'"),
                ("int8(1_28)", "block must be a whole number, not '1_28'"),
                ("int8(\uff11\uff12)", "block must be a whole number, not '\uff11\uff12'"),
                ("int8(stochastic=1)", "stochastic must be true or false, not '1'"),
                ("int8(8, block=9)", "block is given twice"),
                ("int8(block=8, block=9)", "block is given twice"),
                ("int8(block=8, true)", "true needs a name, because block=8 before it has one"),
                ("int8(block=8, stochastic)", "stochastic has no value, write stochastic=..."),
                ("int8(8, true, 3)", "3 is one value too many"),
                ("int8(,)", "write a value or name=value, not ''"),
                ("int8(8,)", "write a value or name=value, not ''"),
                ("int8(=8)", "write a value or name=value, not '=8'"),
                ("int8(block=)", "write a value or name=value, not 'block='"),
                ("int8(block==8)", "write a value or name=value, not 'block==8'"),
            ]
        ),
        (
            "topk(1_0e-2)",
            "cannot read the compressor 'topk(1_0e-2)': ratio must be a number, not '1_0e-2'; it is topk(ratio: float)",
        ),
        ("int8(0)", "int8 needs block from 1 to 65536, not 0"),
        ("int4(7)", "int4 needs a block of whole bytes, a multiple of 2, not block=7"),
        ("int4(0)", "int4 needs block from 2 to 65536, not 0"),
        ("sign(12)", "sign needs a block of whole bytes, a multiple of 8, not block=12"),
        ("topk(0)", "topk needs ratio from 1e-06 to 1, not 0.0"),
        ("topk(nan)", "topk needs ratio from 1e-06 to 1, not nan"),
    ],
)
def test_a_wrong_text_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_compressor(text)
    assert str(caught.value) == complaint.replace("@KNOWN", known())
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Int8(stochastic=1), "int8: stochastic must be true or false, not 1"),
        (lambda: Int8(block=True), "int8: block must be a whole number, not True"),
        (lambda: Int8(block=512.0), "int8: block must be a whole number, not 512.0"),
        (lambda: PowerSGD(2.5), "powersgd: rank must be a whole number, not 2.5"),
        (lambda: TopK("0.1"), "topk: ratio must be a number, not '0.1'"),
        (lambda: TopK(None), "topk: ratio must be a number, not None"),
        (lambda: TopK(True), "topk: ratio must be a number, not True"),
    ],
)
def test_a_parameter_of_another_type_is_refused(make: Callable[[], Compressor], complaint: str) -> None:
    with pytest.raises(BadOption) as caught:
        make()
    assert str(caught.value) == complaint


@pytest.mark.parametrize("name", IN_EXAMPLES)
def test_a_strategy_that_names_a_compressor_of_the_example_package_is_told_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(CATALOGUE, name, raising=False)
    monkeypatch.setattr(catalogue, "entry_points", lambda group: ())  # noqa: ARG005
    with pytest.raises(BadStrategy) as caught:
        Strategy.parse(f"compress({name}) > all_gather@world > decompress")
    assert str(caught.value) == (
        f"cannot read 'compress({name})' in the strategy 'compress({name}) > all_gather@world > decompress':"
        f" the compressor {name!r} is in a package of its own, which is not installed here.\n"
        "  Install it on every machine, from a clone of fxcomp: pip install ./examples/more_compressors"
    )
    assert (Path(__file__).parents[2] / IN_EXAMPLES[name] / "pyproject.toml").exists()


def test_the_names_to_install_are_the_announced_ones() -> None:
    for folder in set(IN_EXAMPLES.values()):
        project = tomllib.loads((Path(__file__).parents[2] / folder / "pyproject.toml").read_text())
        announced = set(project["project"]["entry-points"][ENTRY_POINTS])
        assert announced == {name for name, place in IN_EXAMPLES.items() if place == folder}


def test_a_whole_number_will_do_for_a_float() -> None:
    assert str(TopK(1)) == "topk(1.0)"


def test_every_text_of_a_default_is_read_back() -> None:
    for kind in CATALOGUE.values():
        for field in fields_of(kind).values():
            if field.has_default and field.name not in kind.facts.filled_in:
                assert read(field, text_of(field.default)) == field.default
