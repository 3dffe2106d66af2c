"""Check results: sums, errors, values that are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors import Bias, Compressor
from fxcomp.testing.kernel_checks import assert_close, assert_same_bits, clone, may_feed_back, plain_torch
from fxcomp.testing.rounds import Replica, agree, average, decode, encode, replicas_of
from fxcomp.testing.samples import (
    IN_RANGE,
    LARGE_SEGMENTS,
    LARGEST,
    NOT_FINITE,
    SAMPLES,
    gaussian,
    heavy,
    laplace,
    segments_to_try,
)


def payload_and_residual_add_up(compressor: Compressor) -> None:
    """Check that decompress(payload) + new residual = bucket + old residual."""
    if not may_feed_back(compressor):
        return
    for segments in segments_to_try(compressor):
        for name in IN_RANGE:
            _check_sum(compressor, segments, name)


def large_segments_come_out_whole(compressor: Compressor) -> None:
    """Check up to 5,000,000 values: payload and residual add up, or an unbiased compressor's errors average out."""
    for segments in LARGE_SEGMENTS:
        if may_feed_back(compressor):
            _check_sum(compressor, segments, "ascending")
        elif compressor.bias is Bias.UNBIASED:
            _check_ends(compressor, segments)


def _check_sum(compressor: Compressor, segments: Sequence[int], name: str) -> None:
    [replica] = replicas_of(compressor, segments, feedback=True)
    replica.residual = 0.1 * gaussian(sum(segments), 7)
    bucket = SAMPLES[name](sum(segments))
    value = bucket + replica.residual
    decoded = average(compressor, [bucket], [replica], segments)
    for one, two in zip(
        torch.split(decoded + replica.residual, list(segments)), torch.split(value, list(segments)), strict=True
    ):
        assert_close(one, two, 1e-5 if compressor.facts.needs_whole_parameters else 3e-7, f"{name}, {segments}")


def _check_ends(compressor: Compressor, segments: Sequence[int]) -> None:
    """Check that errors average out over the first and the last tenth of each segment."""
    bucket = gaussian(sum(segments))
    decoded = average(compressor, [bucket], replicas_of(compressor, segments, feedback=False), segments)
    for piece, mean in zip(torch.split(bucket, list(segments)), torch.split(decoded, list(segments)), strict=True):
        part = len(piece) // 10
        for end in (slice(0, part), slice(len(piece) - part, None)):
            exact, error = piece[end].double(), (mean - piece)[end].double()
            sent, squares = exact @ error, exact.square() @ error.square()
            assert part < 5000 or sent.abs() <= 6 * 4 * squares.sqrt(), (
                f"{len(piece)} values, {end}: off by {sent / exact.square().sum():.2g} on average"
            )


def errors_telescope(compressor: Compressor) -> None:
    """Check that sent values plus the residual are the sum of the gradients, over 24 steps."""
    if not may_feed_back(compressor):
        return
    ranks = 1 if compressor.is_linear and compressor.payload_dtype.itemsize == 2 else 2  # 16-bit sums round too
    error = telescoping_error(compressor, (70_000, 513, 5), ranks=ranks)
    assert error < 1e-6 * (10 if compressor.facts.needs_whole_parameters else 1), f"relative error {error:.1e}"


def telescoping_error(compressor: Compressor, segments: Sequence[int], steps: int = 24, ranks: int = 2) -> float:
    """Return |sent + residual - input| / |input|, with sent values and inputs summed over `steps`."""
    elements = sum(segments)
    replicas = replicas_of(compressor, segments, ranks, feedback=True)
    sent, put_in = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in range(steps):
        gradients = [gaussian(elements, step * ranks + rank) for rank in range(ranks)]
        sent += average(compressor, gradients, replicas, segments)
        put_in += torch.stack(gradients).double().mean(dim=0)
    left = torch.stack([replica.residual for replica in replicas if replica.residual is not None]).double()
    left = left.sum(dim=0) if compressor.is_linear else left.mean(dim=0)  # linear: buckets are scaled before
    return ((sent + left - put_in).square().sum() / put_in.square().sum()).sqrt().item()


def feedback_is_stable(compressor: Compressor) -> None:
    """Check that the mean relative squared error ω is at most 1, so that residuals stay bounded."""
    if not may_feed_back(compressor):
        return
    for name, values in (("gaussian", gaussian(65_536)), ("laplace", laplace(65_536)), ("heavy", heavy(65_536))):
        omega = relative_error(compressor, values, draws=8)
        assert omega <= 1.0 + 1e-6, f"ω = {omega:.3g} on {name} values: the residual would grow"


