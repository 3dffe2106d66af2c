"""Every compressor passes every check of fxcomp.testing, and known sizes are what they are."""

from typing import Any

import pytest
import torch
from helpers.compressor_cases import COMPRESSORS

from fxcomp.compressors import BF16, Compressor, Int4, Int8, Sign, TopK, kernels
from fxcomp.errors import BadTensor
from fxcomp.plan.interpret import travels_whole
from fxcomp.testing import CHECKS

FIRST_OF_CLASS = {
    (type(compressor), getattr(compressor, "stochastic", False)): compressor for compressor in COMPRESSORS[::-1]
}
"""With other parameters, the same code runs."""

ONE_OF_EACH_KIND = [FIRST_OF_CLASS[kind, False] for kind in (Int8, TopK)]
"""Of these every fast run makes the long checks."""

LONG_CHECKS = (
    "kernels_give_the_bits_of_the_reference",
    "kernels_give_the_bits_of_the_reference_on_five_million_values",
    "kernels_give_the_bits_of_the_reference_at_round_lengths",
    "large_segments_come_out_whole",
    "ops_compute_the_same_and_change_nothing",
    "threads_change_no_bit",
)


def is_slow(compressor: Compressor, check: str) -> bool:
    """Leave each compressor's first parameters all short checks, and the others each third, in turns."""
    if check in LONG_CHECKS:
        return compressor not in ONE_OF_EACH_KIND
    place = COMPRESSORS.index(compressor) + list(CHECKS).index(check)
    return compressor not in FIRST_OF_CLASS.values() and place % 3 > 0


def cases() -> list[Any]:
    return [
        pytest.param(
            compressor,
            check,
            id=f"{compressor}-{check}",
            marks=[pytest.mark.slow] if is_slow(compressor, check) else [],
        )
        for compressor in COMPRESSORS
        for check in CHECKS
    ]


@pytest.mark.parametrize(("compressor", "check"), cases())
def test_conforms(compressor: Compressor, check: str) -> None:
    if check.startswith("kernels") and not kernels.available():
        pytest.skip("no kernels are built")
    CHECKS[check](compressor)


@pytest.mark.parametrize(
    ("compressor", "segments", "payload_bytes"),
    [
        (BF16(), (1000, 7), 2 * 1007),
        (Int8(), (1000, 7), 4 * 3 + 1007 + 1),
        (Int8(128), (1000, 8), 4 * 9 + 1008),
        (Int4(), (1000, 7), 4 * (8 + 1) + 500 + 4),
        (Int4(), (1000, 1, 7), 4 * (8 + 1 + 1) + 500 + 1 + 4 + 3),
        (Int4(2), (5,), 4 * 3 + 3 + 1),
        (Sign(), (1000, 7), 4 * 3 + 125 + 1 + 2),
        (Sign(8), (1000,), 4 * 125 + 125 + 3),
    ],
    ids=str,
)
def test_the_size_of_a_payload_is_the_formula(
    compressor: Compressor, segments: tuple[int, ...], payload_bytes: int
) -> None:
    assert compressor.payload_bytes(segments) == payload_bytes


def test_a_payload_of_zeros_decodes_to_finite_values_or_is_refused_by_top_k() -> None:
    """A step without a network decodes zeros where nobody has sent anything yet."""
    refusing: set[str] = set()
    for compressor in COMPRESSORS:
        if travels_whole(compressor):
            continue
        for segments in ((1000, 7), (5,)):
            payloads = 1 if compressor.is_linear else 2
            payload = torch.zeros(payloads * compressor.payload_elements(segments), dtype=compressor.payload_dtype)
            out = torch.full((sum(segments),), torch.nan)
            try:
                compressor.decode(payload, payloads, segments, out)
            except BadTensor as error:
                refusing.add(compressor.name if "names places outside its segment" in str(error) else str(error))
            else:
                assert out.isfinite().all(), compressor
    assert refusing == {"topk"}
