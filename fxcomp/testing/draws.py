"""Check compressors that draw random numbers: streams advance, and errors average out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxcomp.compressors import Bias, Compressor
from fxcomp.testing.rounds import agree, average, decode, encode, fresh_state, replicas_of
from fxcomp.testing.samples import gaussian, heavy

DRAWS = 200

_LARGEST_T = 5.1
"""Maximum |t|, exceeded by Student's t (199 degrees of freedom) with probability 8e-7, two-sided."""

_LARGEST_EXCESS = 3.0
"""Maximum ratio of the variance to the variance of independent errors. 200 draws estimate the ratio to 10 %."""

_LARGEST_EXCESS_OF_PLACES = 24.0
"""Maximum ratio for compressors that draw positions, because positions may come in runs, e.g. of 16."""


def has_stream(compressor: Compressor) -> bool:
    return compressor.has_state and compressor.facts.state_dtype is torch.int64


def state_starts_as_it_should(compressor: Compressor) -> None:
    """Check that key and rank determine the first state. Random streams must differ between parameters. They must also
    differ between ranks, unless all ranks repeat the draws to decode.
    """
    if not compressor.has_state:
        return
    size = 5000
    fresh = compressor.fresh_state(size, 1, 0)
    assert fresh.shape == (compressor.state_elements(size),), "fresh_state has another size than declared"
    assert fresh.dtype is compressor.facts.state_dtype, "fresh_state has another dtype than declared"
    assert torch.equal(fresh, compressor.fresh_state(size, 1, 0)), "two fresh states differ"
    of_another_rank = compressor.fresh_state(size, 1, 1)
    if compressor.facts.decode_needs_state:
        assert torch.equal(fresh, of_another_rank), "two ranks decode with other draws: each would see another mean"
    if not has_stream(compressor):
        return
    assert not torch.equal(fresh, compressor.fresh_state(size, 2, 0)), "two parameters draw the same numbers"
    if not compressor.facts.decode_needs_state:
        assert not torch.equal(fresh, of_another_rank), "two ranks draw the same numbers: their errors would add up"


def streams_move_on(compressor: Compressor) -> None:
    """Check that each step changes the state, and that payloads vary over steps if they vary with the seed."""
    if not has_stream(compressor):
        return
    segments = (70_000, 513)
    bound = compressor.bound_to((), 1)
    bucket = gaussian(sum(segments))
    [replica] = replicas_of(bound, segments, feedback=False)
    agreed = agree(bound, [bucket], [replica], segments)
    payloads: list[Tensor] = []
    for step in range(4):
        before = _states(bound, replica.state, segments)
        payloads.append(encode(bound, bucket, replica, segments, agreed))
        for segment, (old, new) in enumerate(zip(before, _states(bound, replica.state, segments), strict=True)):
            assert not torch.equal(old, new), f"step {step} leaves the stream of segment {segment} where it was"
    for seed in (1, 2, 3):
        replica.state = fresh_state(bound, segments, seed=seed)
        other = encode(bound, bucket, replica, segments, agreed)
        if not torch.equal(_bytes(other), _bytes(payloads[0])):
            same = all(torch.equal(_bytes(payload), _bytes(payloads[0])) for payload in payloads)
            assert not same, "four steps draw the same"


def mean_is_unbiased(compressor: Compressor) -> None:
    """Check that the mean error of 200 draws is zero along five directions; a correct compressor fails with p < 1e-4.

    In each direction, the mean of the 200 projections divided by its standard error follows Student's t.

    The projections' variance is compared with the variance of independent errors, because errors that share a draw,
    such as one random number for a block, do not average out over values.

    If a compressor scales all values by 1 + b, the test fails above about |b| = 5.1 sqrt(w / (200 n)), where w is the
    relative squared error and n = 70,000. Measured |b|: 0.2 % with int2(stochastic=true), 0.002 % with
    int8(stochastic=true).
    """
    if compressor.bias is not Bias.UNBIASED:
        return
    for name, segments, bucket in (
        ("gaussian", (3000,), gaussian(3000)),
        ("heavy", (3000,), heavy(3000)),
        ("gaussian", (70_000, 3001), gaussian(73_001)),
    ):
        errors = _DrawErrors(segments, bucket)
        [replica] = replicas_of(compressor, segments, feedback=False)
        for _ in range(DRAWS):
            errors.add(average(compressor, [bucket], [replica], segments) - bucket)
        bound = _LARGEST_EXCESS_OF_PLACES if compressor.facts.decode_needs_state else _LARGEST_EXCESS
        for segment, (t, excess) in enumerate(errors.t_and_excess()):
            where = f"{name}, segment {segment} of {segments}"
            assert t.abs().max() < _LARGEST_T, f"{where}: the mean error is {_text(t)} standard errors from 0"
            assert excess.max() < bound, (
                f"{where}: the error's variance is {_text(excess)} times the variance of independent errors"
            )


