"""Check that kernels and operators do what the reference does, and refuse what it does not take."""

from __future__ import annotations

import torch
from torch import Tensor

from fxcomp.compressors import Compressor
from fxcomp.errors import BadTensor
from fxcomp.testing.bits import (
    assert_same_bits,
    clone,
    compare_with_reference,
    decode_keywords,
    may_feed_back,
    opcheck,
    or_empty,
)
from fxcomp.testing.rounds import Replica, agree, average, decode, encode, fresh_state, replicas_of
from fxcomp.testing.samples import SAMPLES, gaussian, laplace
from fxcomp.testing.segments import LARGE, ROUND_SEGMENTS, segments_to_try


def kernels_give_the_bits_of_the_reference(compressor: Compressor) -> None:
    """Encode, residual, state and decode, on every sample, after one step that moved the state."""
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
