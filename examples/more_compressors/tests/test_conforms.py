"""Every compressor of the package passes the checks that fxcomp makes of its own."""

import fxcomp_more
import pytest

from fxcomp.compressors import parse_compressor
from fxcomp.testing import check_compressor

FAST = ("chunkmax(0.3)", "fp8_e4m3", "threshold(2.0, 0.01)")
SLOW = (
    "chunkmax(0.01)",
    "chunkmax(0.0001)",
    "dgc(0.01)",
    "dgc(0.3)",
    "fp8_e4m3(block=3)",
    "fp8_e5m2",
    "randomk(0.01)",
    "randomk(1.0)",
    "randomk(0.25, scaled=true)",
    "shared_int8",
    "shared_int8(block=9, stochastic=false)",
    "threshold(0.001, 0.3)",
)


@pytest.mark.parametrize("text", [*FAST, *(pytest.param(text, marks=pytest.mark.slow) for text in SLOW)])
def test_it_conforms(text: str) -> None:
    check_compressor(parse_compressor(text))


def test_every_compressor_of_the_package_is_checked() -> None:
    checked = {type(parse_compressor(text)).__name__ for text in (*FAST, *SLOW)}
    assert checked == set(fxcomp_more.__all__)