def relative_error(compressor: Compressor, values: Tensor, draws: int = 1) -> float:
    """Return ω = |v - decompress(compress(v))|² / |v|²: the mean over `draws` seeds, each a first step."""
    segments = (len(values),)
    lost = 0.0
    for seed in range(draws):
        decoded = average(compressor, [values], replicas_of(compressor, segments, feedback=False, seed=seed), segments)
        lost += ((values - decoded).double().square().sum() / values.double().square().sum()).item()
    return lost / draws


def rounding_goes_either_way(compressor: Compressor) -> None:
    """Check, without error feedback, that rounding is unbiased for positive and for negative values."""
    if compressor.bias is not Bias.ROUNDING:
        return
    for sign, values in (("positive", gaussian(100_000).abs()), ("negative", -gaussian(100_000).abs())):
        decoded = average(compressor, [values], replicas_of(compressor, (100_000,), feedback=False), (100_000,))
        error = (decoded - values).double()
        bias = (error.mean() / error.square().mean().sqrt()).item()
        assert abs(bias) < 0.1, f"{sign} values: the mean error is {bias:.2f} of the root mean square error"


def segments_do_not_mix(compressor: Compressor) -> None:
    """Check that a parameter's values do not affect other parameters."""
    segments = (700, 66_000, 30)
    quiet = gaussian(sum(segments))
    loud = quiet.clone()
    loud[700:66_700] *= 1000
    means = [
        average(compressor, [v], replicas_of(compressor, segments, feedback=False), segments) for v in (quiet, loud)
    ]
    for part in (slice(0, 700), slice(66_700, None)):
        assert_same_bits(means[0][part], means[1][part], "next to a segment of large values")


def every_rank_decodes_the_mean(compressor: Compressor) -> None:
    """Check the mean of gathered payloads bitwise, and bound the error of three ranks with equal buckets."""
    segments, ranks = (1000, 66_000, 9), 3
    bound = compressor.bound_to((), ranks)
    buckets = [gaussian(sum(segments), seed) for seed in range(ranks)]
    if not bound.is_linear:
        replicas = replicas_of(bound, segments, ranks, feedback=False)
        agreed = agree(bound, buckets, replicas, segments)
        payloads = [encode(bound, b, r, segments, agreed) for b, r in zip(buckets, replicas, strict=True)]
        state = replicas[0].state
        one, two, three = (decode(bound, payload, 1, segments, agreed, state) for payload in payloads)
        mean = decode(bound, torch.cat(payloads), ranks, segments, agreed, state)
        total = (one + two) + three
        expected = total / 3 if compressor.facts.is_exact else total * (1 / 3)
        assert_same_bits(mean + 0.0, expected + 0.0, "the mean of three ranks")
    replicas = replicas_of(compressor, segments, ranks, feedback=False)
    mean = average(compressor, [buckets[0]] * ranks, replicas, segments)
    exact, lost = buckets[0].double(), mean.double() - buckets[0].double()
    alone = relative_error(compressor, buckets[0], draws=4)
    assert lost.square().sum() / exact.square().sum() <= 1.2 * max(alone, 1e-9) * (
        1 if not bound.is_linear else ranks**2
    ), "three ranks with the same bucket lose more than one alone"


def what_is_not_finite_is_seen_and_spares_the_residual(compressor: Compressor) -> None:
    """Check that NaN or infinity makes only its own segment non-finite, and leaves the segment's residual unchanged."""
    segments, ranks = (1000, 66_000, 40), 2
    for name in NOT_FINITE:
        bad = SAMPLES[name](66_000)
        bucket = torch.cat([gaussian(1000), bad, gaussian(40, 3)])
        feedback = may_feed_back(compressor)
        replicas = replicas_of(compressor, segments, ranks, feedback=feedback)
        old = 0.1 * gaussian(sum(segments), 7)
        if feedback:
            for replica in replicas:
                replica.residual = old.clone()
        mean = average(compressor, [bucket, gaussian(sum(segments), 5)], replicas, segments)
        first, second, third = torch.split(mean, list(segments))
        assert not second.isfinite().all(), f"{name}: no rank would notice"
        assert first.isfinite().all(), f"{name}: another segment is not finite either"
        assert third.isfinite().all(), f"{name}: another segment is not finite either"
        for replica in replicas:
            for kept in (replica.residual, replica.state):
                if kept is not None and not compressor.facts.state_from_payload:
                    assert kept.isfinite().all(), f"{name}: a residual or state for the next step is not finite"
        if feedback:
            _check_spared(compressor, bucket, old, segments, name)


