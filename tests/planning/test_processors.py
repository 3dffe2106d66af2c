"""A process may count on the processors of its affinity and of its control groups' quotas."""

import os
from pathlib import Path

import pytest

from fxcomp.compat import processors

V2, V1 = "0::/docker/a\n", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n"


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        (V2, {}, 8),
        (V2, {"docker/a/cpu.max": "max 100000\n"}, 8),
        (V2, {"docker/a/cpu.max": "100000 100000\n"}, 1),
        (V2, {"docker/a/cpu.max": "250000 100000\n"}, 2),
        (V2, {"docker/a/cpu.max": "50000 100000\n"}, 1),
        (V2, {"docker/a/cpu.max": "6400000 100000\n"}, 8),
        (V2, {"docker/a/cpu.max": "max 100000\n", "docker/cpu.max": "300000 100000\n"}, 3),
        (V2, {"docker/a/cpu.max": "400000 100000\n", "docker/cpu.max": "300000 100000\n"}, 3),
        (V2, {"cpu.max": "200000 100000\n"}, 2),  # a container that sees its own group as the top
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        (V2, {"docker/a/cpu.max": "nonsense"}, 8),
        (V2, {"docker/a/cpu.max": "100000 0"}, 8),
        (
            V1,
            {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"},
            2,
        ),
        (V1, {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"memory/docker/a/cpu.cfs_quota_us": "1", "memory/docker/a/cpu.cfs_period_us": "1"}, 8),
        ("no groups at all", {}, 8),
    ],
)
def test_a_quota_is_the_most_that_there_is_and_is_rounded_down(
    groups: str, files: dict[str, str], count: int, tmp_path: Path
):
    assert processors(tree(tmp_path, groups, files)) == count


def test_affinity_counts_where_it_is_less_and_where_there_are_no_control_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert processors(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert processors(tree(tmp_path, V2, {"cpu.max": "200000 100000"})) == 1


def test_this_machine_has_a_processor():
    assert 1 <= processors() <= 8
