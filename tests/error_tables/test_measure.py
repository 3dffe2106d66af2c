"""Measured errors are those of the codecs on the same values, for all families and kinds of gradients."""

import math
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.measured import lost, measured, measured_together
from torch import Tensor

from fxcomp.compressors import PowerSGD, TopK, parse_compressor
from fxcomp.compressors.gaussian_error import gaussian_error
from fxcomp.error_tables import ErrorTable
from fxcomp.testing.rounds import average, replicas_of

linalg: Any = torch.linalg

SHAPE = (160, 512)


def drawn(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def falling() -> Tensor:
    """A matrix with singular values 1 / k."""
    left: Tensor = linalg.qr(drawn(1, (160, 160))).Q
    right: Tensor = linalg.qr(drawn(2, (512, 160))).Q
    return (left / torch.arange(1, 161)) @ right.T


KINDS = {
    "gaussian": drawn(0),
    "heavy tails": drawn(3) * (1.5 * drawn(4)).exp(),
    "few rows": drawn(5) * (drawn(6, (160, 1)) > 1.8),
    "low rank": falling(),
    "a convolution": 1e-3 * drawn(7, (32, 16, 3, 3)),
    "a vector": 100 * drawn(8, (5000,)),
    "a few values": drawn(9, (7, 3)),
}
TEXTS = ("bf16", "fp16", "int8", "int4", "int2", "sign")


@pytest.fixture(scope="module")
def table() -> ErrorTable:
    return measured(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.03, 0.25])
def test_the_largest_values_are_found_exactly(table: ErrorTable, kind: str, ratio: float):
    expected = lost(TopK(ratio), KINDS[kind].flatten(), KINDS[kind].shape)
    found = table.error_of(kind, TopK(ratio))
    assert table.rows[kind].samples
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [2e-5, 0.0005, 0.02, 0.07, 0.15, 0.6])
def test_between_two_densities_no_error_is_understated(table: ErrorTable, kind: str, ratio: float):
    expected = lost(TopK(ratio), KINDS[kind].flatten(), KINDS[kind].shape)
    assert table.error_of(kind, TopK(ratio)) >= expected * (1 - 1e-6) - 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_codecs_lose_what_they_lose_of_all_values(table: ErrorTable, kind: str, text: str):
    codec, gradient = parse_compressor(text), KINDS[kind]
    expected = lost(codec, gradient.flatten(), gradient.shape)
    exactly = gradient.numel() <= 2**15
    assert table.error_of(kind, codec) == pytest.approx(expected, rel=1e-5 if exactly else 0.12)


def test_a_gradient_of_few_rows_loses_what_these_rows_lose(table: ErrorTable):
    """A sample taken evenly would hold 3 % of values that are not zero."""
    int4 = parse_compressor("int4")
    rows = KINDS["few rows"][KINDS["few rows"].abs().amax(dim=1) > 0]
    assert table.error_of("few rows", int4) == pytest.approx(lost(int4, rows.flatten(), rows.shape), rel=0.03)


@cache
def looked_at(kind: str) -> list[ErrorTable]:
    return [measured({"g": KINDS[kind]}, look=look) for look in range(16)]


@pytest.mark.parametrize("kind", ["low rank", "few rows", "a convolution"])
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16])
def test_low_rank_loses_what_the_best_matrix_does(kind: str, rank: int):
    """In the mean of looks: each estimates what its sketch misses."""
    gradient = KINDS[kind]
    squares: Tensor = linalg.svdvals(gradient.flatten(1).double()).square()
    best = (squares[rank:].sum() / squares.sum()).item()
    if gradient.numel() <= 2 * rank * (gradient.shape[0] + gradient[0].numel()):
        best = 0.0  # it travels as it is
    found = fmean(look.error_of("g", PowerSGD(rank)) for look in looked_at(kind))
    assert best * 0.99 - 1e-6 <= found <= best * 1.05 + 1e-6


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_of_white_noise_the_sketch_finds_most_and_never_too_much(table: ErrorTable, rank: int):
    squares: Tensor = linalg.svdvals(KINDS["gaussian"].double()).square()
    kept = (squares[:rank].sum() / squares.sum()).item()
    assert 0.75 * kept <= 1 - table.error_of("gaussian", PowerSGD(rank)) <= kept + 1e-6


@pytest.mark.parametrize("kind", ["low rank", "heavy tails", "gaussian"])
@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_loses_that_much_once_its_factors_have_turned(table: ErrorTable, kind: str, rank: int):
    settled = lost(PowerSGD(rank), KINDS[kind].flatten(), SHAPE, rounds=12)
    assert table.error_of(kind, PowerSGD(rank)) == pytest.approx(settled, rel=0.02)


