"""Loading: the right object for the CPU, one OpenMP runtime, and a reason for every refusal."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forerun.kernels
from forerun.kernels import Kernels, explain_kernels, find_kernels, loader
from forerun.kernels.cpu import find_openmp_runtimes, read_cpu_flags
from forerun.kernels.loader import VARIANTS, KernelsUnavailable, load_kernels
from native_kernels import FOLDER

BEST = frozenset(VARIANTS["avx512bf16"])


def copy_object(kernels: Kernels, folder: Path) -> Path:
    """Return a copy of the object of these kernels, alone in a folder."""
    name = f"kernels_{kernels.variant}.so"
    return Path(shutil.copy(FOLDER / name, folder / name))


def test_the_best_object_the_cpu_can_run_is_chosen(kernels: Kernels, tmp_path: Path) -> None:
    for name in VARIANTS:
        shutil.copy(FOLDER / f"kernels_{kernels.variant}.so", tmp_path / f"kernels_{name}.so")
    assert load_kernels(tmp_path, BEST).variant == "avx512bf16"
    assert load_kernels(tmp_path, BEST - {"avx512_bf16"}).variant == "avx512vnni"
    assert load_kernels(tmp_path, BEST - {"avx512_vnni"}).variant == "avx512"
    assert load_kernels(tmp_path, BEST - {"avx512vl"}).variant == "avx2"
    (tmp_path / "kernels_avx512.so").unlink()
    assert load_kernels(tmp_path, BEST - {"avx512_vnni"}).variant == "avx2"


@pytest.mark.parametrize("missing", ["avx2", "fma", "f16c"])
def test_an_old_cpu_is_refused(missing: str) -> None:
    with pytest.raises(KernelsUnavailable, match="no AVX2"):
        load_kernels(FOLDER, BEST - {missing})


def test_nothing_built_asks_for_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"none were built .* C\+\+ compiler"):
        load_kernels(tmp_path, BEST)


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.sys, "platform", "darwin")
    with pytest.raises(KernelsUnavailable, match="Linux only, this is darwin"):
        load_kernels(FOLDER, BEST)


@pytest.mark.parametrize("keep", [0, 63, 4096, 0.5, -1])
def test_a_cut_off_object_is_refused(kernels: Kernels, tmp_path: Path, keep: float) -> None:
    path = copy_object(kernels, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep == 0.5 else int(keep)])
    with pytest.raises(KernelsUnavailable, match=r"is cut off|not a 64-bit shared object"):
        load_kernels(tmp_path, VARIANTS[kernels.variant])


def test_something_else_under_its_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels_avx2.so").write_bytes(b"no shared object" * 100)
    with pytest.raises(KernelsUnavailable, match=r"kernels_avx2\.so is not a 64-bit shared"):
        load_kernels(tmp_path, VARIANTS["avx2"])


def test_another_interface_version_is_refused(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "ABI_VERSION", -5)
    with pytest.raises(KernelsUnavailable, match="has interface version .*, this is -5"):
        load_kernels(FOLDER, VARIANTS[kernels.variant])


@pytest.mark.parametrize("found", [[], [Path("/a/libgomp.so.1"), Path("/b/libgomp.so.1")]])
def test_an_unclear_openmp_runtime_is_refused(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, found: list[Path]
) -> None:
    monkeypatch.setattr(loader, "find_openmp_runtimes", lambda: found)
    with pytest.raises(KernelsUnavailable, match="libgomp"):
        load_kernels(FOLDER, VARIANTS[kernels.variant])


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """In a fresh process, after both have used threads."""
    if find_kernels() is None:
        pytest.skip(f"no native kernels: {explain_kernels()}")
    code = (
        "import torch\n"
        "from forerun.kernels import ops\n"
        "from forerun.kernels.cpu import find_openmp_runtimes\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(200, 1000)\n"
        "assert ops.find_kernels() is not None\n"
        "ops.gate(torch.relu(x @ x.T), 'silu')\n"
        "print(*find_openmp_runtimes(), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout


def test_refusal_is_logged_once_and_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(forerun.kernels, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(forerun.kernels, "read_cpu_flags", lambda: BEST)
    # Handlers of earlier tests would write the record too, or once more.
    monkeypatch.setattr(logging.getLogger("forerun"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    forerun.kernels._probe.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="forerun"):
            assert find_kernels() is None
            assert find_kernels() is None
        assert "none were built" in explain_kernels()
        (record,) = caplog.records
        assert "native kernels off, computing in PyTorch: none were built" in record.message
    finally:
        forerun.kernels._probe.cache_clear()


def test_cpu_flags_are_those_of_the_first_cpu(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx2 fma\n\nprocessor : 1\nflags : fpu\n")
    assert read_cpu_flags(info) == {"fpu", "avx2", "fma"}
    assert read_cpu_flags(tmp_path / "missing") == frozenset()


def test_openmp_runtimes_are_read_from_the_memory_map(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fe:00 11 /opt/torch/lib/libgomp.so.1\n"
        "7f01-7f02 r--p 00001000 fe:00 11 /opt/torch/lib/libgomp.so.1\n"
        "7f02-7f03 rw-p 00000000 00:00 0 \n"
        "7f03-7f04 r-xp 00000000 fe:00 12 /usr/lib/with space/libgomp-a34b.so.1.0\n"
        "7f04-7f05 r-xp 00000000 fe:00 13 /usr/lib/libgompertz.txt/libm.so\n"
    )
    assert find_openmp_runtimes(maps) == [
        Path("/opt/torch/lib/libgomp.so.1"),
        Path("/usr/lib/with space/libgomp-a34b.so.1.0"),
    ]
    assert find_openmp_runtimes(tmp_path / "missing") == []
