"""Which bytes int4 sends."""

import torch
from helpers.compressor_cases import decode, encode

from fxcomp.compressors import Int4
from fxcomp.testing.kernel_checks import plain_torch

VALUES = torch.tensor([7.0, -7.0, 0.5, 1.5, -1.0, 14.0, 3.0])  # the second segment's step is 2, and 3 / 2 rounds to 2
SEGMENTS = (5, 2)
CODES = [0x97, 0x20, 0x0F, 0x27]


def _codes() -> list[int]:
    return encode(Int4(), VALUES, None, SEGMENTS)[8:].tolist()


def test_two_codes_share_a_byte_but_two_segments_do_not() -> None:
    assert _codes() == CODES
    with plain_torch():
        assert _codes() == CODES


def test_codes_decode_to_multiples_of_the_step() -> None:
    decoded = decode(Int4(), encode(Int4(), VALUES, None, SEGMENTS), 1, SEGMENTS)
    assert decoded.tolist() == [7.0, -7.0, 0.0, 2.0, -1.0, 14.0, 4.0]
