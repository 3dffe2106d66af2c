"""Compare kernels and operators with the reference: results bit by bit, and errors for invalid inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, EncoderInput, Feedback, kernels
from fxcomp.compressors.base import find_kernel
from fxcomp.compressors.operators import or_empty
from fxcomp.compressors.triton import dispatch
from fxcomp.errors import BadTensor
from fxcomp.testing.rounds import Replica, agree, average, decode, encode, fresh_state, replicas_of
from fxcomp.testing.samples import LARGE, ROUND_SEGMENTS, SAMPLES, gaussian, laplace, segments_to_try


def assert_same_bits(actual: Tensor, expected: Tensor, where: str = "") -> None:
    """Check bitwise equality, including signed zeros; all NaNs are equal."""
    assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} against {expected.dtype}"
    assert actual.shape == expected.shape, f"{where}: {tuple(actual.shape)} against {tuple(expected.shape)}"
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan()), f"{where}: other values are NaN"
        actual, expected = actual[~actual.isnan()], expected[~expected.isnan()]
    differs = actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if differs.any():
        first = int(differs.nonzero()[0, 0]) // actual.element_size()
        raise AssertionError(
            f"{where}: {int(differs.sum())} bytes differ, first at {first}: {actual[first]} against {expected[first]}"
        )


@contextlib.contextmanager
def plain_torch() -> Generator[None]:
    """Disable kernels."""
    with (
        patch.object(kernels, "can_run_on", return_value=False),
        patch.object(dispatch, "can_run_on", return_value=False),
    ):
        yield


def compare_with_reference(bound: Compressor, bucket: Tensor, segments: Sequence[int], where: str) -> None:
    """Compare the second step of kernel and reference, with and without a residual."""
    if not has_kernel(bound):
        return
    for feedback in {False, may_feed_back(bound)}:
        by_kernel = second_step(bound, bucket, segments, feedback=feedback)
        with plain_torch():
            by_torch = second_step(bound, bucket, segments, feedback=feedback)
        for one, two in zip(by_kernel, by_torch, strict=True):
            assert_same_bits(one, two, f"{where}, {tuple(segments)}, feedback {feedback}")


def second_step(bound: Compressor, bucket: Tensor, segments: Sequence[int], *, feedback: bool) -> list[Tensor]:
    """Compress `bucket` after another bucket. Return payload, decoded mean, agreed values, residual and state."""
    [replica] = replicas_of(bound, segments, feedback=feedback)
    if replica.state is not None:
        average(bound, [gaussian(sum(segments), 5)], [replica], segments)
    if replica.residual is not None:
        replica.residual = 0.1 * gaussian(sum(segments), 7)
    agreed = agree(bound, [bucket], [replica], segments)
    payload = encode(bound, bucket, replica, segments, agreed)
    copies = 1 if bound.is_linear else 2
    decoded = decode(bound, payload.repeat(copies), copies, segments, agreed, replica.state)
    return [payload, decoded, *(t for t in (agreed, replica.residual, replica.state) if t is not None)]


def has_kernel(compressor: Compressor) -> bool:
    kind, own = type(compressor), ("encode_on_cpu", "decode_on_cpu", "propose_on_cpu")
    return find_kernel(kind, "encode") is not None or any(getattr(kind, n) is not getattr(Compressor, n) for n in own)


def reference_of(bound: Compressor, bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> Any:
    [replica] = replicas_of(bound, segments, feedback=False)
    agreed = agree(bound, [bucket], [replica], segments)
    return bound.compress_reference(EncoderInput(bucket, residual, tuple(segments), replica.state, agreed))


def may_feed_back(compressor: Compressor) -> bool:
    return compressor.feedback is not Feedback.FORBIDDEN


def decode_keywords(compressor: Compressor, agreed: Tensor | None, state: Tensor | None) -> dict[str, Tensor | None]:
    return {"agreed": agreed, "state": state if compressor.facts.decode_needs_state else None}


def opcheck(op: Any, arguments: tuple[Any, ...], keywords: dict[str, Tensor | None]) -> None:
    opcheck: Any = torch.library.opcheck  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    opcheck(op, arguments, keywords)


def clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def assert_close(actual: Tensor, expected: Tensor, relative: float, where: str) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= relative * largest, f"{where}: off by {error:.3g} where the largest value is {largest:.3g}"


def kernels_give_the_bits_of_the_reference(compressor: Compressor) -> None:
    bound = compressor.bound_to((), 1)
    for segments in segments_to_try(compressor):
        for name, sample in SAMPLES.items():
            compare_with_reference(bound, sample(sum(segments)), segments, name)


def kernels_give_the_bits_of_the_reference_on_five_million_values(compressor: Compressor) -> None:
    compare_with_reference(compressor.bound_to((), 1), laplace(LARGE), (LARGE - 70_000, 70_000), "laplace")


def kernels_give_the_bits_of_the_reference_at_round_lengths(compressor: Compressor) -> None:
    compare_with_reference(compressor.bound_to((), 1), laplace(sum(ROUND_SEGMENTS)), ROUND_SEGMENTS, "laplace")


def threads_change_no_bit(compressor: Compressor) -> None:
    segments = (700_001, 130, 300_000)
    bucket, threads = laplace(sum(segments)), torch.get_num_threads()
    seen: list[list[Tensor]] = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            replicas = replicas_of(compressor, segments, 2, feedback=may_feed_back(compressor))
            mean = average(compressor, (bucket, bucket.flip(0)), replicas, segments)
            seen.append([mean, *(t for r in replicas for t in (r.residual, r.state) if t is not None)])
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert_same_bits(one, two, "with another number of threads")


def ops_compute_the_same_and_change_nothing(compressor: Compressor) -> None:
    segments = (600, 0, 41)
    bound = compressor.bound_to((), 1)
    for feedback in {False, may_feed_back(compressor)}:
        [replica] = replicas_of(bound, segments, feedback=feedback)
        strided = torch.stack([gaussian(641), gaussian(641, 1)], dim=1)[:, 0]
        bucket = strided.contiguous()
        agreed = agree(bound, [bucket], [replica], segments)
        kept = Replica(clone(replica.residual), clone(replica.state))
        keywords = {"state": replica.state, "agreed": agreed}
        arguments = (bucket, replica.residual, segments, *bound.parameters)
        opcheck(bound.compress_op, arguments, keywords)
        payload, residual, state = bound.compress_op(*arguments, **keywords)
        from_strided = bound.compress_op(strided, *arguments[1:], **keywords)[0]
        assert_same_bits(from_strided, payload, "from a bucket that is not contiguous")
        assert_same_bits(bucket, strided.contiguous(), "the op changed its bucket")
        for now, before in ((replica.residual, kept.residual), (replica.state, kept.state)):
            if now is not None and before is not None:
                assert_same_bits(now, before, "the op changed an input")
        assert_same_bits(encode(bound, bucket, replica, segments, agreed), payload, "op against encode")
        assert_same_bits(residual, or_empty(replica.residual, residual), "the op's residual")
        if not bound.facts.state_from_payload:
            assert_same_bits(state, or_empty(replica.state, state), "the op's state")
        if bound.propose_op is not None:
            opcheck(bound.propose_op, (bucket, kept.residual, segments, *bound.parameters), {"state": kept.state})
        copies = 1 if bound.is_linear else 2
        payloads = payload.repeat(copies)
        opcheck(
            bound.decompress_op, (payloads, copies, segments, *bound.parameters), decode_keywords(bound, agreed, state)
        )
        decoded = bound.decompress_op(
            payloads, copies, segments, *bound.parameters, **decode_keywords(bound, agreed, state)
        )
        assert_same_bits(decoded, decode(bound, payloads, copies, segments, agreed, state), "op against decode")


def wrong_tensors_are_refused(compressor: Compressor) -> None:
    bound = compressor.bound_to((), 1)
    payload = torch.empty(bound.payload_elements((64,)), dtype=bound.payload_dtype)
    state = fresh_state(bound, (64,))
    for bucket, residual in (
        (torch.zeros(64, dtype=torch.float64), None),
        (torch.zeros(128)[::2], None),
        (torch.zeros(64), torch.zeros(63)),
        (torch.zeros(64), torch.zeros(64, device="meta")),
    ):
        try:
            bound.encode(bucket, residual, payload, (64,), state, None)
        except BadTensor:
            continue
        raise AssertionError(f"a bucket {bucket.dtype} {tuple(bucket.stride())} with this residual was not refused")
