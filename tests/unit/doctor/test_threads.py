"""Threads: one OpenMP runtime, no more threads than cores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from forerun import env
from forerun.doctor.report import Section
from forerun.doctor.threads import ThreadState, check_threads, find_openmp_runtimes
from unit.doctor.sections import texts, the_problem, values

OWN = Path("/site/torch/lib")
TORCH_GOMP = OWN / "libgomp.so.1"
OTHER_GOMP = Path("/site/scikit_learn.libs/libgomp-a34b3233.so.1.0.0")


def check(
    *,
    runtimes: tuple[Path, ...] = (TORCH_GOMP,),
    num_threads: int = 2,
    num_usable_cores: int = 2,
    variables: Mapping[str, str] | None = None,
) -> Section:
    state = ThreadState(
        num_threads=num_threads,
        num_interop_threads=2,
        num_usable_cores=num_usable_cores,
        runtimes=list(runtimes),
        own_folder=OWN,
        variables=variables or {},
    )
    return check_threads(state)


def test_one_runtime_and_a_thread_per_core_is_right() -> None:
    section = check()
    assert section.problems == []
    assert texts(section)["openmp_runtimes"] == "PyTorch's own libgomp.so.1"
    assert texts(section)["num_threads"] == "2 on 2 usable cores: PyTorch's default"
    assert texts(section)["variables"] == "none set"


def test_two_libgomps_are_a_problem_that_names_the_foreign_one() -> None:
    problem = the_problem(check(runtimes=(OTHER_GOMP, TORCH_GOMP)))
    assert "2 OpenMP runtimes" in problem.what
    assert str(OTHER_GOMP) in problem.advice
    assert str(TORCH_GOMP) not in problem.advice


def test_more_threads_than_the_quota_gives_are_a_problem() -> None:
    problem = the_problem(check(num_threads=8, num_usable_cores=2))
    assert "8 threads for 2 usable cores" in problem.what
    assert "--num-threads 2" in problem.advice


def test_fewer_threads_than_cores_are_explained_by_the_variable() -> None:
    section = check(num_threads=1, variables={"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"})
    assert section.problems == []
    assert texts(section)["num_threads"] == "1 on 2 usable cores: OMP_NUM_THREADS set"
    assert texts(section)["variables"] == "GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1"
    assert values(section)["variables"]["GOMP_SPINCOUNT"] == "0"


def test_variables_of_native_code_are_picked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("MY_OMP_SECRET", "2")
    found = env.native_variables()
    assert found["KMP_BLOCKTIME"] == "1"
    assert "MY_OMP_SECRET" not in found


def test_both_problems_are_found_at_once() -> None:
    section = check(runtimes=(OTHER_GOMP, TORCH_GOMP), num_threads=3)
    assert len(section.problems) == 2


def test_gnu_intel_and_llvm_runtimes_are_found_once_each() -> None:
    maps = "\n".join(
        [
            "7f00-7f01 r-xp 00000000 fe:00 11 /opt/torch/lib/libgomp.so.1",
            "7f01-7f02 r--p 00001000 fe:00 11 /opt/torch/lib/libgomp.so.1",
            "7f02-7f03 rw-p 00000000 00:00 0 ",
            "7f03-7f04 r-xp 00000000 fe:00 12 /opt/with space/libomp.so.5",
            "7f04-7f05 r-xp 00000000 fe:00 13 /opt/intel/libiomp5.so",
            "7f05-7f06 r-xp 00000000 fe:00 14 /opt/libompl.so",
            "7f06-7f07 r-xp 00000000 fe:00 15 /opt/libgomp.so.1/libm.so",
        ]
    )
    assert find_openmp_runtimes(maps) == [
        Path("/opt/intel/libiomp5.so"),
        Path("/opt/torch/lib/libgomp.so.1"),
        Path("/opt/with space/libomp.so.5"),
    ]
