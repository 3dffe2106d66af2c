"""The checks that fxcomp makes of every compressor, and those of this one alone."""

import torch
from fxcomp_pool import Pool

from fxcomp.testing import average, check_compressor, replicas_of


def test_it_conforms() -> None:
    for width in (3, 8):
        check_compressor(Pool(width))


def test_runs_of_equal_values_lose_nothing() -> None:
    values = torch.tensor([3.0, 3.0, -1.0, -1.0, 5.0])
    assert average(Pool(2), [values], replicas_of(Pool(2), (5,), feedback=False), (5,)).tolist() == values.tolist()
