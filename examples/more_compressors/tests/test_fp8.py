"""fp8 codes are torch's casts, and lose what the docstrings say."""

import pytest
import torch
from fxcomp_more import FP8E4M3, FP8E5M2
from round_trip import decode, encode

from fxcomp.testing.result_checks import relative_error
from fxcomp.testing.samples import gaussian, laplace


@pytest.mark.parametrize(
    ("compressor", "of_gaussian", "of_laplace"), [(FP8E4M3(), 6.6e-4, 6.3e-4), (FP8E5M2(), 2.6e-3, 2.4e-3)], ids=str
)
def test_the_error_is_the_documented_one(compressor: FP8E4M3 | FP8E5M2, of_gaussian: float, of_laplace: float) -> None:
    assert relative_error(compressor, gaussian(131_072, 1)) == pytest.approx(of_gaussian, rel=0.15)
    assert relative_error(compressor, laplace(131_072, 1)) == pytest.approx(of_laplace, rel=0.15)


@pytest.mark.parametrize("compressor", [FP8E4M3(), FP8E5M2()], ids=str)
def test_fp8_codes_are_torchs_casts(compressor: FP8E4M3 | FP8E5M2) -> None:
    most = torch.finfo(compressor.float8).max
    # Halfway between codes, on them and beside them, down to the smallest: with 2^k * most in front the scale is 2^k.
    codes = torch.arange(256, dtype=torch.uint8).view(compressor.float8).float()
    codes = codes[codes.isfinite()].sort().values
    halves = (codes[1:] + codes[:-1]) / 2
    up, down = torch.full_like(halves, torch.inf), torch.full_like(halves, -torch.inf)
    values = torch.cat([codes, halves, halves.nextafter(up), halves.nextafter(down)])
    for exponent in (-100, 0, 90):
        bucket = torch.cat([torch.tensor([most]), values]) * 2.0**exponent
        payload = encode(type(compressor)(65536), bucket)
        sent = payload[4 : 4 + len(bucket)].view(compressor.float8)
        assert torch.equal(sent.view(torch.uint8)[1:], values.to(compressor.float8).view(torch.uint8))
        assert torch.equal(decode(type(compressor)(65536), payload, len(bucket)), sent.float() * 2.0**exponent)
