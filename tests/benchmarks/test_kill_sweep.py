"""One point of the kill sweep, and the draw of all; `benchmarks/kill_sweep.py` runs hundreds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from kill_sweep import SEED, prepare
from killing import judge, tables
from killing.judge import Setting
from killing.points import FAULTS, KILL, KINDS, PHASES, drawn


def test_every_kind_phase_and_fault_is_hit_often():
    points = drawn(SEED, 208)
    for what, values in (("kind", KINDS), ("phase", PHASES), ("fault", FAULTS)):
        counts = Counter(getattr(point, what) for point in points)
        assert min(counts[value] for value in values) >= 8, counts
    assert points[:20] == drawn(SEED, 20)


def test_equal_messages_are_counted_together():
    said = {f"rank {k} has gone before step {3 * k}: [/x/gloo/pair.cc:{k}] closed by [127.0.0.1]:{k}" for k in (2, 13)}
    assert len({tables.general(line) for line in said}) == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    prepare(tmp_path)
    (point, *_) = (point for point in drawn(SEED, 208) if point.kind == "int8" and point.phase == "stepping")
    record = judge.run(replace(point, fault=KILL, next_world=point.world, restart_by="fork"), Setting(tmp_path))
    assert record["hit"]
    assert [end["how"] for end in record["ends"]].count("error") == point.world - 1
    assert record["anomalies"] == []
    assert record["wrong"] == []
    assert record["same_bits"]
