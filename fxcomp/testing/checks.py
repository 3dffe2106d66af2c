"""Check what must hold for every compressor. Each check raises AssertionError with what it saw.

Nothing here is given time to be slow: the whole suite takes seconds a compressor, most of them in the 5 M values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fxcomp.compressors import CATALOGUE, Bias, Compressor, EncoderInput, Feedback, kernels, parse_compressor, triton
from fxcomp.compressors.base import find_kernel
from fxcomp.errors import BadTensor, FxcompError
from fxcomp.testing.draws import (
    errors_of_ranks_average_out,
    mean_is_unbiased,
    state_starts_as_it_should,
    streams_move_on,
)
from fxcomp.testing.rounds import Replica, agree, average, decode, encode, fresh_state, replicas_of
from fxcomp.testing.samples import IN_RANGE, LARGEST, NOT_FINITE, SAMPLES, gaussian, heavy, laplace

LARGE = 5_000_000

SMALL_SEGMENTS: tuple[tuple[int, ...], ...] = ((0, 1, 512, 0, 65, 3), (1000, 66_000, 9))

ROUND_SEGMENTS = (65_536, 131_072, *range(256, 256 * 33, 256))
"""Whole multiples of 2^8 and 2^16, where an index into a table of so many ends."""

LARGE_SEGMENTS: tuple[tuple[int, ...], ...] = (ROUND_SEGMENTS, (2**20 + 1,), (LARGE - 70_000, 70_000))


def check_compressor(compressor: Compressor) -> None:
    """Run every check. Raises AssertionError that names the check and says what it saw."""
    for name, check in CHECKS.items():
        try:
            check(compressor)
        except (AssertionError, FxcompError) as error:
            raise AssertionError(f"{compressor}: {name.replace('_', ' ')}: {error}") from error


def segments_to_try(compressor: Compressor) -> list[tuple[int, ...]]:
    """Lengths at which layouts break: none, one, odd, around a block, above 2^16; and several at once."""
    block = int(getattr(compressor, "block", 512))
    lengths = sorted({0, 1, 7, block - 1, block, block + 1, 65_537})
    return [(), *((length,) for length in lengths), *SMALL_SEGMENTS]


# What it declares


def declares_itself(compressor: Compressor) -> None:
    facts = compressor.facts
    for text in ("name", "summary", "payload", "use", "avoid", "source"):
        assert getattr(facts, text).strip(), f"facts.{text} is empty"
    known = {field.name for field in fields(compressor)}  # pyright: ignore[reportArgumentType]
    for parameter in facts.parameters:
        assert parameter.name in known, f"facts name the parameter {parameter.name!r}, which it does not have"
        assert parameter.low <= parameter.high, f"{parameter.name} has an empty range"
    assert compressor == compressor.bound_to((), 1).bound_to((), 1) or facts.agreement is not None, (
        "binding changes what needs no binding"
    )
    assert hash(compressor) == hash(type(compressor)(*compressor.parameters)), "equal compressors hash differently"
    if CATALOGUE.get(facts.name) is type(compressor):
        assert parse_compressor(str(compressor)) == compressor, f"{compressor} does not parse back"
    assert compressor.has_state == (sum(map(compressor.state_elements, (7, 1000))) > 0), (
        "has_state and state_elements disagree"
    )


def payload_has_the_declared_size(compressor: Compressor) -> None:
    bound = compressor.bound_to((), 1)
    for segments in [*segments_to_try(compressor), ROUND_SEGMENTS]:
        new = _reference(bound, gaussian(sum(segments)), None, segments)
        size = bound.payload_elements(segments)
        assert new.payload.dtype is bound.payload_dtype, (
            f"payload_dtype is {bound.payload_dtype}, not {new.payload.dtype}"
        )
        assert new.payload.shape == (size,), f"{segments}: {size} elements declared, {tuple(new.payload.shape)} made"
        assert bound.payload_bytes(segments) == new.payload.numel() * new.payload.element_size(), f"{segments}: bytes"
        if bound.payload_dtype is torch.uint8:
            assert size % 4 == 0, f"{segments}: gathered payloads of {size} bytes lose their alignment"
        if sum(segments) == 0:
            assert size == 0, f"{segments}: {size} elements for nothing"


# Kernels and ops


def kernels_give_the_bits_of_the_reference(compressor: Compressor) -> None:
    """Encode, residual, state and decode, on every sample, after one step that moved the state."""
    bound = compressor.bound_to((), 1)
    for segments in segments_to_try(compressor):
        for name, sample in SAMPLES.items():
            _compare(bound, sample(sum(segments)), segments, name)


def kernels_give_the_bits_of_the_reference_on_five_million_values(compressor: Compressor) -> None:
    _compare(compressor.bound_to((), 1), laplace(LARGE), (LARGE - 70_000, 70_000), "laplace")


def kernels_give_the_bits_of_the_reference_at_round_lengths(compressor: Compressor) -> None:
    _compare(compressor.bound_to((), 1), laplace(sum(ROUND_SEGMENTS)), ROUND_SEGMENTS, "laplace")


def threads_change_no_bit(compressor: Compressor) -> None:
    segments = (700_001, 130, 300_000)
    bucket, threads = laplace(sum(segments)), torch.get_num_threads()
    seen: list[list[Tensor]] = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            replicas = replicas_of(compressor, segments, 2, feedback=_may_feed_back(compressor))
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
    for feedback in {False, _may_feed_back(compressor)}:
        [replica] = replicas_of(bound, segments, feedback=feedback)
        strided = torch.stack([gaussian(641), gaussian(641, 1)], dim=1)[:, 0]
        bucket = strided.contiguous()
        agreed = agree(bound, [bucket], [replica], segments)
        kept = Replica(_clone(replica.residual), _clone(replica.state))
        keywords = {"state": replica.state, "agreed": agreed}
        arguments = (bucket, replica.residual, segments, *bound.parameters)
        _opcheck(bound.compress_op, arguments, keywords)
        payload, residual, state = bound.compress_op(*arguments, **keywords)
        from_strided = bound.compress_op(strided, *arguments[1:], **keywords)[0]
        assert_same_bits(from_strided, payload, "from a bucket that is not contiguous")
        assert_same_bits(bucket, strided.contiguous(), "the op changed its bucket")
        for now, before in ((replica.residual, kept.residual), (replica.state, kept.state)):
            if now is not None and before is not None:
                assert_same_bits(now, before, "the op changed an input")
        assert_same_bits(encode(bound, bucket, replica, segments, agreed), payload, "op against encode")
        assert_same_bits(residual, _or_empty(replica.residual, residual), "the op's residual")
        if not bound.facts.state_from_payload:
            assert_same_bits(state, _or_empty(replica.state, state), "the op's state")
        if bound.propose_op is not None:
            _opcheck(bound.propose_op, (bucket, kept.residual, segments, *bound.parameters), {"state": kept.state})
        copies = 1 if bound.is_linear else 2
        payloads = payload.repeat(copies)
        _opcheck(
            bound.decompress_op, (payloads, copies, segments, *bound.parameters), _decode_keywords(bound, agreed, state)
        )
        decoded = bound.decompress_op(
            payloads, copies, segments, *bound.parameters, **_decode_keywords(bound, agreed, state)
        )
        assert_same_bits(decoded, decode(bound, payloads, copies, segments, agreed, state), "op against decode")


# What comes out


def payload_and_residual_add_up(compressor: Compressor) -> None:
    """v = decompress(payload) + new residual, with and without kernels."""
    if not _may_feed_back(compressor):
        return
    for segments in segments_to_try(compressor):
        for name in IN_RANGE:
            _check_sum(compressor, segments, name)


def large_segments_come_out_whole(compressor: Compressor) -> None:
    """Of up to five million values, kernel or not: v = decompress(payload) + new residual, or, without feedback, an
    unbiased mean at either end."""
    for segments in LARGE_SEGMENTS:
        if _may_feed_back(compressor):
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
        _close(one, two, 1e-5 if compressor.facts.needs_whole_parameters else 3e-7, f"{name}, {segments}")


def _check_ends(compressor: Compressor, segments: Sequence[int]) -> None:
    """Measure what is sent of a tenth of the values, over its standard error where values come in runs of 16."""
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
    """The sum of what was sent plus the residual is the sum of the gradients, over 24 steps."""
    if not _may_feed_back(compressor):
        return
    ranks = 1 if compressor.is_linear and compressor.payload_dtype.itemsize == 2 else 2  # the wire's sum rounds, too
    error = telescoping_error(compressor, (70_000, 513, 5), ranks=ranks)
    assert error < 1e-6 * (10 if compressor.facts.needs_whole_parameters else 1), f"relative error {error:.1e}"


def telescoping_error(compressor: Compressor, segments: Sequence[int], steps: int = 24, ranks: int = 2) -> float:
    """Measure how far what was sent plus what is left is from what was put in, relative to the latter's norm."""
    elements = sum(segments)
    replicas = replicas_of(compressor, segments, ranks, feedback=True)
    sent, put_in = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in range(steps):
        gradients = [gaussian(elements, step * ranks + rank) for rank in range(ranks)]
        sent += average(compressor, gradients, replicas, segments)
        put_in += torch.stack(gradients).double().mean(dim=0)
    left = torch.stack([replica.residual for replica in replicas if replica.residual is not None]).double()
    left = left.sum(dim=0) if compressor.is_linear else left.mean(dim=0)  # a linear one's buckets are scaled before
    return ((sent + left - put_in).square().sum() / put_in.square().sum()).sqrt().item()


