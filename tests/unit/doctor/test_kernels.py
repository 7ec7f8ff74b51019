"""Kernel objects: the one in use, a reason for each other, and when a rebuild would help."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forerun.doctor.kernels import Compiler, KernelState, check_kernels, find_compiler
from forerun.doctor.report import Section
from forerun.kernels import KernelsUnavailable, loader
from forerun.kernels.loader import VARIANTS
from native_kernels import FOLDER, load_variant
from unit.doctor.sections import texts, the_problem, values

GCC = Compiler("g++", "g++ 12.2.0")
NO_COMPILER = Compiler("g++", None)
OLD_CPU = KernelsUnavailable("this CPU lacks avx512_bf16")
NOT_BUILT = KernelsUnavailable("it was not built", can_rebuild=True)
DAMAGED = KernelsUnavailable("kernels_avx512bf16.so is cut off", can_rebuild=True)


def check(
    chosen: str | None,
    faults: list[KernelsUnavailable | None],
    *,
    reason: str = "the reason",
    compiler: Compiler = GCC,
) -> Section:
    state = KernelState(
        chosen=chosen,
        reason=reason,
        faults=dict(zip(VARIANTS, faults, strict=True)),
        compiler=compiler,
    )
    return check_kernels(state)


def test_the_best_object_in_use_is_no_problem() -> None:
    section = check("avx512bf16", [None] * 4)
    assert section.problems == []
    assert texts(section)["in_use"] == "avx512bf16"
    assert texts(section)["object_avx512bf16"] == "in use: the best this CPU runs"
    assert texts(section)["object_avx2"] == "usable; avx512bf16 is better"


def test_an_instruction_the_cpu_lacks_is_no_problem_while_another_object_runs() -> None:
    section = check("avx512", [OLD_CPU, OLD_CPU, None, None], compiler=NO_COMPILER)
    assert section.problems == []
    assert texts(section)["object_avx512bf16"] == "not usable: this CPU lacks avx512_bf16"
    assert values(section)["object_avx512bf16"]["usable"] is False


def test_a_cpu_that_runs_no_object_is_told_what_the_kernels_need() -> None:
    section = check(None, [OLD_CPU] * 4, reason="this CPU has no AVX2")
    problem = the_problem(section)
    assert problem.what == "no native kernels: this CPU has no AVX2"
    assert "CPU with AVX2" in problem.advice
    assert texts(section)["in_use"] == "none, PyTorch computes: this CPU has no AVX2"


def test_nothing_built_and_no_compiler_asks_for_one() -> None:
    problem = the_problem(check(None, [NOT_BUILT] * 4, compiler=NO_COMPILER))
    assert "better kernels than PyTorch cannot be used" in problem.what
    assert problem.advice.startswith("install a C++ compiler")
    assert "pip install" in problem.advice


def test_nothing_built_with_a_compiler_asks_for_a_build() -> None:
    problem = the_problem(check(None, [NOT_BUILT] * 4))
    assert problem.advice.startswith("in the source folder run: python -m pip install")
    assert "g++ 12.2.0" in problem.advice


def test_a_damaged_best_object_is_a_problem() -> None:
    section = check(None, [DAMAGED, None, None, None])
    assert "avx512bf16: kernels_avx512bf16.so is cut off" in the_problem(section).what
    assert texts(section)["object_avx2"].startswith("usable, but not reached")


def test_a_better_object_that_was_not_built_is_a_problem() -> None:
    problem = the_problem(check("avx2", [OLD_CPU, OLD_CPU, NOT_BUILT, None]))
    assert problem.what == "better kernels than avx2 cannot be used (avx512: it was not built)"


def test_damage_to_a_worse_object_is_no_problem() -> None:
    section = check("avx512bf16", [None, None, DAMAGED, NOT_BUILT])
    assert section.problems == []
    assert texts(section)["object_avx2"] == "not usable: it was not built"


def test_the_compiler_is_what_cxx_says() -> None:
    assert find_compiler("no-such-compiler -O2") == Compiler("no-such-compiler", None)
    assert find_compiler("false") == Compiler("false", None)
    assert find_compiler("echo 13.1") == Compiler("echo", "13.1 --version")


class TestObjectsOnDisk:
    """What the loader says about real files, given to the check."""

    def explain(self, folder: Path, missing: frozenset[str] = frozenset()) -> dict[str, str]:
        flags = VARIANTS["avx512bf16"] - missing
        faults = loader.explain_objects(folder, flags)
        return {name: "" if fault is None else str(fault) for name, fault in faults.items()}

    def test_each_object_has_its_own_reason(self, tmp_path: Path) -> None:
        (tmp_path / "kernels_avx512.so").write_bytes(b"no shared object" * 100)
        found = self.explain(tmp_path, missing=frozenset({"avx512_bf16"}))
        assert found["avx512bf16"] == "this CPU lacks avx512_bf16"
        assert "kernels_avx512.so is not a 64-bit shared object" in found["avx512"]
        assert found["avx2"] == "it was not built"

    def test_another_interface_version_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = load_variant("avx2")
        shutil.copy(FOLDER / f"kernels_{kernels.variant}.so", tmp_path)
        assert self.explain(tmp_path)["avx2"] == ""
        monkeypatch.setattr(loader, "ABI_VERSION", -5)
        fault = loader.explain_objects(tmp_path, VARIANTS["avx2"])["avx2"]
        assert "has interface version" in str(fault)
        assert fault is not None
        assert fault.can_rebuild

    def test_another_platform_is_named_for_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loader.sys, "platform", "darwin")
        assert set(self.explain(tmp_path).values()) == {"they run on Linux only, this is darwin"}
