"""Block quantisers and casts keep promises beyond those of every compressor."""

import pytest
import torch
from helpers.compressor_cases import decode, encode
from torch import Tensor

from fxcomp.compressors import FP16, Bias, Compressor, Feedback, Int2, Int4, Int8, Sign
from fxcomp.errors import BadOption
from fxcomp.testing.kernel_checks import plain_torch
from fxcomp.testing.samples import gaussian, laplace

SIZE = 131_072


def relative_error(compressor: Compressor, values: Tensor) -> float:
    """The squared norm of what one compression leaves out, in units of the values'."""
    segments = (len(values),)
    payload = torch.empty(compressor.payload_elements(segments), dtype=compressor.payload_dtype)
    state = compressor.fresh_state(len(values), 11, 0) if compressor.has_state else None
    compressor.encode(values, None, payload, segments, state)
    return ((decode(compressor, payload, 1, segments) - values).square().sum() / values.square().sum()).item()


@pytest.mark.parametrize(
    ("compressor", "of_gaussian", "of_laplace"),
    [
        (Int8(), 5.5e-5, 1.2e-4),
        (Int8(stochastic=True), 1.1e-4, 2.5e-4),
        (Int4(), 0.014, 0.026),
        (Int4(stochastic=True), 0.027, 0.05),
        (Int2(), 0.134, 0.196),
        (Int2(stochastic=True), 0.8, 2.2),
        (Sign(), 0.36, 0.50),
        (FP16(), 4e-8, 4e-8),
    ],
    ids=str,
)
def test_the_error_is_what_the_docs_say(compressor: Compressor, of_gaussian: float, of_laplace: float) -> None:
    assert relative_error(compressor, gaussian(SIZE, 1)) == pytest.approx(of_gaussian, rel=0.15)
    assert relative_error(compressor, laplace(SIZE, 1)) == pytest.approx(of_laplace, rel=0.15)


def test_fp16_codes_are_torchs_casts_also_where_they_overflow_or_vanish() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    every = every[every.isfinite()].sort().values
    halves = (every[1:] + every[:-1]) / 2
    edges = torch.tensor([65519.9, 65520.0, -65520.0, 1e30, torch.inf, -torch.inf, 2**-25, 2**-24, 1e-40])
    up, down = torch.full_like(halves, torch.inf), torch.full_like(halves, -torch.inf)
    bucket = torch.cat([every, halves, halves.nextafter(up), halves.nextafter(down), edges])
    payload = encode(FP16(), bucket, None, (len(bucket),))
    assert torch.equal(payload.view(torch.int16), bucket.half().view(torch.int16))
    assert torch.equal(decode(FP16(), payload, 1, (len(bucket),)), bucket.half().float())


def test_what_fp16_cannot_hold_stays_in_the_residual_and_is_seen() -> None:
    residual = torch.tensor([1.0, 2.0])
    payload = encode(FP16(), torch.tensor([70_000.0, 0.5]), residual, (2,))
    assert payload.tolist() == [torch.inf, 2.5]
    assert residual.tolist() == [1.0, 0.0]


def test_int2_sends_four_levels_four_a_byte() -> None:
    values = torch.tensor([0.1, -0.1, 2.0, -1.8, 1.0])  # mean magnitude 1, so the scale is 1.5
    for run in (encode(Int2(), values, None, (5,)), _by_torch(Int2(), values)):
        assert run[4:].tolist() == [0b00_11_01_10, 0b00_00_00_10, 0, 0]
        torch.testing.assert_close(decode(Int2(), run, 1, (5,)), torch.tensor([0.75, -0.75, 2.25, -2.25, 0.75]))


def _by_torch(compressor: Compressor, values: Tensor) -> Tensor:
    with plain_torch():
        return encode(compressor, values, None, (len(values),))


def test_int2_leaves_less_than_it_is_given_whatever_that_is() -> None:
    for seed in range(20):
        values = gaussian(4096, seed) * torch.exp(3 * gaussian(4096, 100 + seed))
        mean = values.abs().view(-1, 512).mean(dim=1)
        bound = 1 - 0.9375 * 512 * mean.square() / values.square().view(-1, 512).sum(dim=1)
        decoded = decode(Int2(), encode(Int2(), values, None, (4096,)), 1, (4096,))
        left = (values - decoded).square().view(-1, 512).sum(dim=1) / values.square().view(-1, 512).sum(dim=1)
        assert (left <= bound + 1e-4).all()


def test_what_can_grow_under_feedback_is_forbidden_to_be_fed_back() -> None:
    assert Int4().feedback is Int2().feedback is Feedback.REQUIRED
    assert Int8(stochastic=True).feedback is Feedback.OPTIONAL
    assert Int4(stochastic=True).feedback is Feedback.OPTIONAL
    assert Int4(196, stochastic=True).feedback is Feedback.OPTIONAL
    assert Int4(198, stochastic=True).feedback is Feedback.FORBIDDEN
    assert Int2(stochastic=True).feedback is Feedback.FORBIDDEN
    assert Int2(8, stochastic=True).feedback is Feedback.OPTIONAL
    assert Int2(stochastic=True).bias is Bias.UNBIASED


def test_int8_does_without_feedback_in_blocks_in_which_its_loss_was_measured() -> None:
    assert Int8().feedback is Int8(64).feedback is Feedback.OPTIONAL
    assert Int8(513).feedback is Feedback.REQUIRED


def test_only_a_random_quantiser_has_state() -> None:
    assert not Int8().has_state
    assert Int8().state_bytes((5, 7)) == 0
    assert Int8(stochastic=True).has_state
    assert Int8(stochastic=True).state_bytes((5, 7)) == 32


@pytest.mark.parametrize(("kind", "block", "multiple"), [(Int4, 7, 2), (Int2, 6, 4), (Sign, 12, 8)])
def test_a_block_that_ends_within_a_byte_is_refused(kind: type[Int4 | Int2 | Sign], block: int, multiple: int) -> None:
    with pytest.raises(BadOption, match=f"needs a block of whole bytes, a multiple of {multiple}, not block={block}"):
        kind(block)


@pytest.mark.parametrize("width", [0, 3, 6, 16])
def test_codes_that_do_not_fill_bytes_are_refused(width: int) -> None:
    class Copied(Int4):
        __slots__ = ()

        @property
        def bits(self) -> int:
            return width

    with pytest.raises(BadOption, match=rf"(?s)has codes of {width} bits.*1, 2, 4 or 8 bits.*next larger"):
        Copied()


@pytest.mark.parametrize("compressor", [Int8(), Int4(), Int2(), Sign(), FP16()], ids=str)
def test_a_long_output_has_the_same_bits_wherever_its_segments_begin(compressor: Compressor) -> None:
    """Long outputs are streamed line by line: from 2^21 values on."""
    segments = (3, 2_097_163, 1, 40, 0, 70_001)
    values = gaussian(sum(segments), 2)
    payload = encode(compressor, values, None, segments)
    room = torch.full((sum(segments) + 32,), 77.0)
    with plain_torch():
        expected = decode(compressor, payload, 1, segments)
    for offset in (0, 1, 15):
        out = room.fill_(77.0)[offset : offset + sum(segments)]
        compressor.decode(payload, 1, segments, out)
        assert torch.equal(out, expected)
        assert (room[:offset] == 77).all()
        assert (room[offset + sum(segments) :] == 77).all()
