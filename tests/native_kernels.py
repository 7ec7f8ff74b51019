"""The native kernels for tests: every object this machine has and can run, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

import forerun.kernels
from forerun.kernels import Kernels
from forerun.kernels.cpu import read_cpu_flags
from forerun.kernels.loader import VARIANTS, KernelsUnavailable, load_kernels

FOLDER = Path(forerun.kernels.__file__).parent


def load_variant(name: str) -> Kernels:
    """Return one variant; skips the test where it cannot be had."""
    flags = read_cpu_flags()
    if not VARIANTS[name] <= flags:
        pytest.skip(f"this CPU cannot run {name} kernels")
    try:
        kernels = load_kernels(FOLDER, VARIANTS[name])
    except KernelsUnavailable as error:
        pytest.skip(f"no {name} kernels: {error}")
    if kernels.variant != name:
        pytest.skip(f"no {name} kernels were built")
    return kernels