def a_sum_that_is_not_finite_is_seen(compressor: Compressor) -> None:
    """Check a value whose bucket + residual is not finite.

    It makes only the mean of its segment non-finite, and its residual stays.
    """
    if not may_feed_back(compressor):
        return
    segments, at = (1000, 2000, 40), 1700
    for what, value, old in (("NaN", 1.0, torch.nan), ("infinity", 1.0, torch.inf), ("too much", 3e38, 3e38)):
        bucket = gaussian(sum(segments))
        bucket[at] = value
        [replica] = replicas_of(compressor, segments, feedback=True)
        replica.residual = 0.1 * gaussian(sum(segments), 7)
        replica.residual[at] = old
        kept = replica.residual.clone()
        mean = average(compressor, [bucket], [replica], segments)
        first, second, third = torch.split(mean, list(segments))
        assert not second.isfinite().all(), f"{what} in bucket + residual: no rank would notice"
        assert first.isfinite().all(), f"{what} in bucket + residual: another segment is not finite either"
        assert third.isfinite().all(), f"{what} in bucket + residual: another segment is not finite either"
        assert_same_bits(replica.residual[at : at + 1], kept[at : at + 1], f"{what} in bucket + residual: the residual")


def finite_values_leave_a_finite_residual(compressor: Compressor) -> None:
    """Check that residuals stay finite for values up to fp32's largest, even if bucket + residual exceeds it."""
    if not may_feed_back(compressor):
        return
    for segments in ((1,), (600, 0, 41, 2600)):
        size = sum(segments)
        signs = gaussian(size, 3).sign()
        buckets = {"huge": SAMPLES["huge"](size), "one huge": SAMPLES["one huge"](size), "largest": signs * LARGEST}
        for name, bucket in buckets.items():
            for old in (0.1 * gaussian(size, 7), signs * (LARGEST / 2), bucket / 2):
                for way in (contextlib.nullcontext(), plain_torch()):
                    [replica] = replicas_of(compressor, segments, feedback=True)
                    replica.residual = old.clone()
                    with way:
                        average(compressor, [bucket], [replica], segments)
                    assert replica.residual.isfinite().all(), f"{name} values, {segments}: the residual is not finite"


def _check_spared(compressor: Compressor, bucket: Tensor, old: Tensor, segments: Sequence[int], name: str) -> None:
    bound = compressor.bound_to((), 1)
    [replica] = replicas_of(bound, segments, feedback=True)
    replica.residual = old.clone()
    decoded = average(bound, [bucket], [replica], segments)
    spared = ~(decoded.isfinite() & bucket.isfinite())
    assert_same_bits(replica.residual[spared], old[spared], f"{name}: the residual of unsent values")
    undone = replica.residual + decoded - bucket
    assert_close(undone[~spared], old[~spared], 1e-5, f"{name}: taking the step back")


def the_next_step_is_finite_again(compressor: Compressor) -> None:
    """Check that a bad gradient does not persist in residuals, thresholds or warm starts."""
    segments = (3000,)
    for feedback in {False, may_feed_back(compressor)}:
        replicas = replicas_of(compressor, segments, 2, feedback=feedback)
        good = gaussian(3000)
        average(compressor, [good, good], replicas, segments)
        kept = [Replica(clone(r.residual), clone(r.state)) for r in replicas]
        average(compressor, [SAMPLES["one nan"](3000), good], replicas, segments)
        if compressor.facts.state_from_payload:  # the runtime keeps the old state after a bad step
            for replica, before in zip(replicas, kept, strict=True):
                replica.state = before.state
        mean = average(compressor, [good, good], replicas, segments)
        assert mean.isfinite().all(), "a step after a bad one is not finite"


def bytes_are_all_that_travels(compressor: Compressor) -> None:
    """Check that an unaligned copy of a payload decodes to the same values."""
    segments = (1000, 66_000, 9)
    bound = compressor.bound_to((), 1)
    [replica] = replicas_of(bound, segments, feedback=False)
    bucket = gaussian(sum(segments))
    agreed = agree(bound, [bucket], [replica], segments)
    payload = encode(bound, bucket, replica, segments, agreed)
    offset = 1 if payload.dtype.itemsize == 1 else 0
    sent = bytearray(b"?" * offset + payload.view(torch.uint8).numpy().tobytes())
    received = torch.frombuffer(sent, dtype=torch.uint8)[offset:].view(payload.dtype)
    expected = decode(bound, payload, 1, segments, agreed, replica.state)
    assert_same_bits(decode(bound, received, 1, segments, agreed, replica.state), expected, "by kernel")
    with plain_torch():
        assert_same_bits(decode(bound, received, 1, segments, agreed, replica.state), expected, "in plain torch")
