"""What every compressor must do, whichever it is."""

import pytest
import torch
from compressor_cases import (
    BUCKETS,
    COMPRESSORS,
    EACH,
    FINITE,
    SEGMENTS,
    WITH_KERNELS,
    assert_same_bits,
    decode,
    encode,
    gaussian,
    plain_torch,
)

from fxcomp.compressors import BF16, Compressor, Int4, Int8, Sign, TopK, parse_compressor


@WITH_KERNELS
@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_the_kernels_give_the_bits_of_the_references(compressor: Compressor, kind: str) -> None:
    for segments in SEGMENTS:
        bucket, old = BUCKETS[kind](sum(segments)), 0.1 * gaussian(sum(segments), seed=7)
        for residual in (None, old):
            by_kernel = None if residual is None else residual.clone()
            by_reference = None if residual is None else residual.clone()
            payload = encode(compressor, bucket, by_kernel, segments)
            with plain_torch():
                expected = encode(compressor, bucket, by_reference, segments)
            assert_same_bits(payload, expected)
            if by_kernel is not None and by_reference is not None:
                assert_same_bits(by_kernel, by_reference)


@WITH_KERNELS
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_the_kernels_decode_to_the_bits_of_the_references(compressor: Compressor, ranks: int) -> None:
    kinds = ["gaussian", "one nan", "laplace"]
    for segments in SEGMENTS:
        buckets = [BUCKETS[kind](sum(segments)) for kind in kinds[:ranks]]
        payloads = torch.cat([encode(compressor, bucket, None, segments) for bucket in buckets])
        with plain_torch():
            expected = decode(compressor, payloads, ranks, segments)
        assert_same_bits(decode(compressor, payloads, ranks, segments), expected)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("compressor", EACH, ids=str)
def test_the_ops_pass_opcheck(compressor: Compressor, with_residual: bool) -> None:
    segments = (600, 0, 41)
    bucket, residual = gaussian(641), gaussian(641, seed=1) if with_residual else None
    torch.library.opcheck(compressor.compress_op, (bucket, residual, segments, *compressor.parameters))
    payload, *_ = compressor.compress_op(bucket, residual, segments, *compressor.parameters)
    payloads = torch.cat([payload, payload])
    torch.library.opcheck(compressor.decompress_op, (payloads, 2, segments, *compressor.parameters))


@pytest.mark.parametrize("compressor", EACH, ids=str)
def test_the_ops_compute_what_encode_and_decode_compute_and_change_no_input(compressor: Compressor) -> None:
    segments = (600, 41)
    bucket, residual = gaussian(641), gaussian(641, seed=1)
    payload, new_residual, _ = compressor.compress_op(bucket, residual, segments, *compressor.parameters)
    assert torch.equal(bucket, gaussian(641))
    assert torch.equal(residual, gaussian(641, seed=1))
    assert_same_bits(payload, encode(compressor, bucket, residual, segments))
    assert_same_bits(new_residual, residual)
    decoded = compressor.decompress_op(payload, 1, segments, *compressor.parameters)
    assert_same_bits(decoded, decode(compressor, payload, 1, segments))
    assert len(compressor.compress_op(bucket, None, segments, *compressor.parameters)[1]) == 0


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
        (TopK(0.01), (1000, 7, 0), 8 * (10 + 1)),
        (TopK(0.01), (1001,), 8 * 11),
        (TopK(0.07), (100,), 8 * 7),
        (TopK(1.0), (3, 4), 8 * 7),
    ],
    ids=str,
)
def test_the_size_of_a_payload_is_the_formula(
    compressor: Compressor, segments: tuple[int, ...], payload_bytes: int
) -> None:
    assert compressor.payload_bytes(segments) == payload_bytes
    payload, *_ = compressor.compress_op(gaussian(sum(segments)), None, segments, *compressor.parameters)
    assert payload.dtype == compressor.payload_dtype
    assert payload.numel() * payload.element_size() == payload_bytes


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_no_segments_make_an_empty_payload(compressor: Compressor) -> None:
    for segments in ((), (0,), (0, 0)):
        assert compressor.payload_bytes(segments) == 0


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_payload_and_residual_add_up_to_the_gradient(compressor: Compressor, kind: str) -> None:
    for segments in SEGMENTS:
        bucket, residual = BUCKETS[kind](sum(segments)), 0.1 * gaussian(sum(segments), seed=7)
        value = bucket + residual
        decoded = decode(compressor, encode(compressor, bucket, residual, segments), 1, segments)
        torch.testing.assert_close(decoded + residual, value, rtol=0, atol=3e-7 * _largest(value))


