"""Everything here holds for native kernels and for PyTorch alone."""

from __future__ import annotations

from unit.sampling.paths import path

__all__ = ["path"]