class _DrawErrors:
    """Errors over draws: sum and sum of squares per value, projections per direction."""

    def __init__(self, segments: Sequence[int], bucket: Tensor) -> None:
        self.segments = list(segments)
        self.values = torch.split(bucket, self.segments)
        self.directions = [_directions(piece) for piece in self.values]
        self.sum = torch.zeros(len(bucket), dtype=torch.float64)
        self.squares = torch.zeros(len(bucket), dtype=torch.float64)
        self.projections: list[list[Tensor]] = [[] for _ in segments]

    def add(self, error: Tensor) -> None:
        exact = error.double()
        self.sum += exact
        self.squares.addcmul_(exact, exact)
        for seen, directions, piece in zip(
            self.projections, self.directions, torch.split(exact, self.segments), strict=True
        ):
            seen.append(directions @ piece)

    def t_and_excess(self) -> list[tuple[Tensor, Tensor]]:
        variances = (self.squares - self.sum.square() / DRAWS).clamp_min(0) / (DRAWS - 1)
        return [
            _t_and_excess(torch.stack(seen), directions, values.double(), variance)
            for seen, directions, values, variance in zip(
                self.projections, self.directions, self.values, torch.split(variances, self.segments), strict=True
            )
        ]


def _directions(values: Tensor) -> Tensor:
    large = values.abs() >= values.abs().quantile(0.99)
    return torch.stack([values, values.sign(), values.abs(), values * large, torch.ones(len(values))]).double()


def _t_and_excess(projections: Tensor, directions: Tensor, values: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and relative variance per direction. Standard deviations are at least fp32's rounding error."""
    least = 1e-7 * (directions.square().sum(dim=1) * values.square().sum()).sqrt()
    spread = projections.std(dim=0)
    t = projections.mean(dim=0) / (spread / DRAWS**0.5).clamp_min(least)
    excess = spread.square() / (directions.square() @ variance).clamp_min(DRAWS * least.square())
    return t, excess


def errors_of_ranks_average_out(compressor: Compressor) -> None:
    """Check with four equal buckets that the squared sum of errors is the sum of squared errors.

    Identical errors would give four times as much.
    """
    if compressor.bias is not Bias.UNBIASED or compressor.facts.decode_needs_state:
        return
    segments, ranks = (70_000, 3001), 4
    bound = compressor.bound_to((), ranks)
    bucket = gaussian(sum(segments))
    share = bucket * (1.0 / ranks) if bound.is_linear else bucket
    replicas = replicas_of(bound, segments, ranks, feedback=False)
    agreed = agree(bound, [share] * ranks, replicas, segments)
    errors = [
        decode(bound, encode(bound, share, replica, segments, agreed), 1, segments, agreed, replica.state) - share
        for replica in replicas
    ]
    exact = torch.stack(errors).double()
    separate, together = exact.square().sum().item(), exact.sum(dim=0).square().sum().item()
    least = 1e-14 * bucket.double().square().sum().item()
    assert together <= 1.5 * max(separate, least), (
        f"the ranks' errors add up: {together / max(separate, least):.2f} times the square of independent errors"
    )


def _states(compressor: Compressor, state: Tensor | None, segments: Sequence[int]) -> tuple[Tensor, ...]:
    assert state is not None, "it declares a state and has none"
    return tuple(part.clone() for part in torch.split(state, [compressor.state_elements(size) for size in segments]))


def _text(numbers: Tensor) -> str:
    return ", ".join(f"{float(number):.3g}" for number in numbers)


def _bytes(payload: Tensor) -> Tensor:
    return payload.view(torch.uint8)