def _largest(value: torch.Tensor) -> float:
    return value.abs().max().item() if len(value) else 0.0


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_a_payload_survives_the_way_through_plain_bytes(compressor: Compressor) -> None:
    segments = (1000, 66_000, 9)
    payload = encode(compressor, gaussian(sum(segments)), None, segments)
    # One byte in front: nobody promises that a receive buffer is aligned, except for bf16, whose dtype does.
    sent = bytearray(b"?" + payload.view(torch.uint8).numpy().tobytes())
    offset = 0 if compressor.payload_dtype is torch.bfloat16 else 1
    received = torch.frombuffer(sent[1 - offset :], dtype=torch.uint8)[offset:].view(compressor.payload_dtype)
    expected = decode(compressor, payload, 1, segments)
    assert_same_bits(decode(compressor, received, 1, segments), expected)
    with plain_torch():
        assert_same_bits(decode(compressor, received, 1, segments), expected)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_segments_do_not_mix(compressor: Compressor) -> None:
    first, second = gaussian(700), 1000 * gaussian(66_000, seed=1)
    together = encode(compressor, torch.cat([first, second]), None, (700, 66_000))
    alone = [decode(compressor, encode(compressor, x, None, (len(x),)), 1, (len(x),)) for x in (first, second)]
    assert_same_bits(decode(compressor, together, 1, (700, 66_000)), torch.cat(alone))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_decode_is_the_mean_over_ranks_in_rank_order(compressor: Compressor) -> None:
    segments = (1000, 66_000, 9)
    payloads = [encode(compressor, gaussian(sum(segments), seed), None, segments) for seed in range(3)]
    one, two, three = (decode(compressor, payload, 1, segments) for payload in payloads)
    mean = decode(compressor, torch.cat(payloads), 3, segments)
    assert_same_bits(mean + 0.0, ((one + two) + three) * (1 / 3) + 0.0)


@pytest.mark.parametrize("kind", ["one nan", "one inf"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_what_is_not_finite_is_seen_by_the_receiver_and_spares_the_residual(compressor: Compressor, kind: str) -> None:
    segments = (1000, 66_000)
    bucket, old = BUCKETS[kind](67_000), 0.1 * gaussian(67_000, seed=7)
    residual = old.clone()
    decoded = decode(compressor, encode(compressor, bucket, residual, segments), 1, segments)
    is_spared = ~decoded.isfinite()
    assert is_spared[~bucket.isfinite()].all()
    assert is_spared.sum() <= max(getattr(compressor, "block", 1), 1)
    assert torch.equal(residual[is_spared], old[is_spared])
    # A step that no rank can use is taken back with what the residual and the payload hold.
    undone = residual + decoded - bucket
    torch.testing.assert_close(undone[~is_spared], old[~is_spared], rtol=0, atol=1e-6)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_the_text_of_a_compressor_parses_back(compressor: Compressor) -> None:
    assert parse_compressor(str(compressor)) == compressor


@pytest.mark.parametrize("compressor", EACH, ids=str)
def test_a_tensor_that_a_kernel_could_not_read_is_refused(compressor: Compressor) -> None:
    payload = torch.empty(compressor.payload_elements((64,)), dtype=compressor.payload_dtype)
    with pytest.raises(AssertionError, match=r"the bucket must be torch\.float32"):
        compressor.encode(torch.zeros(64, dtype=torch.float64), None, payload, (64,))
    with pytest.raises(AssertionError, match="the bucket must be contiguous"):
        compressor.encode(torch.zeros(128)[::2], None, payload, (64,))
    with pytest.raises(AssertionError, match="the residual must have 64 elements, not 63"):
        compressor.encode(torch.zeros(64), torch.zeros(63), payload, (64,))
    with pytest.raises(AssertionError, match="the payloads must have"):
        compressor.decode(payload, 2, (64,), torch.zeros(64))
