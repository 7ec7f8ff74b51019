"""Find, check and load the shared object for this processor.

There must be one OpenMP runtime per process: two would start two sets of threads that fight for the
cores. The kernels are therefore not linked to one. PyTorch is loaded first, its libgomp is made
global, and the kernels' OpenMP symbols resolve to it. Whatever does not fit is a KernelsUnavailable
with a reason, never a crash: the caller computes in PyTorch then.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from forerun.kernels.abi import ABI_VERSION, FUNCTIONS
from forerun.kernels.cpu import find_openmp_runtimes

# Best first: what a CPU must have for each object.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
VARIANTS: dict[str, frozenset[str]] = {
    "avx512bf16": _AVX512_VNNI | {"avx512_bf16"},
    "avx512vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
}


class KernelsUnavailable(Exception):  # noqa: N818 (a state of the machine, not a mistake)
    """Native kernels cannot be used here; the message says why.

    `can_rebuild` tells whether building them again would help.
    """

    def __init__(self, message: str, *, can_rebuild: bool = False) -> None:
        super().__init__(message)
        self.can_rebuild = can_rebuild


class Kernels:
    """The loaded functions. Calls release the interpreter lock and may come from any thread."""

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.attention_workspace = _bind(library, "forerun_attention_workspace")
        self.attention = _bind(library, "forerun_attention")
        self.norm = _bind(library, "forerun_norm")
        self.rotate = _bind(library, "forerun_rotate")
        self.gate = _bind(library, "forerun_gate")
        self.argmax = _bind(library, "forerun_argmax")
        self.packed_bytes = _bind(library, "forerun_packed_bytes")
        self.pack = _bind(library, "forerun_pack")
        self.block_bytes = _bind(library, "forerun_block_bytes")
        self.pack_blocks = _bind(library, "forerun_pack_blocks")
        self.unpack = _bind(library, "forerun_unpack")
        self.linear = _bind(library, "forerun_linear")
        self.segment = _bind(library, "forerun_segment")
        self.forward = _bind(library, "forerun_forward")
        self.draft_bytes = _bind(library, "forerun_draft_bytes")
        self.draft = _bind(library, "forerun_draft")
        self.ingest = _bind(library, "forerun_ingest")
        self.lay_out = _bind(library, "forerun_lay_out")
        self.plan_attention = _bind(library, "forerun_plan_attention")
        self.sample = _bind(library, "forerun_sample")
        self.sample_listed = _bind(library, "forerun_sample_listed")
        self.measure = _bind(library, "forerun_measure")
        self.draw = _bind(library, "forerun_draw")
        self.draw_listed = _bind(library, "forerun_draw_listed")
        self.cut = _bind(library, "forerun_cut")
        self.mask_tail = _bind(library, "forerun_mask_tail")


def load_kernels(folder: Path, cpu_flags: Set[str]) -> Kernels:
    """Load the best object in a folder that this CPU can run; raises KernelsUnavailable."""
    _check_platform()
    return _load_object(_choose_object(folder, cpu_flags))


def explain_objects(folder: Path, cpu_flags: Set[str]) -> dict[str, KernelsUnavailable | None]:
    """Return for every object, best first, why it cannot be used here; None if it can."""
    return {variant: _find_fault(folder, variant, cpu_flags) for variant in VARIANTS}


def _find_fault(folder: Path, variant: str, cpu_flags: Set[str]) -> KernelsUnavailable | None:
    path = _object_path(folder, variant)
    missing = sorted(VARIANTS[variant] - cpu_flags)
    try:
        _check_platform()
        if missing:
            raise KernelsUnavailable(f"this CPU lacks {', '.join(missing)}")
        if not path.is_file():
            raise KernelsUnavailable("it was not built", can_rebuild=True)
        _load_object(path)
    except KernelsUnavailable as error:
        return error
    return None


def _check_platform() -> None:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"they run on Linux only, this is {sys.platform}")


def _object_path(folder: Path, variant: str) -> Path:
    return folder / f"kernels_{variant}.so"


def _choose_object(folder: Path, cpu_flags: Set[str]) -> Path:
    fitting = [variant for variant, needed in VARIANTS.items() if needed <= cpu_flags]
    if not fitting:
        raise KernelsUnavailable("this CPU has no AVX2")
    for variant in fitting:
        path = _object_path(folder, variant)
        if path.is_file():
            return path
    raise KernelsUnavailable(
        "none were built for this CPU; install again with a C++ compiler (g++) present",
        can_rebuild=True,
    )


def _load_object(path: Path) -> Kernels:
    _check_complete(path)
    _share_openmp()
    try:
        library = ctypes.CDLL(str(path))
        version = library.forerun_abi_version()
        if version != ABI_VERSION:
            raise KernelsUnavailable(
                f"{path.name} has interface version {version}, this is {ABI_VERSION}; "
                "install again",
                can_rebuild=True,
            )
        return Kernels(path.stem.removeprefix("kernels_"), library)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{path.name} does not load: {error}", can_rebuild=True) from error


def _check_complete(path: Path) -> None:
    """Refuse a cut-off file, which would crash the process when mapped.

    The section table is the last thing in a 64-bit ELF file; its place and size are in the header.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KernelsUnavailable(
            f"{path.name} cannot be read ({error.strerror}); install again", can_rebuild=True
        ) from error
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        raise KernelsUnavailable(
            f"{path.name} is not a 64-bit shared object; install again", can_rebuild=True
        )
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, num_entries = struct.unpack_from("<HH", data, 58)
    if table + entry_size * num_entries > len(data):
        raise KernelsUnavailable(f"{path.name} is cut off; install again", can_rebuild=True)


def _share_openmp() -> None:
    """Make PyTorch's libgomp visible to what is loaded after it."""
    own = Path(torch.__file__).parent / "lib"
    mapped = find_openmp_runtimes()
    runtimes = [path for path in mapped if path.parent == own] or mapped
    if len(runtimes) != 1:
        found = ", ".join(str(path) for path in runtimes) or "none"
        raise KernelsUnavailable(f"PyTorch's OpenMP runtime (libgomp) is not clear: {found}")
    try:
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelsUnavailable(f"PyTorch's OpenMP runtime cannot be shared: {error}") from error


def _bind(library: ctypes.CDLL, name: str) -> Any:
    params, result = FUNCTIONS[name]
    function = getattr(library, name)
    function.argtypes = [ctypes.POINTER(params)]
    function.restype = result
    return function
