"""The promise: whatever is wrong with the kernels, one line says so and PyTorch computes."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import forerun.kernels
from forerun.kernels import explain_kernels, find_kernels, ops
from forerun.kernels.abi import ABI_VERSION
from forerun.kernels.loader import VARIANTS

SOURCE = Path(__file__).parents[3]
OBJECT = "kernels_avx2.so"


def build_nothing(_folder: Path) -> None:
    """Leave the folder as a build without a compiler does."""


def cut_off(folder: Path) -> None:
    header = bytearray(4096)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 40, 9000)
    (folder / OBJECT).write_bytes(header)


def write_text(folder: Path) -> None:
    (folder / OBJECT).write_text("no shared object " * 100)


def compile_object(source: str) -> Callable[[Path], None]:
    """Return what builds an object from other C++ code than ours."""

    def build(folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / OBJECT)]
        subprocess.run(command, input=source, text=True, check=True)

    return build


without_version = compile_object("int something_else;")
other_version = compile_object('extern "C" int forerun_abi_version() { return -5; }')
without_functions = compile_object(
    f'extern "C" int forerun_abi_version() {{ return {ABI_VERSION}; }}'
)


@pytest.fixture
def fresh_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let this process look for kernels again, in an empty folder on a CPU with AVX2."""
    monkeypatch.setattr(forerun.kernels, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(forerun.kernels, "read_cpu_flags", lambda: VARIANTS["avx2"])
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    forerun.kernels._probe.cache_clear()
    yield tmp_path
    forerun.kernels._probe.cache_clear()


def fall_back(caplog: pytest.LogCaptureFixture) -> str:
    """Compute with what there is; return the one line that was logged."""
    with caplog.at_level(logging.INFO, logger="forerun"):
        rows = torch.randn(3, 32)
        computed = ops.gate(rows, "silu")
        ops.gate(rows, "silu")
    assert find_kernels() is None
    assert torch.equal(computed, ops.gate_reference(rows, "silu"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    line = record.getMessage()
    assert line.startswith("native kernels off, computing in PyTorch: ")
    assert line.endswith(explain_kernels())
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (build_nothing, "none were built for this CPU"),
        (cut_off, "is cut off"),
        (write_text, "is not a 64-bit shared object"),
        (without_version, "does not load"),
        (other_version, "has interface version -5"),
        (without_functions, "does not load"),
    ],
)
def test_a_bad_build_is_one_line_and_pytorch(
    fresh_probe: Path,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[Path], None],
    reason: str,
) -> None:
    build(fresh_probe)
    assert reason in fall_back(caplog)


def test_a_file_that_cannot_be_read_is_one_line_and_pytorch(
    fresh_probe: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (fresh_probe / OBJECT).touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in fall_back(caplog)


def test_an_old_cpu_is_one_line_and_pytorch(
    fresh_probe: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forerun.kernels, "read_cpu_flags", lambda: frozenset({"sse2"}))
    assert "this CPU has no AVX2" in fall_back(caplog)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_build_without_a_working_compiler_succeeds_without_objects(
    tmp_path: Path, compiler: str
) -> None:
    pytest.importorskip("setuptools")
    shutil.copy(SOURCE / "setup.py", tmp_path)
    shutil.copy(SOURCE / "pyproject.toml", tmp_path)
    (tmp_path / "README.md").touch()
    (tmp_path / "LICENSE").touch()
    cpp = Path("src", "forerun", "kernels", "cpp")
    shutil.copytree(SOURCE / cpp, tmp_path / cpp)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env=os.environ | {"CC": compiler, "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 'building extension "forerun.kernels.kernels_avx2" failed' in done.stderr + done.stdout
    assert list(tmp_path.rglob("*.so")) == []