def feedback_is_stable(compressor: Compressor) -> None:
    """Under feedback a compressor must lose less than it is given, on average: ω <= 1."""
    if not _may_feed_back(compressor):
        return
    for name, values in (("gaussian", gaussian(65_536)), ("laplace", laplace(65_536)), ("heavy", heavy(65_536))):
        omega = relative_error(compressor, values, draws=8)
        assert omega <= 1.0 + 1e-6, f"ω = {omega:.3g} on {name} values: the residual would grow"


def relative_error(compressor: Compressor, values: Tensor, draws: int = 1) -> float:
    """ω = |v - decompress(compress(v))|² / |v|², the mean over first steps with so many streams."""
    segments = (len(values),)
    lost = 0.0
    for seed in range(draws):
        decoded = average(compressor, [values], replicas_of(compressor, segments, feedback=False, seed=seed), segments)
        lost += ((values - decoded).double().square().sum() / values.double().square().sum()).item()
    return lost / draws


def rounding_goes_either_way(compressor: Compressor) -> None:
    """Error feedback hides flooring: values of either sign must not come out smaller or larger on average."""
    if compressor.bias is not Bias.ROUNDING:
        return
    for sign, values in (("positive", gaussian(100_000).abs()), ("negative", -gaussian(100_000).abs())):
        decoded = average(compressor, [values], replicas_of(compressor, (100_000,), feedback=False), (100_000,))
        error = (decoded - values).double()
        bias = (error.mean() / error.square().mean().sqrt()).item()
        assert abs(bias) < 0.1, f"{sign} values: the mean error is {bias:.2f} of the root mean square error"


