"""The benchmark of compressors counts what it should; its times are nobody's business here."""

from dataclasses import replace

import pytest
import torch
from compressors import (
    Bench,
    Record,
    measure,
    measurements,
    powersgd_as_the_hook,
    quantise_as_the_hook,
    read_size,
    report,
    select,
    target_of,
    torch_alternative,
    verdicts,
)

from fxcomp.compressors import BF16, CMax, Compressor, Int8, Sign, TopK
from fxcomp.compressors.examples import examples

RECORD = Record("topk(0.01)", "cpu", 1, 2**24, 8.0, 9.0, 10.0, 0.8, 0.3, torch_ms=400.0, ours_ms=50.0)


@pytest.mark.parametrize("compressor", examples(), ids=str)
def test_every_compressor_can_be_measured(compressor: Compressor) -> None:
    record, _ = measure(compressor, Bench(4096), threads=1)
    assert (record.compressor, record.device, record.threads, record.n) == (str(compressor), "cpu", 1, 4096)
    encoded = (12 if compressor.needs_error_feedback else 4) * 4096 + compressor.bound_to([(64, 64)], 1).payload_bytes(
        (4096,)
    )
    assert record.encode_gbps * record.ours_ms * 1e6 == pytest.approx(encoded)
    assert record.encode_share == pytest.approx(record.encode_gbps / record.copy_gbps)
    assert record.decode_share == pytest.approx(record.decode_gbps / record.copy_gbps)


def test_a_compressor_that_takes_too_long_is_left_out_of_larger_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("compressors.TOO_SLOW_S", 0.0)
    found = list(measurements([BF16()], [1024, 2048], [1]))
    assert [record.n for record in found] == [1024]
    assert "larger sizes are left out" in capsys.readouterr().out
    assert torch.get_num_threads() == threads


def test_what_torch_does_instead_is_the_same_work() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    kept, places = select(values, 10)
    assert torch.equal(values[places], kept)
    assert kept.abs().min() >= values.abs().sort().values[-10]
    step = (values.max() - values.min()) / 255
    codes = quantise_as_the_hook(values).float()
    assert ((codes - codes[0]) * step - (values - values[0])).abs().max() <= 1.01 * step
    matrix = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 6))
    p, q, left = powersgd_as_the_hook(matrix, torch.ones(5, 1))
    torch.testing.assert_close(p @ q.T, matrix)
    assert left.abs().max() < 1e-4


def test_a_compressor_is_compared_with_what_torch_has_for_it() -> None:
    bench = Bench(1024)
    names = {c.name: (torch_alternative(c, bench) or ("none",))[0] for c in (BF16(), Int8(), Sign(), TopK(0.01))}
    assert names == {"bf16": "bf16", "int8": "quantise", "sign": "none", "topk": "topk 0.01"}


def test_targets_follow_from_what_a_compressor_declares() -> None:
    assert [target_of(c) for c in (BF16(), TopK(0.01), Int8(stochastic=True))] == [0.8, 0.35, 0.4]
    assert target_of(CMax()) is None


def test_only_the_judged_size_on_one_thread_gets_a_verdict() -> None:
    assert verdicts([RECORD, replace(RECORD, threads=2), replace(RECORD, n=2**20)]) == [
        "topk(0.01) encodes at 0.80 of a copy: reaches 0.35",
        "topk(0.01) decodes at 0.30 of a copy: **misses** 0.35",
        "topk(0.01) is 8.0 times as fast as torch.topk: reaches 5 times",
    ]


def test_the_report_has_a_table_for_each_number_of_threads() -> None:
    page = report([RECORD, replace(RECORD, n=2**20, encode_share=0.5), replace(RECORD, threads=2, torch_ms=None)])
    assert "| topk(0.01) | 0.50 / 0.30 | 0.80 / 0.30 | 50, 400 |" in page
    assert "## 1 thread\n" in page
    assert "## 2 threads\n" in page
    assert "| topk(0.01) | 0.80 / 0.30 | 50, – |" in page


def test_sizes_are_powers_or_numbers() -> None:
    assert [read_size(text) for text in ("2^24", "1000")] == [2**24, 1000]
