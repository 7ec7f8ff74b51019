"""Limits of control groups: the lowest of all levels, in version 2 and version 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.doctor.cgroups import read_cpu_quota, read_memory_limit

V1 = "9:name=systemd:/x\n4:memory:/box/inner\n2:cpu,cpuacct:/box\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 1.5),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ({"cpu.max": "300000 100000"}, 3.0),  # a container that sees the host's path
        ({}, None),
    ],
)
def test_version_2_takes_the_lowest_quota_of_all_levels(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    write(tmp_path, files)
    assert read_cpu_quota("0::/a/b\n", tmp_path) == quota


@pytest.mark.parametrize(("quota_us", "quota"), [("250000", 2.5), ("-1", None)])
def test_version_1_reads_quota_and_period(
    tmp_path: Path, quota_us: str, quota: float | None
) -> None:
    write(tmp_path, {"cpu/box/cpu.cfs_quota_us": quota_us, "cpu/box/cpu.cfs_period_us": "100000"})
    assert read_cpu_quota(V1, tmp_path) == quota


def test_the_lowest_memory_limit_counts(tmp_path: Path) -> None:
    write(tmp_path, {"a/memory.max": "max", "memory.max": str(2**30)})
    assert read_memory_limit("0::/a\n", tmp_path) == 2**30


def test_version_1_says_no_limit_with_a_large_number(tmp_path: Path) -> None:
    write(tmp_path, {"memory/box/inner/memory.limit_in_bytes": "9223372036854771712"})
    assert read_memory_limit(V1, tmp_path) is None
    write(tmp_path, {"memory/box/memory.limit_in_bytes": str(2**31)})
    assert read_memory_limit(V1, tmp_path) == 2**31


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert read_cpu_quota("", tmp_path) is None
    assert read_memory_limit("", tmp_path) is None