def segments_do_not_mix(compressor: Compressor) -> None:
    """Check that one parameter's values change nothing in another's part."""
    segments = (700, 66_000, 30)
    quiet = gaussian(sum(segments))
    loud = quiet.clone()
    loud[700:66_700] *= 1000
    means = [
        average(compressor, [v], replicas_of(compressor, segments, feedback=False), segments) for v in (quiet, loud)
    ]
    for part in (slice(0, 700), slice(66_700, None)):
        assert_same_bits(means[0][part], means[1][part], "beside a segment of large values")


def every_rank_decodes_the_mean(compressor: Compressor) -> None:
    """In rank order, summed and then divided: bit for bit where payloads are gathered, to rounding where summed."""
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
        assert_same_bits(mean + 0.0, ((one + two) + three) * (1 / 3) + 0.0, "the mean of three ranks")
    replicas = replicas_of(compressor, segments, ranks, feedback=False)
    mean = average(compressor, [buckets[0]] * ranks, replicas, segments)
    exact, lost = buckets[0].double(), mean.double() - buckets[0].double()
    alone = relative_error(compressor, buckets[0], draws=4)
    assert lost.square().sum() / exact.square().sum() <= 1.2 * max(alone, 1e-9) * (
        1 if not bound.is_linear else ranks**2
    ), "three ranks with the same bucket lose more than one alone"


def what_is_not_finite_is_seen_and_spares_the_residual(compressor: Compressor) -> None:
    """In its own segment and no other; where the own payload decodes to nothing finite, the residual stays."""
    segments, ranks = (1000, 66_000, 40), 2
    for name in NOT_FINITE:
        bad = SAMPLES[name](66_000)
        bucket = torch.cat([gaussian(1000), bad, gaussian(40, 3)])
        feedback = _may_feed_back(compressor)
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
                    assert kept.isfinite().all(), f"{name}: what is kept for the next step is not finite"
        if feedback:
            _check_spared(compressor, bucket, old, segments, name)


def a_sum_that_is_not_finite_is_seen(compressor: Compressor) -> None:
    """NaN in the residual, or a sum above fp32's largest value, must be seen as it is in the bucket."""
    if not _may_feed_back(compressor):
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
    """Up to fp32's largest value, and where adding the residual goes above it."""
    if not _may_feed_back(compressor):
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
    assert_same_bits(replica.residual[spared], old[spared], f"{name}: the residual of what was not sent")
    undone = replica.residual + decoded - bucket
    _close(undone[~spared], old[~spared], 1e-5, f"{name}: taking the step back")


