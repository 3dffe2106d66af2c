"""Presets: what a roofline makes of a data sheet, for operators and for every compressor."""

import pytest

from fxcomp.compressors import parse_compressor
from fxcomp.compressors.examples import examples
from fxcomp.cost.devices import MEMORY_SHARE, PRESETS, PRODUCT_SHARE, preset_named
from fxcomp.cost.roofline import Roofline
from fxcomp.cost.table import CostTable
from fxcomp.errors import BadOption

COMPRESSORS = tuple(examples())


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_prices_every_compressor_and_says_that_it_is_an_estimate(name: str):
    preset = preset_named(name.upper())
    costs = preset.costs(COMPRESSORS)
    assert costs.estimate == preset.description
    assert preset.source in costs.estimate
    assert costs.compute_error > 0
    assert CostTable.from_json(costs.to_json()) == costs
    for compressor in COMPRESSORS:
        assert costs.compressor_source(compressor).startswith("estimated: ")
        times = [costs.encode_us(compressor, n) for n in (1, 1 << 10, 1 << 20, 1 << 24, 1 << 28)]
        assert times == sorted(times)
        assert times[0] > 0
        assert costs.decode_us(compressor, 1 << 20, 4) >= costs.decode_us(compressor, 1 << 20, 2)


def test_a_product_is_priced_in_its_own_numbers_and_a_stream_by_bandwidth():
    preset = preset_named("a100")
    roofline = preset.roofline
    assert roofline.us(1e12, 0, "bf16") == pytest.approx(1e6 / (312.0 * PRODUCT_SHARE))
    assert roofline.us(1e12, 0, "f32") == pytest.approx(1e6 / (19.5 * PRODUCT_SHARE))
    assert roofline.us(1e12, 0, "u8") == roofline.us(1e12, 0)
    assert roofline.us(0, 1e9) == pytest.approx(1e6 / (2039.0 * MEMORY_SHARE))
    assert roofline.us(1, 1) == roofline.launch_us
    assert str(Roofline(50.0, 10.0)) == "50 GFLOP/s and 10 GB/s"


def test_a_compressor_that_reads_more_often_costs_more():
    costs = preset_named("h100").costs(COMPRESSORS)
    once, often = parse_compressor("sign"), max(COMPRESSORS, key=lambda c: c.facts.passes)
    assert often.facts.passes > once.facts.passes
    assert costs.encode_us(often, 1 << 26) > costs.encode_us(once, 1 << 26)


def test_newer_devices_are_faster():
    work = [preset_named(name).roofline.us(1e13, 1e10, "bf16") for name in ("l4", "a100", "h100", "h200")]
    assert work == sorted(work, reverse=True)


def test_the_error_of_an_estimate_counts_for_computes_part_of_the_step():
    costs = preset_named("a100").costs(())
    assert costs.error_of(50.0, 100.0) == pytest.approx(costs.error + costs.compute_error / 2)
    assert costs.error_of(100.0, 100.0) == costs.error_of(1.0, 0.0) == costs.error + costs.compute_error
    assert CostTable().error_of(50.0, 100.0) == CostTable().error


def test_a_device_that_is_not_known_is_answered_with_those_that_are():
    with pytest.raises(BadOption, match=r"no device .h10.; did you mean .h100.\? The devices are a100, "):
        preset_named("h10")
