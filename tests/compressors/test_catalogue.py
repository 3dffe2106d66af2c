"""The text form of compressors, and what is said about a wrong one."""

import pytest

from fxcomp.compressors import BF16, BadCompressor, Compressor, Int4, Int8, Sign, TopK, compressor_of, parse_compressor
from fxcomp.compressors.registration import CATALOGUE
from fxcomp.errors import BadOption

KNOWN = ", ".join(sorted(CATALOGUE))


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
        ("itn8", f"there is no compressor 'itn8'; did you mean 'int8'? There are {KNOWN}"),
        ("TopK(0.1)", f"there is no compressor 'TopK'; did you mean 'topk'? There are {KNOWN}"),
        ("zstd", f"there is no compressor 'zstd'; there are {KNOWN}"),
        ("topk(", "cannot read the compressor 'topk('; write for example int8(block=128) or topk(0.01)"),
        (
            "topk",
            "cannot read the compressor 'topk': missing a required argument: 'ratio'; it is topk(ratio: float)",
        ),
        (
            "int8(bloc=3)",
            "cannot read the compressor 'int8(bloc=3)': got an unexpected keyword argument 'bloc'; "
            "it is int8(block: int = 512, stochastic: bool = False)",
        ),
        (
            "int8(1.5)",
            "cannot read the compressor 'int8(1.5)': invalid literal for int() with base 10: '1.5'; "
            "it is int8(block: int = 512, stochastic: bool = False)",
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
    with pytest.raises(BadCompressor) as caught:
        parse_compressor(text)
    assert str(caught.value) == complaint
    assert isinstance(caught.value, BadOption)
    assert isinstance(caught.value, ValueError)
