"""Measured errors are those of the codecs on the same values, for all families and kinds of gradients."""

import math
from typing import Any

import pytest
import torch
from helpers.measured import lost, measured_together
from torch import Tensor

from fxcomp.compressors import PowerSGD, TopK, parse_compressor
from fxcomp.error_tables import Columns, ErrorSource, ErrorTable, measure
from fxcomp.errors import BadOption
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
    return measure(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.03, 0.25])
def test_the_largest_values_are_found_exactly(table: ErrorTable, kind: str, ratio: float):
    expected = lost(TopK(ratio), KINDS[kind].flatten(), KINDS[kind].shape)
    found = table.error_of(kind, TopK(ratio))
    assert found.source is ErrorSource.MEASURED
    assert found.value == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [2e-5, 0.0005, 0.02, 0.07, 0.15, 0.6])
def test_between_two_densities_no_error_is_understated(table: ErrorTable, kind: str, ratio: float):
    expected = lost(TopK(ratio), KINDS[kind].flatten(), KINDS[kind].shape)
    assert table.error_of(kind, TopK(ratio)).value >= expected * (1 - 1e-6) - 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_codecs_lose_what_they_lose_of_all_values(table: ErrorTable, kind: str, text: str):
    codec, gradient = parse_compressor(text), KINDS[kind]
    expected = lost(codec, gradient.flatten(), gradient.shape)
    exactly = gradient.numel() <= 2**15
    assert table.error_of(kind, codec).value == pytest.approx(expected, rel=1e-5 if exactly else 0.12)


def test_a_gradient_of_few_rows_loses_what_these_rows_lose(table: ErrorTable):
    """A sample taken evenly would hold 3 % of values that are not zero."""
    int4 = parse_compressor("int4")
    rows = KINDS["few rows"][KINDS["few rows"].abs().amax(dim=1) > 0]
    assert table.error_of("few rows", int4).value == pytest.approx(lost(int4, rows.flatten(), rows.shape), rel=0.03)


@pytest.mark.parametrize("kind", ["low rank", "few rows", "a convolution"])
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16])
def test_low_rank_loses_what_the_best_matrix_does(table: ErrorTable, kind: str, rank: int):
    gradient = KINDS[kind]
    squares: Tensor = linalg.svdvals(gradient.flatten(1).double()).square()
    best = (squares[rank:].sum() / squares.sum()).item()
    if gradient.numel() <= 2 * rank * (gradient.shape[0] + gradient[0].numel()):
        best = 0.0  # it travels as it is
    found = table.error_of(kind, PowerSGD(rank)).value
    assert best - 1e-6 <= found <= best * 1.05 + 1e-6


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_of_white_noise_the_sketch_finds_most_and_never_too_much(table: ErrorTable, rank: int):
    squares: Tensor = linalg.svdvals(KINDS["gaussian"].double()).square()
    kept = (squares[:rank].sum() / squares.sum()).item()
    assert 0.75 * kept <= 1 - table.error_of("gaussian", PowerSGD(rank)).value <= kept + 1e-6


@pytest.mark.parametrize("kind", ["low rank", "heavy tails", "gaussian"])
@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_loses_that_much_once_its_factors_have_turned(table: ErrorTable, kind: str, rank: int):
    settled = lost(PowerSGD(rank), KINDS[kind].flatten(), SHAPE, rounds=12)
    assert table.error_of(kind, PowerSGD(rank)).value == pytest.approx(settled, rel=0.02)


@pytest.mark.parametrize("text", ["sidco(0.01)", "sidco(0.01, fit=gamma)"])
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails"])
def test_fitted_thresholds_lose_about_what_top_k_does(table: ErrorTable, text: str, kind: str):
    expected = lost(parse_compressor(text), KINDS[kind].flatten(), SHAPE)
    assert table.error_of(kind, parse_compressor(text)).value == pytest.approx(expected, rel=0.25)


def test_codecs_may_be_chosen():
    texts = ("int4(block=96)", "int4(stochastic=true)", "sign(block=64)", "int8(block=4096)")
    columns = Columns((0.01,), (2,), tuple(map(parse_compressor, texts)))
    table = measure({"g": KINDS["heavy tails"]}, columns=columns)
    for text in texts:
        expected = lost(parse_compressor(text), KINDS["heavy tails"].flatten(), SHAPE)
        assert table.error_of("g", parse_compressor(text)).value == pytest.approx(expected, rel=0.15)
    assert table.error_of("g", parse_compressor("int4")).source is ErrorSource.ASSUMED


def test_what_was_left_out_before_belongs_to_what_is_compressed():
    gradient, residual = drawn(0), 30 * drawn(1) * (drawn(2) > 2)
    table = measure({"g": gradient}, {"g": residual.flatten()})
    whole = (gradient + residual).flatten()
    assert table.error_of("g", TopK(0.01)).value == pytest.approx(lost(TopK(0.01), whole, SHAPE), rel=1e-5)
    assert table.rows["g"].squares == pytest.approx(gradient.square().sum().item(), rel=1e-5)


