"""Ranks that agree on a subspace, simulated in one process: what low rank gives, and that nobody drifts apart."""

from itertools import pairwise

import pytest
import torch
from helpers.compressor_cases import WITH_KERNELS
from torch import Tensor

from fxcomp.compressors import PowerSGD, compressor_of, kernels, parse_compressor
from fxcomp.errors import BadOption
from fxcomp.testing.kernel_checks import assert_same_bits, plain_torch
from fxcomp.testing.rounds import Replica, average
from fxcomp.testing.samples import gaussian

SHAPES = ((60, 50), (60,), (3, 4), (), (40, 6, 5, 3))
SEGMENTS = (3000, 60, 12, 1, 3600)
"""A matrix, three that go dense, a kernel of a convolution as 40 * 90."""


def _ranks(compressor: PowerSGD, count: int) -> list[Replica]:
    bound = compressor.bound_to(SHAPES, count)
    state = torch.cat([bound.of_segment(i).fresh_state(size, i, 0) for i, size in enumerate(SEGMENTS)])
    return [Replica(torch.zeros(sum(SEGMENTS)), state.clone()) for _ in range(count)]


def _low_rank(rank: int, seed: int = 0) -> Tensor:
    """A bucket whose matrices have this rank."""
    parts = []
    for (shape, size), place in zip(zip(SHAPES, SEGMENTS, strict=True), range(9), strict=False):
        if len(shape) < 2:
            parts.append(gaussian(size, seed + place))
        else:
            left = gaussian(shape[0] * rank, seed + place).view(-1, rank)
            parts.append((left @ gaussian(size // shape[0] * rank, seed + 50 + place).view(rank, -1)).flatten())
    return torch.cat(parts)


def test_a_bucket_is_sent_as_factors_and_what_is_too_small_for_it_as_it_is() -> None:
    compressor = PowerSGD(2).bound_to(SHAPES, 4)
    assert compressor.columns == (50, 0, 0, 0, 90)
    assert compressor.payload_elements(SEGMENTS) == 2 * 50 + 60 + 12 + 1 + 2 * 90
    assert compressor.proposal_elements(SEGMENTS) == 2 * 60 + 2 * 40
    assert compressor.all_state_elements(SEGMENTS) == compressor.payload_elements(SEGMENTS)
    assert compressor.state_bytes(SEGMENTS) == compressor.payload_bytes(SEGMENTS)
    bucket = gaussian(sum(SEGMENTS))
    mean = average(PowerSGD(2), [bucket], _ranks(PowerSGD(2), 1), SEGMENTS, SHAPES)
    assert_same_bits(mean[3000:3073], bucket[3000:3073])
    assert torch.linalg.matrix_rank(mean[:3000].view(60, 50)) == 2
    assert torch.linalg.matrix_rank(mean[3073:].view(40, 90)) == 2


def test_where_low_rank_saves_nothing_a_matrix_goes_dense() -> None:
    assert PowerSGD(4).bound_to([(16, 16), (17, 16), (1000, 8), (1000, 9)], 2).columns == (0, 16, 0, 9)


def test_without_shapes_a_segment_is_the_matrix_nearest_to_a_square() -> None:
    compressor = PowerSGD(1)
    assert compressor.payload_elements((5_000_000, 65_537, 0, 1)) == 2500 + 65_537 + 1
    assert compressor.proposal_elements((5_000_000, 65_537, 0, 1)) == 2000


@WITH_KERNELS
@pytest.mark.parametrize("rank", [1, 3, 4, 6, 13])
@pytest.mark.parametrize("shape", [(200, 130), (33, 2100), (1500, 65), (64, 64)], ids=str)
def test_the_kernels_give_the_bits_of_the_references(rank: int, shape: tuple[int, int]) -> None:
    """On sides that no tile divides, and with factors warm from a step before."""
    segments = (shape[0] * shape[1],)
    results = []
    for plain in (False, True):
        replicas = [
            Replica(0.1 * gaussian(segments[0], 8), PowerSGD(rank).bound_to([shape], 1).fresh_state(segments[0], 1, 0))
        ]
        replicas.append(Replica(-0.1 * gaussian(segments[0], 9), replicas[0].state))
        means = []
        for step in range(2):
            buckets = [gaussian(segments[0], 2 * step + r) for r in range(2)]
            if plain:
                with plain_torch():
                    means.append(average(PowerSGD(rank), buckets, replicas, segments, [shape]))
            else:
                means.append(average(PowerSGD(rank), buckets, replicas, segments, [shape]))
        results.append([*means, *(t for r in replicas for t in (r.residual, r.state) if t is not None)])
    for by_kernel, by_torch in zip(*results, strict=True):
        assert_same_bits(by_kernel, by_torch)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_matrix_of_this_rank_is_reproduced_once_the_factors_are_warm(rank: int) -> None:
    """The first step finds the columns' span, and what is in it is sent whole: one step is enough."""
    bucket, replicas = _low_rank(rank), _ranks(PowerSGD(rank), 1)
    for _ in range(2):
        mean = average(PowerSGD(rank), [bucket], replicas, SEGMENTS, SHAPES)
        assert (mean - bucket).norm() < 1e-5 * bucket.norm()
        bucket = _low_rank(rank)


def test_a_matrix_of_a_lower_rank_makes_no_nan_and_is_reproduced() -> None:
    bucket, replicas = _low_rank(2), _ranks(PowerSGD(6), 1)
    for _ in range(3):
        mean = average(PowerSGD(6), [bucket], replicas, SEGMENTS, SHAPES)
        assert (mean - bucket).norm() < 1e-5 * bucket.norm()


def test_warm_factors_turn_towards_the_largest_singular_vectors() -> None:
    """Errors of one fixed matrix without feedback: one step from random factors, then ever closer to the best."""
    left, right = (torch.linalg.qr(gaussian(64 * 64, seed).view(64, 64))[0] for seed in (0, 1))
    spectrum = 0.8 ** torch.arange(64)
    bucket = (left * spectrum @ right).flatten()
    best = spectrum[4:].norm() / spectrum.norm()
    replica = Replica(None, PowerSGD(4).bound_to([(64, 64)], 1).fresh_state(4096, 1, 0))
    errors = []
    for _ in range(12):
        mean = average(PowerSGD(4), [bucket], [replica], (4096,), [(64, 64)])
        errors.append(float((mean - bucket).norm() / bucket.norm() / best))
    assert errors[0] > 1.03
    assert all(later <= earlier + 1e-5 for earlier, later in pairwise(errors))
    assert errors[-1] < 1.01


def test_the_error_is_that_of_the_same_method_written_with_qr() -> None:
    """Eight steps under feedback against a direct form in float64, with the same start: the means agree."""
    shape, steps = (80, 70), 8
    [replica] = [Replica(torch.zeros(5600), PowerSGD(3).bound_to([shape], 1).fresh_state(5600, 1, 0))]
    assert replica.state is not None
    right, residual = replica.state.view(3, 70).T.double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(steps):
        gradient = gaussian(5600, step)
        mean = average(PowerSGD(3), [gradient], [replica], (5600,), [shape])
        matrix = gradient.view(shape).double() + residual
        left = torch.linalg.qr(matrix @ torch.linalg.qr(right)[0])[0]
        right = matrix.T @ left
        residual = matrix - left @ right.T
        assert (mean.view(shape) - left @ right.T).norm() < 1e-4 * mean.norm()


@pytest.mark.parametrize("ranks", [1, 3])
def test_sent_and_left_telescope_over_all_ranks(ranks: int) -> None:
    replicas, total = _ranks(PowerSGD(2), ranks), sum(SEGMENTS)
    sent, put_in = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    for step in range(30):
        gradients = [gaussian(total, step * ranks + rank) for rank in range(ranks)]
        sent += average(PowerSGD(2), gradients, replicas, SEGMENTS, SHAPES)
        put_in += torch.stack(gradients).double().mean(dim=0)
    left = torch.stack([replica.residual for replica in replicas if replica.residual is not None]).double().sum(dim=0)
    assert (sent + left - put_in).norm() < 2e-6 * put_in.norm()


def test_the_mean_of_the_ranks_is_the_method_on_their_mean() -> None:
    """Ranks that differ share one subspace; what is decoded is the mean of their parts in it."""
    gradients = [gaussian(3000, seed) for seed in range(4)]
    state = PowerSGD(3).bound_to([(60, 50)], 4).fresh_state(3000, 1, 0)
    several = [Replica(None, state.clone()) for _ in gradients]
    mean = average(PowerSGD(3), gradients, several, (3000,), [(60, 50)])
    together = average(PowerSGD(3), [torch.stack(gradients).mean(dim=0)], [Replica(None, state)], (3000,), [(60, 50)])
    torch.testing.assert_close(mean, together, rtol=0, atol=1e-5)


def test_zeros_stop_nothing() -> None:
    """A gradient of zeros leaves factors of zeros; the step after it is as good as one from random factors."""
    replicas = _ranks(PowerSGD(2), 2)
    zeros = torch.zeros(sum(SEGMENTS))
    for _ in range(2):
        assert not average(PowerSGD(2), [zeros, zeros], replicas, SEGMENTS, SHAPES).any()
    bucket = _low_rank(2)
    mean = average(PowerSGD(2), [bucket, bucket], replicas, SEGMENTS, SHAPES)
    assert (mean - bucket).norm() < 1e-5 * bucket.norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_on_one_rank_is_seen_by_all_and_forgotten(value: float) -> None:
    replicas = _ranks(PowerSGD(2), 2)
    good = [gaussian(sum(SEGMENTS), seed) for seed in range(2)]
    average(PowerSGD(2), good, replicas, SEGMENTS, SHAPES)
    before = [replica.residual.clone() for replica in replicas if replica.residual is not None]
    bad = good[1].clone()
    bad[1234] = value
    mean = average(PowerSGD(2), [good[0], bad], replicas, SEGMENTS, SHAPES)
    assert mean[:3000].isnan().all()
    assert mean[3000:].isfinite().all()
    for replica, old in zip(replicas, before, strict=True):
        assert replica.residual is not None
        assert torch.equal(replica.residual[:3000], old[:3000])
        assert not torch.equal(replica.residual[3073:], old[3073:])
    after = average(PowerSGD(2), good, replicas, SEGMENTS, SHAPES)
    assert after.isfinite().all()
    assert all(replica.state is not None and replica.state.isfinite().all() for replica in replicas)


def test_the_text_has_the_rank_only() -> None:
    bound = PowerSGD(4).bound_to(SHAPES, 2)
    assert str(bound) == "powersgd(4)"
    assert parse_compressor("powersgd(4)") == PowerSGD(4)
    assert compressor_of(bound.compress_op, [4, [50, 0, 0, 0, 90]]) == PowerSGD(4, (50, 0, 0, 0, 90))  # pyright: ignore
    with pytest.raises(BadOption, match=r"it is powersgd\(rank: int\)"):
        parse_compressor("powersgd(4, 5)")
    with pytest.raises(BadOption, match="powersgd needs rank from 1 to 64, not 65"):
        PowerSGD(65)


@WITH_KERNELS
def test_a_kernel_leaves_nothing_unwritten_of_a_segment_that_columns_do_not_divide() -> None:
    """Python refuses such columns; the kernel by itself must not pass on memory that nobody wrote."""
    size, columns, rank = 1000, 64, 2
    rows = size // columns
    payload, agreed, out = gaussian(rank * columns), gaussian(rank * rows, 1), torch.zeros(size)
    kernels.run("fxcomp_powersgd_decode", payload, 1, out, agreed, None, (size,), (columns,), 1, rank)
    assert (out[: rows * columns] != 0).all()
    assert out[rows * columns :].isnan().all()
