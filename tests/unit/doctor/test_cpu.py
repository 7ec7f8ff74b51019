"""The processor: cores that count, and instructions present or not."""

from __future__ import annotations

import pytest

from forerun.doctor.cpu import check_cpu, count_usable_cores
from unit.doctor.sections import texts, values

CPU_INFO = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz: fast\nflags\t\t: fpu avx2 fma\n"


@pytest.mark.parametrize(
    ("num_visible", "quota", "usable"),
    [(8, None, 8), (8, 2.0, 2), (8, 3.7, 3), (2, 16.0, 2), (4, 0.5, 1)],
)
def test_a_quota_below_the_visible_cores_counts(
    num_visible: int, quota: float | None, usable: int
) -> None:
    assert count_usable_cores(num_visible, quota) == usable


def test_an_old_cpu_lists_what_it_lacks() -> None:
    section = check_cpu(CPU_INFO, {"fpu", "avx2", "fma"}, num_visible=4, quota=1.5)
    assert texts(section)["model"] == "Some CPU @ 2 GHz: fast"
    assert values(section)["instruction_sets"] == ["avx2", "fma"]
    assert {"avx512f", "avx512_bf16", "amx_bf16"} <= set(values(section)["not_present"])
    assert texts(section)["cpu_quota"] == "cgroup quota 1.5"
    assert values(section)["num_usable_cores"] == 1


def test_a_system_that_tells_nothing_is_described_all_the_same() -> None:
    section = check_cpu("", set(), num_visible=1)
    assert texts(section)["model"] == "unknown"
    assert texts(section)["instruction_sets"] == "none of those Forerun uses"
    assert texts(section)["cpu_quota"] == "no cgroup quota"