def test_ranks_add_up_what_they_lose():
    parts = [drawn(0), 10 * KINDS["few rows"]]
    table, other = measured_together([{"g": part} for part in parts])
    assert table == other
    both = torch.cat([part.flatten() for part in parts])
    left = sum(lost(TopK(0.01), part.flatten(), SHAPE) * part.square().sum().item() for part in parts)
    assert table.error_of("g", TopK(0.01)).value == pytest.approx(left / both.square().sum().item(), rel=1e-5)
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
        assert tables[0].error_of(name, PowerSGD(rank)).value == pytest.approx(best, rel=0.03)
        assert tables[0].error_of(name, PowerSGD(rank)).value == pytest.approx(applied, rel=0.05)
    assert measure({"g": parts[0]}).error_of("g", PowerSGD(4)).value < 1e-6


def test_a_rank_whose_gradient_is_not_finite_brings_nothing():
    broken = drawn(1)
    broken[0, 0] = math.nan
    table, other = measured_together([{"g": drawn(0)}, {"g": broken}])
    assert table == other
    alone = measure({"g": drawn(0)})
    assert table.rows["g"].squares == alone.rows["g"].squares
    assert table.error_of("g", TopK(0.01)) == alone.error_of("g", TopK(0.01))
    assert table.error_of("g", PowerSGD(4)).value == pytest.approx(alone.error_of("g", PowerSGD(4)).value, rel=0.1)


def test_each_look_draws_other_runs_and_the_same_look_the_same():
    gradient = {"g": drawn(0)}
    first, again, other = (measure(gradient, look=look) for look in (0, 0, 1))
    assert first == again
    assert first.rows["g"].errors != other.rows["g"].errors


def test_the_global_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    measure({"g": drawn(0)})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [1e-28, 1e-22, 1e22, 1e30])
def test_sizes_near_the_ends_of_fp32_change_no_error_of_what_scales(size: float):
    plain, scaled = measure({"g": KINDS["low rank"]}), measure({"g": KINDS["low rank"] * size})
    for text in ("topk(0.01)", "powersgd(4)", "int8", "int4", "sign", "bf16"):
        expected = plain.error_of("g", parse_compressor(text)).value
        assert scaled.error_of("g", parse_compressor(text)).value == pytest.approx(expected, rel=0.03), text
    assert scaled.rows["g"].squares == pytest.approx(plain.rows["g"].squares * size**2, rel=1e-4)


def test_values_that_overflow_in_fp16_are_no_cheap_loss():
    """Values that round to infinity are in no residual, which would look like no loss."""
    table = measure({"g": 1e6 * drawn(0)})
    assert table.error_of("g", parse_compressor("fp16")).value >= 1
    assert table.error_of("g", parse_compressor("bf16")).value < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_assumed_and_noted(bad: float):
    broken = drawn(0)
    broken[3, 4] = bad
    table = measure({"broken": broken, "fine": drawn(1)})
    assert table.error_of("broken", TopK(0.01)).source is ErrorSource.ASSUMED
    assert table.error_of("fine", TopK(0.01)).source is ErrorSource.MEASURED
    assert table.rows["broken"].squares == pytest.approx(table.rows["fine"].squares)
    assert any("broken" in note and "finite" in note for note in table.notes)


def test_zeros_weigh_nothing_and_empty_gradients_are_legal():
    table = measure({"zero": torch.zeros(SHAPE), "none": torch.zeros(0, 4), "fine": drawn(1)})
    assert table.rows["zero"].squares == table.rows["none"].squares == 0
    assert table.error_of("zero", TopK(0.01)).source is ErrorSource.ASSUMED
    assert table.error_of("none", parse_compressor("topk(0.1)")).source is ErrorSource.ASSUMED
    assert any("zero" in note for note in table.notes)


def test_a_gradient_that_residuals_cancel_weighs_as_much_as_before():
    table = measure({"g": drawn(0)}, {"g": -drawn(0)})
    assert table.rows["g"].squares == pytest.approx(drawn(0).square().sum().item(), rel=1e-5)
    assert table.error_of("g", TopK(0.01)).source is ErrorSource.ASSUMED


def test_values_whose_products_overflow_are_assumed_and_noted():
    table = measure({"huge": 3e37 * drawn(0), "fine": drawn(1)})
    assert table.error_of("huge", PowerSGD(4)).source is ErrorSource.ASSUMED
    assert table.error_of("fine", PowerSGD(4)).source is ErrorSource.MEASURED
    assert any("huge: it has errors that are no numbers" in note for note in table.notes)


def test_nothing_at_all_is_a_table():
    assert not measure({}).is_measured


@pytest.mark.parametrize(
    ("residuals", "text"), [({"h": torch.zeros(4)}, "no gradient of that name"), ({"g": torch.zeros(3)}, "3 elements")]
)
def test_a_residual_of_something_else_is_refused(residuals: dict[str, Tensor], text: str):
    with pytest.raises(BadOption, match=text):
        measure({"g": torch.ones(4)}, residuals)