def the_next_step_is_finite_again(compressor: Compressor) -> None:
    """One bad gradient must not stay in residuals, thresholds or warm starts for ever."""
    segments = (3000,)
    for feedback in {False, _may_feed_back(compressor)}:
        replicas = replicas_of(compressor, segments, 2, feedback=feedback)
        good = gaussian(3000)
        average(compressor, [good, good], replicas, segments)
        kept = [Replica(_clone(r.residual), _clone(r.state)) for r in replicas]
        average(compressor, [SAMPLES["one nan"](3000), good], replicas, segments)
        if compressor.facts.state_from_payload:  # the runtime keeps the state of a step that was not finite
            for replica, before in zip(replicas, kept, strict=True):
                replica.state = before.state
        mean = average(compressor, [good, good], replicas, segments)
        assert mean.isfinite().all(), "a step after a bad one is not finite"


def bytes_are_all_that_travels(compressor: Compressor) -> None:
    """A payload copied to memory without alignment decodes to the same."""
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


CHECKS: dict[str, Callable[[Compressor], None]] = {
    check.__name__: check
    for check in (
        declares_itself,
        payload_has_the_declared_size,
        kernels_give_the_bits_of_the_reference,
        kernels_give_the_bits_of_the_reference_on_five_million_values,
        kernels_give_the_bits_of_the_reference_at_round_lengths,
        threads_change_no_bit,
        ops_compute_the_same_and_change_nothing,
        payload_and_residual_add_up,
        large_segments_come_out_whole,
        errors_telescope,
        feedback_is_stable,
        rounding_goes_either_way,
        mean_is_unbiased,
        errors_of_ranks_average_out,
        segments_do_not_mix,
        every_rank_decodes_the_mean,
        what_is_not_finite_is_seen_and_spares_the_residual,
        a_sum_that_is_not_finite_is_seen,
        finite_values_leave_a_finite_residual,
        the_next_step_is_finite_again,
        bytes_are_all_that_travels,
        state_starts_as_it_should,
        streams_move_on,
        wrong_tensors_are_refused,
    )
}
"""Every check by its name; a test suite may run them one by one."""


# Helpers


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


def _compare(bound: Compressor, bucket: Tensor, segments: Sequence[int], where: str) -> None:
    """One step by kernel against the same in plain torch, with and without a residual, from a state that has moved."""
    if not _has_kernel(bound):
        return
    for feedback in {False, _may_feed_back(bound)}:
        by_kernel = second_step(bound, bucket, segments, feedback=feedback)
        with plain_torch():
            by_torch = second_step(bound, bucket, segments, feedback=feedback)
        for one, two in zip(by_kernel, by_torch, strict=True):
            assert_same_bits(one, two, f"{where}, {tuple(segments)}, feedback {feedback}")


def second_step(bound: Compressor, bucket: Tensor, segments: Sequence[int], *, feedback: bool) -> list[Tensor]:
    """All that comes of compressing `bucket`, after one step that moved the state: payload, mean, and what is kept."""
    [replica] = replicas_of(bound, segments, feedback=feedback)
    average(bound, [gaussian(sum(segments), 5)], [replica], segments)
    if replica.residual is not None:
        replica.residual = 0.1 * gaussian(sum(segments), 7)
    agreed = agree(bound, [bucket], [replica], segments)
    payload = encode(bound, bucket, replica, segments, agreed)
    copies = 1 if bound.is_linear else 2
    decoded = decode(bound, payload.repeat(copies), copies, segments, agreed, replica.state)
    return [payload, decoded, *(t for t in (agreed, replica.residual, replica.state) if t is not None)]


def _has_kernel(compressor: Compressor) -> bool:
    kind, own = type(compressor), ("encode_on_cpu", "decode_on_cpu", "propose_on_cpu")
    return find_kernel(kind, "encode") is not None or any(getattr(kind, n) is not getattr(Compressor, n) for n in own)


def _reference(bound: Compressor, bucket: Tensor, residual: Tensor | None, segments: Sequence[int]) -> Any:
    [replica] = replicas_of(bound, segments, feedback=False)
    agreed = agree(bound, [bucket], [replica], segments)
    return bound.compress_reference(EncoderInput(bucket, residual, tuple(segments), replica.state, agreed))


def _may_feed_back(compressor: Compressor) -> bool:
    return compressor.feedback is not Feedback.FORBIDDEN


def _decode_keywords(compressor: Compressor, agreed: Tensor | None, state: Tensor | None) -> dict[str, Tensor | None]:
    return {"agreed": agreed, "state": state if compressor.facts.decode_needs_state else None}


def _opcheck(op: Any, arguments: tuple[Any, ...], keywords: dict[str, Tensor | None]) -> None:
    opcheck: Any = torch.library.opcheck  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    opcheck(op, arguments, keywords)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _close(actual: Tensor, expected: Tensor, relative: float, where: str) -> None:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= relative * largest, f"{where}: off by {error:.3g} where the largest value is {largest:.3g}"
