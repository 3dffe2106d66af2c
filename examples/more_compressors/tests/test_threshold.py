"""The hard threshold."""

import pytest
import torch
from fxcomp_more import Threshold
from round_trip import encode

from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadOption


def test_a_hard_threshold_bounds_what_is_left_out_while_there_are_slots() -> None:
    compressor = Threshold(2.5, 0.3)
    residual = torch.zeros(10_000)
    for seed in range(5):
        gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
        encode(compressor, gradient, residual)
    assert residual.abs().max() < 2.5


def test_there_is_no_bound_where_more_reaches_the_threshold_than_fits() -> None:
    compressor = Threshold(0.5, 0.01)
    residual = torch.zeros(10_000)
    for seed in range(50):
        gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
        encode(compressor, gradient, residual)
    assert residual.abs().max() > 2.5
    assert (residual.abs() >= 0.5).float().mean() > 0.5


def test_the_text_form_has_both_parameters() -> None:
    assert str(parse_compressor("threshold(0.5, 0.01)")) == "threshold(0.5, 0.01)"
    with pytest.raises(BadOption, match="threshold needs value from 1e-30 to 1e\\+30, not 0"):
        parse_compressor("threshold(0, 0.01)")