@pytest.mark.parametrize("text", ["sidco(0.01)", "sidco(0.01, fit=gamma)"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails"])
def test_fitted_thresholds_lose_about_what_top_k_does(table: ErrorTable, text: str, kind: str):
    expected = lost(parse_compressor(text), KINDS[kind].flatten(), SHAPE)
    assert table.error_of(kind, parse_compressor(text)) == pytest.approx(expected, rel=0.25)


def test_what_was_left_out_before_belongs_to_what_is_compressed():
    gradient, residual = drawn(0), 30 * drawn(1) * (drawn(2) > 2)
    table = measured({"g": gradient}, {"g": residual.flatten()})
    whole = (gradient + residual).flatten()
    assert table.error_of("g", TopK(0.01)) == pytest.approx(lost(TopK(0.01), whole, SHAPE), rel=1e-5)
    assert table.rows["g"].squares == pytest.approx(gradient.square().sum().item(), rel=1e-5)


def test_ranks_add_up_what_they_lose():
    parts = [drawn(0), 10 * KINDS["few rows"]]
    table, other = measured_together([{"g": part} for part in parts])
    assert table == other
    both = torch.cat([part.flatten() for part in parts])
    left = sum(lost(TopK(0.01), part.flatten(), SHAPE) * part.square().sum().item() for part in parts)
    assert table.error_of("g", TopK(0.01)) == pytest.approx(left / both.square().sum().item(), rel=1e-5)
    assert table.rows["g"].squares == pytest.approx(both.square().sum().item() / 2, rel=1e-5)


@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_is_that_of_the_mean_and_not_of_each_ranks_gradient(rank: int):
    """Each rank's gradient has rank 4, and their mean rank 32: as of batches of a few samples."""
    parts = [drawn(seed, (160, 4)) @ drawn(100 + seed, (4, 512)) for seed in range(8)]
    tables = measured_together([{"g": part, "h": part.T.contiguous()} for part in parts])
    assert all(table == tables[0] for table in tables)
    squares: Tensor = linalg.svdvals(torch.stack(parts).mean(dim=0).double()).square()
    best = (squares[rank:].sum() / squares.sum()).item()
    replicas = replicas_of(PowerSGD(rank).bound_to([SHAPE], 8), (parts[0].numel(),), 8, feedback=False)
    flat = [part.flatten() for part in parts]
    decoded = [average(PowerSGD(rank), flat, replicas, (flat[0].numel(),), [SHAPE]) for _ in range(20)][-1]
    mean = torch.stack(flat).mean(dim=0)
    applied = ((mean - decoded).square().sum() / mean.square().sum()).item()
    for name in ("g", "h"):
        assert tables[0].error_of(name, PowerSGD(rank)) == pytest.approx(best, rel=0.03)
        assert tables[0].error_of(name, PowerSGD(rank)) == pytest.approx(applied, rel=0.05)
    assert measured({"g": parts[0]}).error_of("g", PowerSGD(4)) < 1e-6


def test_a_rank_whose_gradient_is_not_finite_brings_nothing():
    broken = drawn(1)
    broken[0, 0] = math.nan
    table, other = measured_together([{"g": drawn(0)}, {"g": broken}])
    assert table == other
    alone = measured({"g": drawn(0)})
    assert table.rows["g"].squares == alone.rows["g"].squares
    assert table.error_of("g", TopK(0.01)) == alone.error_of("g", TopK(0.01))
    assert table.error_of("g", PowerSGD(4)) == pytest.approx(alone.error_of("g", PowerSGD(4)), rel=0.1)


def test_each_look_draws_other_runs_and_the_same_look_the_same():
    gradient = {"g": drawn(0)}
    first, again, other = (measured(gradient, look=look) for look in (0, 0, 1))
    assert first == again
    assert first.rows["g"].errors != other.rows["g"].errors


def test_the_global_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    measured({"g": drawn(0)})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [1e-28, 1e-22, 1e22, 1e30])
def test_sizes_near_the_ends_of_fp32_change_no_error_of_what_scales(size: float):
    plain, scaled = measured({"g": KINDS["low rank"]}), measured({"g": KINDS["low rank"] * size})
    for text in ("topk(0.01)", "powersgd(4)", "int8", "int4", "sign", "bf16"):
        expected = plain.error_of("g", parse_compressor(text))
        assert scaled.error_of("g", parse_compressor(text)) == pytest.approx(expected, rel=0.03), text
    assert scaled.rows["g"].squares == pytest.approx(plain.rows["g"].squares * size**2, rel=1e-4)


def test_values_that_overflow_in_fp16_are_no_cheap_loss():
    """Values that round to infinity are in no residual, which would look like no loss."""
    table = measured({"g": 1e6 * drawn(0)})
    assert table.error_of("g", parse_compressor("fp16")) >= 1
    assert table.error_of("g", parse_compressor("bf16")) < 1e-5


def with_value(bad: float) -> Tensor:
    made = drawn(0)
    made[3, 4] = bad
    return made


def squares(value: Tensor) -> float:
    return value.double().square().sum().item()


@pytest.mark.parametrize(
    ("bad", "residual", "weight"),
    [
        pytest.param(with_value(math.nan), None, None, id="not a number"),
        pytest.param(with_value(math.inf), None, None, id="infinite"),
        pytest.param(torch.zeros(SHAPE), None, 0.0, id="zero"),
        pytest.param(torch.zeros(0, 4), None, 0.0, id="empty"),
        pytest.param(drawn(0), -drawn(0), squares(drawn(0)), id="cancelled by its residual"),
        pytest.param(3e37 * drawn(0), None, squares(3e37 * drawn(0)), id="with products that overflow"),
    ],
)
def test_what_cannot_be_measured_is_assumed_and_weighs_what_its_gradient_does(
    bad: Tensor, residual: Tensor | None, weight: float | None
):
    table = measured({"bad": bad, "fine": drawn(1)}, {} if residual is None else {"bad": residual})
    for compressor in (TopK(0.01), PowerSGD(4)):
        assert table.error_of("bad", compressor) == gaussian_error(compressor)
        assert table.error_of("fine", compressor) != gaussian_error(compressor)
    if weight is None:
        assert table.squares_of("bad", bad.numel()) == pytest.approx(table.rows["fine"].squares)
    else:
        assert table.squares_of("bad", bad.numel()) == pytest.approx(weight, rel=1e-5)


def test_nothing_at_all_is_a_table():
    assert not measured({}).is_measured
