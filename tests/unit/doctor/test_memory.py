"""Memory and limits: what is there, and when the defaults do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.doctor import bandwidth
from forerun.doctor.bandwidth import measure_read_bandwidth
from forerun.doctor.memory import MemoryState, check_memory
from forerun.doctor.report import Section
from unit.doctor.sections import texts, the_problem, values

MEM_INFO = "MemTotal:       8388608 kB\nMemFree:  5 kB\nMemAvailable:   4194304 kB\n"


def check(**changes: Any) -> Section:
    state: dict[str, Any] = {
        "mem_info": MEM_INFO,
        "limit_bytes": None,
        "huge_pages": "always [madvise] never\n",
        "max_open_files": 4096,
        "bandwidth": 20e9,
        "kv_pool_bytes": 2**30,
        "num_running": 256,
        "num_clients": 1280,
    }
    return check_memory(MemoryState(**{**state, **changes}))


def test_a_machine_with_room_has_no_problem() -> None:
    section = check()
    assert section.problems == []
    assert values(section)["total_bytes"] == 8 * 2**30
    assert texts(section)["available_bytes"] == "4.0 GiB"
    assert texts(section)["transparent_huge_pages"] == "madvise"
    assert texts(section)["max_open_files"] == "4096: about 4032 clients at once"


def test_bandwidth_says_what_a_step_costs_at_least() -> None:
    assert "20.0 GB/s" in texts(check())["read_bandwidth_bytes_per_s"]
    assert "takes 50 ms" in texts(check())["read_bandwidth_bytes_per_s"]
    assert texts(check(bandwidth=None))["read_bandwidth_bytes_per_s"] == "not measured"


def test_a_cgroup_limit_below_the_default_pool_is_a_problem() -> None:
    problem = the_problem(check(limit_bytes=512 * 2**20))
    assert problem.what == "512 MiB of memory are free, the KV pool takes 1.0 GiB"
    assert "--kv-cache-memory" in problem.advice


def test_little_free_memory_is_a_problem() -> None:
    section = check(mem_info="MemTotal: 8388608 kB\nMemAvailable: 1000000 kB\n")
    assert "977 MiB of memory are free" in the_problem(section).what


def test_huge_pages_switched_off_are_a_problem() -> None:
    problem = the_problem(check(huge_pages="always madvise [never]\n"))
    assert "huge pages are off" in problem.what
    assert "madvise" in problem.advice


def test_open_files_matter_when_the_default_batch_does_not_fit() -> None:
    section = check(max_open_files=1024)
    assert section.problems == []
    assert "about 960 clients at once, of 1280" in texts(section)["max_open_files"]
    problem = the_problem(check(max_open_files=256))
    assert "256 open files" in problem.what
    assert "ulimit -n" in problem.advice


def test_a_system_that_tells_nothing_has_no_problem() -> None:
    section = check(mem_info="", huge_pages=None)
    assert section.problems == []
    assert values(section)["total_bytes"] is None
    assert texts(section)["transparent_huge_pages"] == "not told by this system"


@pytest.mark.parametrize(("budget_s", "best_s"), [(0.0, 2.0), (8.0, 2.0), (9.0, 1.0)])
def test_bandwidth_is_that_of_the_fastest_pass_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, best_s: float
) -> None:
    passes_s = [3.0, 2.0, 3.0, 1.0]
    instants_s = iter([instant for length in passes_s for instant in (0.0, length)])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(instants_s))
    assert measure_read_bandwidth(4096, budget_s=budget_s) == 4096 / best_s
