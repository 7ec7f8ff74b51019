"""Native CPU kernels: found once per process, optional everywhere.

C++ sources are in cpp/, compiled at install by setup.py. packed.py holds weights as the linear
kernel reads them, ops.py the small operations with their PyTorch versions, sampling_ops.py and
cut_ops.py sampling, draft_ops.py and ingest_ops.py what only block drafters do. attention/native.py
and models/segments.py call the rest. Nothing here knows models, requests or steps.
"""

from __future__ import annotations

import functools
from pathlib import Path

from forerun.kernels import loader
from forerun.kernels.cpu import read_cpu_flags
from forerun.kernels.loader import Kernels, KernelsUnavailable, load_kernels
from forerun.logs import get_logger

__all__ = ["Kernels", "KernelsUnavailable", "explain_kernels", "explain_objects", "find_kernels"]

logger = get_logger(__name__)


def find_kernels() -> Kernels | None:
    """Return the kernels of this machine, or None: explain_kernels() says why."""
    return _probe()[0]


def explain_kernels() -> str:
    """Return which kernels are used, or why none are."""
    return _probe()[1]


def explain_objects() -> dict[str, KernelsUnavailable | None]:
    """Return for every object, best first, why it cannot be used here; None if it can."""
    return loader.explain_objects(Path(__file__).parent, read_cpu_flags())


@functools.cache
def _probe() -> tuple[Kernels | None, str]:
    try:
        kernels = load_kernels(Path(__file__).parent, read_cpu_flags())
    except KernelsUnavailable as error:
        logger.warning("native kernels off, computing in PyTorch: %s", error)
        return None, str(error)
    logger.info("native kernels %s: the best this CPU runs", kernels.variant)
    return kernels, f"{kernels.variant} kernels"
