"""docs/compressors.md is what the compressors declare."""

from pathlib import Path

import pytest
from describe_compressors import describe, relative_error

from fxcomp.compressors import BF16, Int8, TopK, parse_compressor
from fxcomp.compressors.examples import bits_per_value, example_of, examples, ours
from fxcomp.testing.samples import gaussian

PAGE = Path(__file__).parents[2] / "docs" / "compressors.md"


def test_the_page_is_made_from_the_declarations(request: pytest.FixtureRequest) -> None:
    text = describe()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run pytest --update-golden, and read what it writes"


def test_every_compressor_has_an_example_that_parses_back() -> None:
    found = examples()
    assert {type(compressor) for compressor in found} == set(ours())
    assert [parse_compressor(str(compressor)) for compressor in found] == found


def test_an_example_takes_typical_values_for_parameters_without_a_default() -> None:
    assert example_of(TopK) == TopK(0.01)
    assert example_of(TopK, ratio=0.1) == TopK(0.1)
    assert example_of(Int8) == Int8()


def test_sizes_and_errors_are_those_of_the_formulas() -> None:
    assert bits_per_value(BF16(), (1024, 1024)) == 16
    assert bits_per_value(Int8(), (1024, 1024)) == 8 + 32 / 512
    assert relative_error(TopK(1.0), gaussian(1000), (1000,)) == 0
    assert relative_error(TopK(0.5), gaussian(1000), (1000,)) < 0.5
