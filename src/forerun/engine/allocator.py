"""Tell the C allocator to keep freed memory instead of returning it to the system.

A step allocates and frees the same few megabytes over and over. By default glibc maps every large
buffer afresh, so each step pays for page faults: gathering 3 MB of K/V then costs more than the
attention it feeds. Measured figures are in docs/log.md. A no-op where there is no mallopt.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_REUSED_BYTES = 512 * 2**20


def keep_freed_memory() -> bool:
    """Raise glibc's mmap and trim thresholds; return whether that worked."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    largest = ctypes.c_int(_LARGEST_REUSED_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, largest)) and bool(mallopt(_M_TRIM_THRESHOLD, largest))


def give_back_freed_memory() -> None:
    """Return to the system what is freed by now; elsewhere than under glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
