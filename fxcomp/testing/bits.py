"""Run a compressor beside its reference, and compare bits."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fxcomp.compressors import Compressor, EncoderInput, Feedback, kernels, triton
from fxcomp.compressors.base import find_kernel
from fxcomp.testing.rounds import agree, average, decode, encode, replicas_of
from fxcomp.testing.samples import gaussian


def assert_same_bits(actual: Tensor, expected: Tensor, where: str = "") -> None:
    """Equal bit for bit, zeros with their signs; only one NaN is as good as another."""
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
    """Run the references, whether there are kernels or not."""
    with (
        patch.object(kernels, "can_run_on", return_value=False),
        patch.object(triton, "can_run_on", return_value=False),
    ):
        yield


def compare_with_reference(bound: Compressor, bucket: Tensor, segments: Sequence[int], where: str) -> None:
    """One step by kernel against the same in plain torch, with and without a residual, from a state that has moved."""
    if not has_kernel(bound):
        return
    for feedback in {False, may_feed_back(bound)}:
        by_kernel = second_step(bound, bucket, segments, feedback=feedback)
        with plain_torch():
            by_torch = second_step(bound, bucket, segments, feedback=feedback)
        for one, two in zip(by_kernel, by_torch, strict=True):
            assert_same_bits(one, two, f"{where}, {tuple(segments)}, feedback {feedback}")


def second_step(bound: Compressor, bucket: Tensor, segments: Sequence[int], *, feedback: bool) -> list[Tensor]:
    """Compress `bucket` after a step that moved the state, if there is one: payload, mean, and what is kept."""
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


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def assert_close(actual: Tensor, expected: Tensor, relative: float, where: str) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= relative * largest, f"{where}: off by {error:.3g} where the largest value is {largest:.3g}"
