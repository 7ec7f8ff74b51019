"""Optional native kernels: one shared object per instruction set, chosen at run time.

Everything else is in pyproject.toml. A missing or failing compiler only warns: without kernels
Forerun computes in PyTorch. The objects are plain C interfaces, independent of PyTorch and of the
Python version. They use OpenMP but are not linked to it: at load time its symbols resolve to the
runtime that PyTorch brought along, so that one process never has two.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/forerun/kernels/cpp")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
VARIANTS = {
    "avx512bf16": [*AVX512_VNNI, "-mavx512bf16"],
    "avx512vnni": AVX512_VNNI,
    "avx512": AVX512,
    "avx2": AVX2,
}
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


class BuildKernels(build_ext):
    """Names the objects for ctypes, not for `import`."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return package/name.so without the interpreter's suffix."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


def list_kernels() -> list[Extension]:
    """Return the extensions this platform can have."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    return [
        Extension(
            f"forerun.kernels.kernels_{name}",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            extra_compile_args=[*FLAGS, *flags],
            language="c++",
            optional=True,
        )
        for name, flags in VARIANTS.items()
    ]


setup(ext_modules=list_kernels(), cmdclass={"build_ext": BuildKernels})
